"""Private training on several processes: the same as on one, whatever their number and however records fall on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import train, train_with_torchrun

UPDATES = 12
# About one record in an update, so that whole updates are empty, and shares of the others.
FEW = {"sampling_rate": 0.02}
SOME = {"sampling_rate": 0.2}


def spec(ranks: int, *, sigma: float = 0.0, chunks: int = 1, **strategy: Any) -> dict[str, Any]:
    trainer = {"max_steps": UPDATES, "max_epochs": -1, "accumulate_grad_batches": chunks}
    return {"ranks": ranks, "strategy": {"noise_multiplier": sigma, **strategy}, "trainer": trainer}


def assert_same(ranks: list[dict[str, Any]], one: dict[str, Any], updates: int = UPDATES) -> None:
    """All processes agree to the bit after every update, and with one process up to rounding."""
    assert len(one["states"]) == updates
    for seen in ranks:
        assert len(seen["states"]) == updates
        assert all(torch.equal(a, b) for a, b in zip(seen["states"], ranks[0]["states"], strict=True))
        assert seen["ledger"] == ranks[0]["ledger"]
        assert seen["guarantee"] == ranks[0]["guarantee"]
    for a, b in zip(ranks[0]["states"], one["states"], strict=True):
        assert float((a - b).abs().max()) <= 1e-6
    assert sum(entry["count"] for entry in ranks[0]["ledger"]["entries"]) == updates


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in [(2, 1, SOME), (3, 1, FEW), (3, 3, SOME)]]


@pytest.mark.parametrize(("ranks", "chunks", "sampling"), [(2, 3, FEW), *SLOW])
def test_several_processes_train_what_one_does(
    ranks: int, chunks: int, sampling: dict[str, float], tmp_path: Path
) -> None:
    (one,) = train(tmp_path, "one", **spec(1, chunks=chunks, **sampling))
    several = train(tmp_path, "several", **spec(ranks, chunks=chunks, **sampling))
    assert len(several) == ranks
    assert_same(several, one)
    # Logged by all processes together; not quite the mean, since Lightning halves the number of records as an integer.
    assert len({seen["metrics"]["shared_epoch"] for seen in several}) == 1
    assert several[0]["metrics"]["shared_epoch"] == pytest.approx(one["metrics"]["shared_epoch"], rel=0.5)


@pytest.mark.slow
def test_noise_is_added_once_for_all_processes(tmp_path: Path) -> None:
    (one,) = train(tmp_path, "one", **spec(1, sigma=1.0, **SOME))
    assert_same(train(tmp_path, "several", **spec(2, sigma=1.0, **SOME)), one)


@pytest.mark.slow
def test_processes_that_end_with_fit_hand_their_ledger_back(tmp_path: Path) -> None:
    (one,) = train(tmp_path, "one", **spec(1, sigma=1.0, **SOME))
    (parent,) = train(tmp_path, "spawned", **spec(2, sigma=1.0, start_method="spawn", **SOME))
    assert float((parent["final"] - one["final"]).abs().max()) <= 1e-6
    assert parent["guarantee"] == one["guarantee"]


@pytest.mark.slow
def test_processes_that_fail_leave_a_guarantee_that_says_so(tmp_path: Path) -> None:
    case = spec(2, sigma=1.0, start_method="spawn", **SOME)
    (parent,) = train(tmp_path, "failing", module="failing", **case)
    assert "out of luck" in parent["problem"]
    assert "NOT VALID AS STATED" in parent["guarantee"]
    assert "what they had spent is unknown" in parent["guarantee"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_goes_on_with_another_number_of_processes(ranks: int, tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "first.ckpt")
    first = train(tmp_path, "first", checkpoint=checkpoint, **spec(2, sigma=1.0, **SOME))
    case = spec(ranks, sigma=1.0, **SOME)
    case["trainer"]["max_steps"] = 2 * UPDATES
    later = train(tmp_path, "later", resume=checkpoint, **case)
    assert len(later) == ranks
    counts = {entry["release_id"]: entry["count"] for entry in later[0]["ledger"]["entries"]}
    assert sorted(counts.values()) == [UPDATES, UPDATES]
    assert first[0]["ledger"]["entries"][0]["release_id"] in counts
    for seen in later:
        assert seen["ledger"] == later[0]["ledger"]
        assert torch.equal(seen["final"], later[0]["final"])


@pytest.mark.slow
def test_torchrun_on_two_machines(tmp_path: Path) -> None:
    (one,) = train(tmp_path, "one", **spec(1, **SOME))
    case = spec(1, **SOME)
    case.pop("ranks")
    several = train_with_torchrun(tmp_path, "several", nodes=2, **case)
    assert len(several) == 2
    assert_same(several, one)


@pytest.mark.parametrize("data", [pytest.param("shards", marks=pytest.mark.slow), "splits"])
def test_processes_that_do_not_hold_the_same_records_are_refused(data: str, tmp_path: Path) -> None:
    # PRIVACY: a record at two places could enter an update twice, once from each process.
    for seen in train(tmp_path, data, data=data, **spec(2, sigma=1.0, **SOME)):
        assert "differs from process to process" in seen["problem"]
        assert not seen["states"]
