"""Case 21: 40 records, q = 0.05, two processes: often one of them, or both, have nothing, and nobody waits for ever."""

import torch
from launch import train

UPDATES = 30


def test_every_process_takes_every_step_with_or_without_records(tmp_path):
    """``launch`` ends all processes by SIGKILL after its time limit, and fails."""
    trainer = {"max_steps": UPDATES, "max_epochs": -1, "accumulate_grad_batches": 1}
    strategy = {"noise_multiplier": 1.0, "sampling_rate": 0.05}
    loader = {"batch_size": 1, "count": 40}
    first, second = train(tmp_path, "run", ranks=2, loader=loader, trainer=trainer, strategy=strategy)
    sizes = [(len(mine), len(other)) for mine, other in zip(first["taken"], second["taken"], strict=True)]
    assert len(sizes) == UPDATES
    assert (0, 0) in sizes, "choose another seed"
    assert any(mine > 0 == other for mine, other in sizes), "choose another seed"
    for seen in (first, second):
        assert seen["problem"] == ""
        assert len(seen["states"]) == UPDATES
        assert [entry["count"] for entry in seen["ledger"]["entries"]] == [UPDATES]
    assert all(torch.equal(*pair) for pair in zip(first["states"], second["states"], strict=True))
