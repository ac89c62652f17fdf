"""Case 23: `batch_size` is that of one process, as in Lightning; both are printed, and q is that of the union."""

import pytest
from launch import train

from lightning_dp import PrivateDDPStrategy
from lightning_dp.strategies import PrivateMechanism


def run(folder, name, ranks, batch_size, chunks=1):
    return train(
        folder,
        name,
        ranks=ranks,
        loader={"batch_size": batch_size},
        trainer={"max_steps": 4, "max_epochs": -1, "accumulate_grad_batches": chunks},
        strategy={"noise_multiplier": 1.0},
        callbacks={"PrivacyMonitor": {"delta": 1e-5}},
    )


def words(seen):
    return " ".join(seen["printed"].replace("│", " ").split())


def test_the_number_of_processes_does_not_change_an_update_of_the_same_size(tmp_path):
    (one,) = run(tmp_path, "one", 1, 16)
    first, second = run(tmp_path, "two", 2, 8)
    assert "expected batch 16 records, 16 per process" in words(one)
    assert "expected batch 16 records, 8 per process" in words(first)
    assert words(second) == "", "only the first process prints"
    for mine, alone in zip(first["states"], one["states"], strict=True):
        assert float((mine - alone).abs().max()) <= 1e-6
    assert first["guarantee"] == one["guarantee"]


@pytest.mark.slow
def test_the_same_batch_size_on_twice_the_processes_is_twice_the_update(tmp_path):
    first, _ = run(tmp_path, "two", 2, 16)
    assert "expected batch 32 records, 16 per process" in words(first)
    (one,) = run(tmp_path, "one", 1, 16, chunks=2)
    assert first["guarantee"] == one["guarantee"]


def test_it_is_documented():
    assert "batch_size * accumulate_grad_batches * processes / N" in " ".join(PrivateMechanism.__doc__.split())
    assert "does not depend on their number" in " ".join(PrivateDDPStrategy.__doc__.split())
