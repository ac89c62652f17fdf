"""What every release has in common: entry first, fresh secret noise, and one clear error for bad input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lightning_dp.accounting import Ledger
from lightning_dp.errors import InvalidValueError
from lightning_dp.releases import (
    choices,
    exponential_mechanism,
    gaussian_mechanism,
    laplace_mechanism,
    noisy_numbers,
    randomized_response,
)

Release = Callable[..., Any]

VALUES = np.zeros(200)
ANSWERS = np.zeros(200, dtype=np.int64)


def laplace(ledger: Ledger, **changes: Any) -> Any:
    return laplace_mechanism(**{"value": VALUES, "sensitivity": 1.0, "epsilon": 1.0, "ledger": ledger, **changes})


def gaussian(ledger: Ledger, **changes: Any) -> Any:
    settings = {"value": VALUES, "sensitivity": 1.0, "epsilon": 1.0, "delta": 1e-5, "ledger": ledger}
    return gaussian_mechanism(**{**settings, **changes})


def exponential(ledger: Ledger, **changes: Any) -> Any:
    settings = {"utilities": VALUES, "sensitivity": 1.0, "epsilon": 1.0, "ledger": ledger}
    return exponential_mechanism(**{**settings, **changes})


def response(ledger: Ledger, **changes: Any) -> Any:
    return randomized_response(**{"value": ANSWERS, "categories": 3, "epsilon": 1.0, "ledger": ledger, **changes})


EVERY = pytest.mark.parametrize("release", [laplace, gaussian, exponential, response])


@EVERY
def test_a_release_is_recorded_before_anything_is_drawn(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise MemoryError

    for module, name in (
        (noisy_numbers, "discrete_laplace"),
        (noisy_numbers, "discrete_gaussian"),
        (choices, "_first_kept"),
        (choices, "_coins"),
    ):
        monkeypatch.setattr(module, name, fail)
    ledger = Ledger()
    with pytest.raises(MemoryError):
        release(ledger)
    assert [(entry.count, entry.purpose) for entry in ledger.entries] == [(1, "release")]


@EVERY
def test_two_releases_share_no_noise(release: Release) -> None:
    """200 numbers, answers or candidates: equal by chance less than once in 1e30 pairs, but for single choices."""
    ledger = Ledger()
    first, second = (np.array([release(ledger) for _ in range(20)]) for _ in range(2))
    assert (first != second).any()
    assert len(ledger.entries) == 40
    assert len({entry.release_id for entry in ledger.entries}) == 40
    if release in (laplace, gaussian):
        assert len(np.unique(np.concatenate([first, second]))) == 40 * 200


@EVERY
def test_an_insecure_seed_repeats_the_noise_and_voids_the_guarantee(release: Release) -> None:
    ledger = Ledger()
    first, second = release(ledger, insecure_seed=5), release(ledger, insecure_seed=5)
    assert np.array_equal(first, second)
    assert ledger.stamps == ("a release follows from insecure_seed=5",)
    assert sum(entry.count for entry in ledger.entries) == 2


@EVERY
def test_global_seeds_do_not_reach_the_noise(release: Release) -> None:
    results = []
    for _ in range(2):
        np.random.seed(0)
        results.append(np.array([release(Ledger()) for _ in range(20)]))
    assert (results[0] != results[1]).any()


NUMBERS = (laplace, gaussian)
SCALED = (laplace, gaussian, exponential)
ALL = (laplace, gaussian, exponential, response)

BAD: list[tuple[tuple[Release, ...], dict[str, Any], str]] = [
    (NUMBERS, {"value": [1.0, math.nan]}, "`value` must hold finite numbers, got NaN or infinity"),
    (NUMBERS, {"value": math.inf}, "`value` must hold finite numbers"),
    (NUMBERS, {"value": []}, "`value` must hold at least one element"),
    (NUMBERS, {"value": "3"}, "`value` must hold integers or floats"),
    (NUMBERS, {"value": True}, "`value` must hold integers or floats"),
    (NUMBERS, {"value": 1j}, "`value` must hold integers or floats"),
    (NUMBERS, {"value": 2**70}, "`value` must hold integers or floats"),
    (NUMBERS, {"value": [[1], [2, 3]]}, "`value` must be a number or a rectangular array"),
    (SCALED, {"sensitivity": 0.0}, "`sensitivity` must be finite and greater than 0"),
    (SCALED, {"sensitivity": -1.0}, "`sensitivity` must be finite and greater than 0"),
    (SCALED, {"sensitivity": math.inf}, "`sensitivity` must be finite and greater than 0"),
    (SCALED, {"sensitivity": math.nan}, "`sensitivity` must be a number"),
    (ALL, {"epsilon": 0.0}, "`epsilon` must be finite and greater than 0"),
    (ALL, {"epsilon": -1}, "`epsilon` must be finite and greater than 0"),
    (ALL, {"epsilon": math.inf}, "`epsilon` must be finite and greater than 0"),
    (ALL, {"epsilon": "1"}, "`epsilon` must be a number, got '1' of type str. Remove the quotes"),
    (ALL, {"insecure_seed": -1}, "`insecure_seed` must be at least 0"),
    ((laplace, exponential), {"epsilon": 1e-320}, "no float can hold|Raise `epsilon`"),
    ((laplace, exponential), {"epsilon": 1e-15}, "Raise `epsilon`"),
    ((gaussian,), {"delta": 0.0}, "`delta` must lie strictly between 0 and 1"),
    ((gaussian,), {"delta": None}, "Give `epsilon` and `delta`, or `noise_multiplier`"),
    ((gaussian,), {"epsilon": None}, "Give `epsilon` and `delta`, or `noise_multiplier`"),
    ((gaussian,), {"noise_multiplier": 1.0}, "`noise_multiplier=1.0` was given together with"),
    ((gaussian,), {"epsilon": None, "delta": None, "noise_multiplier": 0}, "`noise_multiplier` must be finite and"),
    ((gaussian,), {"calibration": "classic"}, "`epsilon` must be below 1 for calibration='classic'"),
    ((gaussian,), {"calibration": "tight"}, "`calibration` must be 'analytic' or 'classic'"),
    ((exponential,), {"utilities": []}, "`utilities` must hold at least one element"),
    ((exponential,), {"utilities": 3.0}, "`utilities` must have one axis"),
    ((exponential,), {"utilities": [[1.0, 2.0]]}, "`utilities` must have one axis"),
    ((exponential,), {"utilities": [1.0, math.nan]}, "`utilities` must hold finite numbers"),
    ((exponential,), {"utilities": [1.0, -math.inf]}, "`utilities` must hold finite numbers"),
    ((response,), {"value": 3}, r"`value` must hold integers of 0 \.\. 2"),
    ((response,), {"value": [0, -1]}, r"`value` must hold integers of 0 \.\. 2"),
    ((response,), {"value": [0.0, 1.0]}, r"`value` must hold categories as integers"),
    ((response,), {"value": ["yes"]}, r"`value` must hold categories as integers"),
    ((response,), {"value": []}, "`value` must hold at least one element"),
    ((response,), {"value": True}, "`value` holds booleans, but `categories=3`"),
    ((response,), {"value": np.zeros(3, dtype=np.uint8), "categories": 257}, "cannot hold all 257 categories"),
    ((response,), {"categories": 1}, "`categories` must be at least 2"),
    ((response,), {"categories": 2.0}, "`categories` must be a whole number"),
]


@pytest.mark.parametrize(
    ("release", "changes", "message"),
    [(release, changes, message) for releases, changes, message in BAD for release in releases],
)
def test_bad_input_is_refused_and_leaves_the_ledger_alone(
    release: Release, changes: dict[str, Any], message: str
) -> None:
    ledger = Ledger()
    with pytest.raises(InvalidValueError, match=message):
        release(ledger, **changes)
    assert ledger.entries == ()
    assert ledger.stamps == ()


@EVERY
def test_a_release_without_a_ledger_is_refused(release: Release) -> None:
    with pytest.raises(InvalidValueError, match=r"`ledger` must be a Ledger, got None"):
        release(None)


@pytest.mark.parametrize("secret", [917263.5, 917263])
def test_errors_do_not_quote_the_data(secret: float) -> None:
    for release, name in ((laplace, "value"), (gaussian, "value"), (exponential, "utilities"), (response, "value")):
        with pytest.raises(InvalidValueError) as caught:
            release(Ledger(), **{name: [secret, math.inf] if release is not response else [int(secret)]})
        assert "917263" not in str(caught.value)
