"""Sampling against the law that the accountant assumes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from lightning_dp import errors
from lightning_dp.sampling import KeyStream, PoissonSampler, insecure_key, secret_key

NUM_RECORDS, RATE, DRAWS = 40, 0.3, 20_000


def make_sampler(**settings: object) -> PoissonSampler:
    chosen = {
        "num_records": NUM_RECORDS,
        "sampling_rate": RATE,
        "updates_per_epoch": 50,
        "stream": KeyStream(insecure_key(1), "sampling"),
    }
    return PoissonSampler(**{**chosen, **settings})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def inclusion() -> np.ndarray:
    """Who took part in which update, ``(DRAWS, NUM_RECORDS)``."""
    sampler = make_sampler()
    taken = np.zeros((DRAWS, NUM_RECORDS), dtype=bool)
    for update in range(DRAWS):
        taken[update, sampler.selection(update)] = True
    return taken


def test_every_record_takes_part_at_the_declared_rate(inclusion: np.ndarray) -> None:
    """Two-sided binomial test per record at 1e-6 / 40."""
    for count in inclusion.sum(axis=0):
        assert stats.binomtest(int(count), DRAWS, RATE).pvalue > 1e-6 / NUM_RECORDS


def test_batch_sizes_are_binomial(inclusion: np.ndarray) -> None:
    """Chi-square test over the sizes with at least 20 expected draws, at 1e-6."""
    sizes = np.bincount(inclusion.sum(axis=1), minlength=NUM_RECORDS + 1)
    expected = stats.binom.pmf(np.arange(NUM_RECORDS + 1), NUM_RECORDS, RATE) * DRAWS
    common = expected > 20
    observed = np.append(sizes[common], sizes[~common].sum())
    assert stats.chisquare(observed, np.append(expected[common], expected[~common].sum())).pvalue > 1e-6


def test_records_take_part_independently_of_each_other_and_of_the_update_before(inclusion: np.ndarray) -> None:
    """All pairwise correlations, and lag-1 ones, within 6.5 standard errors (1e-6 over 1,600 pairs)."""
    centred = (inclusion - RATE) / np.sqrt(RATE * (1 - RATE))
    same = centred.T @ centred / DRAWS - np.diag((centred**2).mean(axis=0))
    lagged = centred[1:].T @ centred[:-1] / (DRAWS - 1)
    assert np.abs([same, lagged]).max() < 6.5 / np.sqrt(DRAWS)


def test_a_selection_holds_no_record_twice() -> None:
    sampler = make_sampler(sampling_rate=0.9)
    for update in range(200):
        selection = sampler.selection(update)
        assert len(set(selection.tolist())) == len(selection)


def test_rate_one_takes_everybody() -> None:
    assert sorted(make_sampler(sampling_rate=1.0).selection(0)) == list(range(NUM_RECORDS))


@pytest.mark.parametrize("chunks", [1, 3, 7])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_chunks_of_all_processes_together_are_the_selection(chunks: int, world_size: int) -> None:
    samplers = [make_sampler(num_chunks=chunks, rank=rank, world_size=world_size) for rank in range(world_size)]
    streams = [list(sampler) for sampler in samplers]
    assert {len(stream) for stream in streams} == {50 * chunks}
    for step in range(50):
        parts = [stream[step * chunks + chunk] for stream in streams for chunk in range(chunks)]
        assert {part.update for part in parts} == {streams[0][step * chunks].update}
        together = list(itertools.chain.from_iterable(part.indices for part in parts))
        assert sorted(together) == sorted(samplers[0].selection(parts[0].update).tolist())


def test_no_pass_repeats_the_selections_of_another() -> None:
    sampler = make_sampler()
    seen = [index.update for _ in range(3) for index in itertools.islice(sampler, 10)]
    assert len(set(seen)) == 30


def test_an_empty_draw_is_kept() -> None:
    sizes = [len(index.indices) for index in make_sampler(num_records=3, sampling_rate=0.05)]
    assert 0 in sizes
    assert len(sizes) == 50


def test_drawing_does_not_touch_every_record() -> None:
    sampler = make_sampler(num_records=10**12, sampling_rate=1e-10)
    assert 40 < len(sampler.selection(0)) < 180


@pytest.mark.parametrize("rate", [0, -0.1, 1.1, float("nan"), "0.1", True])
def test_a_rate_that_is_no_probability_is_refused(rate: object) -> None:
    with pytest.raises(errors.InvalidValueError, match="sampling_rate"):
        make_sampler(sampling_rate=rate)


def test_purposes_and_keys_give_different_streams() -> None:
    key = secret_key()
    streams = [KeyStream(key, "sampling"), KeyStream(key, "noise"), KeyStream(secret_key(), "noise")]
    words = [stream.words(5, 4).tolist() for stream in streams]
    assert len({tuple(word) for word in words}) == 3
    assert KeyStream(key, "noise").words(5, 4).tolist() == words[1]
    assert KeyStream(key, "noise").words(6, 4).tolist() != words[1]


def test_the_stream_is_the_published_cipher() -> None:
    """AES-256 in counter mode under the derived key, computed block by block in ECB mode."""
    import hashlib

    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    key = bytes(range(32))
    derived = hashlib.blake2b(b"noise", key=key, digest_size=32).digest()
    block = Cipher(algorithms.AES(derived), modes.ECB()).encryptor()
    expected = b"".join(block.update((9).to_bytes(8, "big") + i.to_bytes(8, "big")) for i in range(4))
    assert KeyStream(key, "noise").words(9, 8).tobytes() == expected
