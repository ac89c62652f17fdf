"""Case 20: processes must not drift apart, by 0.055 or at all; see also `tests/distributed/test_private_ddp.py`."""

import pytest
import torch
from launch import train

RULES = {
    "flat": None,
    "automatic": ["AutomaticClipping", {}],
    "per-layer": ["PerLayerClipping", {}],
    "adaptive": ["AdaptiveClipping", {"quantile": 0.5, "learning_rate": 0.5}],
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("sampling_rate", [0.02, 0.25], ids=["few", "many"])
def test_every_rule_gives_the_same_on_all_processes_as_on_one(rule, ranks, sampling_rate, tmp_path):
    """Also where processes, and with 0.02 whole updates, have no records."""
    case = {
        "trainer": {"max_steps": 10, "max_epochs": -1, "accumulate_grad_batches": 2},
        "strategy": {"noise_multiplier": 0.0, "sampling_rate": sampling_rate},
    }
    if RULES[rule]:
        case["clipping"] = RULES[rule]
    (one,) = train(tmp_path, "one", ranks=1, **case)
    several = train(tmp_path, "several", ranks=ranks, **case)
    assert [seen["problem"] for seen in (one, *several)] == [""] * (1 + ranks)
    sizes = [sum(len(seen["taken"][update]) for seen in several) for update in range(10)]
    assert sizes == [len(records) for records in one["taken"]]
    assert (0 in sizes) == (sampling_rate < 0.1)
    for seen in several:
        assert len(seen["states"]) == len(one["states"]) == 10
        for mine, first, alone in zip(seen["states"], several[0]["states"], one["states"], strict=True):
            assert torch.equal(mine, first)
            assert float((mine - alone).abs().max()) <= 1e-6
        assert seen["norms"] == several[0]["norms"] == pytest.approx(one["norms"])
        assert seen["ledger"] == several[0]["ledger"]
    assert (len(set(one["norms"])) > 1) == (rule == "adaptive")


@pytest.mark.slow
def test_an_adaptive_norm_with_noise_is_one_entry_and_the_same_everywhere(tmp_path):
    case = {
        "trainer": {"max_steps": 10, "max_epochs": -1, "accumulate_grad_batches": 1},
        "strategy": {"noise_multiplier": 1.0, "sampling_rate": 0.25},
        "clipping": RULES["adaptive"],
    }
    (one,) = train(tmp_path, "one", ranks=1, **case)
    first, second = train(tmp_path, "two", ranks=2, **case)
    assert first["norms"] == second["norms"] == pytest.approx(one["norms"])
    assert torch.equal(first["final"], second["final"])
    assert float((first["final"] - one["final"]).abs().max()) <= 1e-6
    assert [entry["count"] for entry in first["ledger"]["entries"]] == [10]
    assert first["ledger"] == second["ledger"]


@pytest.mark.slow
def test_a_clip_norm_found_before_training_is_the_same_everywhere(tmp_path):
    case = {
        "trainer": {"max_steps": 4, "max_epochs": -1, "accumulate_grad_batches": 1},
        "strategy": {"noise_multiplier": 1.0},
        "callbacks": {"ClipNormCalibrator": {"epsilon": 1.0, "expected_records": 30}},
    }
    (one,) = train(tmp_path, "one", ranks=1, loader={"batch_size": 32}, **case)
    first, second = train(tmp_path, "two", ranks=2, loader={"batch_size": 16}, **case)
    assert (one["problem"], first["problem"], second["problem"]) == ("", "", "")
    assert first["norms"] == second["norms"] == one["norms"] != [0.5] * 4
    assert torch.equal(first["final"], second["final"])
    assert sorted(entry["purpose"] for entry in first["ledger"]["entries"]) == ["clip norm", "training"]
    assert first["ledger"] == second["ledger"]
    assert first["guarantee"] == one["guarantee"]
