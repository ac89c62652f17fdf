"""Case 19: Lightning's default `use_distributed_sampler=True` on two processes; validation keeps its sampler."""

import pytest
from launch import train


@pytest.mark.slow
@pytest.mark.parametrize("use_distributed_sampler", [None, True])
def test_the_default_sampler_setting_works_and_validation_is_shared_out(use_distributed_sampler, tmp_path):
    trainer = {"max_epochs": 2, "accumulate_grad_batches": 1}
    if use_distributed_sampler is not None:
        trainer["use_distributed_sampler"] = use_distributed_sampler
    ranks = train(tmp_path, "run", ranks=2, module="validated", strategy={"noise_multiplier": 1.0}, trainer=trainer)
    assert [seen["problem"] for seen in ranks] == ["", ""]
    for seen in ranks:
        assert len(seen["states"]) == 4  # q = 2 * 16 / 64
        assert seen["samplers"] == ["DistributedSampler"]
        # Lightning's sanity check of two batches, then 32 of the 64 records in each of two epochs.
        assert seen["validated"] == [8] * (2 + 4 + 4)
    union = [first + second for first, second in zip(*(seen["taken"] for seen in ranks), strict=True)]
    assert all(len(set(records)) == len(records) for records in union)
    assert ranks[0]["metrics"]["val_loss"] == ranks[1]["metrics"]["val_loss"]
