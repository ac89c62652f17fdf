"""The private loader against the user's loader that it replaces."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate

from lightning_dp import errors
from lightning_dp.sampling import (
    KeyStream,
    PoissonSampler,
    PrivateDataLoader,
    check_loader,
    fingerprint,
    insecure_key,
    null_record,
)

Pair = collections.namedtuple("Pair", ["image", "label"])


@dataclasses.dataclass
class Record:
    features: torch.Tensor
    name: str


def private(loader: DataLoader[Any], rate: float = 0.25, chunks: int = 1, updates: int = 40) -> PrivateDataLoader:
    sampler = PoissonSampler(
        num_records=len(loader.dataset),  # type: ignore[arg-type]
        sampling_rate=rate,
        updates_per_epoch=updates,
        num_chunks=chunks,
        stream=KeyStream(insecure_key(3), "sampling"),
    )
    return PrivateDataLoader(loader, sampler)


class Dictionaries(Dataset[dict[str, Any]]):
    """Records as a language-model data set gives them."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"ids": torch.full((4,), index + 1), "length": index + 1, "text": f"record {index}"}


def test_batches_hold_exactly_the_records_that_were_drawn() -> None:
    loader = private(DataLoader(TensorDataset(torch.arange(1, 41)), batch_size=10), chunks=3)
    drawn = list(iter(private(DataLoader(TensorDataset(torch.arange(1, 41)), batch_size=10), chunks=3).sampler))
    for (batch,), index in zip(loader, drawn, strict=True):
        assert batch.tolist() == ([i + 1 for i in index.indices] or [0])
        assert loader.info == (index.update, index.chunk, len(index.indices))


def test_workers_change_nothing() -> None:
    base = DataLoader(TensorDataset(torch.arange(1, 41)), batch_size=10)
    with_workers = DataLoader(base.dataset, batch_size=10, num_workers=2, multiprocessing_context="fork")
    one, two = private(base), private(with_workers)
    for (batch,), (other,) in zip(one, two, strict=True):
        assert torch.equal(batch, other)
        assert one.info == two.info


def test_an_empty_batch_has_the_structure_of_a_record_and_none_of_its_values() -> None:
    loader = private(DataLoader(Dictionaries(), batch_size=2), rate=0.02)
    empty = [batch for batch in loader if loader.info is not None and loader.info.num_records == 0]
    assert empty
    assert empty[0]["ids"].tolist() == [[0, 0, 0, 0]]
    assert empty[0]["length"].tolist() == [0]
    assert empty[0]["text"] == [""]


def test_the_collate_function_of_the_user_makes_the_batches() -> None:
    loader = private(DataLoader(Dictionaries(), batch_size=2, collate_fn=lambda rows: [row["length"] for row in rows]))
    assert all(isinstance(batch, list) for batch in loader)


def test_a_data_set_that_fetches_many_records_at_once_is_asked_once() -> None:
    calls = []

    class Batched(Dictionaries):
        def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
            calls.append(indices)
            return [self[i] for i in indices]

    loader = private(DataLoader(Batched(), batch_size=5), updates=5)
    list(loader)
    assert len(calls) == sum(
        len(index.indices) > 0 for index in private(DataLoader(Batched(), batch_size=5), updates=5).sampler
    )


@pytest.mark.parametrize("nested", [False, True])
def test_rows_of_tensors_are_read_at_once_and_equal_one_by_one(nested: bool) -> None:
    dataset: Dataset[Any] = TensorDataset(torch.randn(50, 3), torch.arange(50), torch.randn(50, 2, 2))
    if nested:
        dataset = Subset(Subset(dataset, list(range(5, 50))), [3, -1, 7, *range(10, 30)])
    fast = DataLoader(dataset, batch_size=10)
    slow = DataLoader(dataset, batch_size=10, collate_fn=lambda records: default_collate(records))
    for one, other in zip(private(fast), private(slow), strict=True):
        assert type(one) is type(other)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))


def test_attributes_of_the_data_set_stay_in_reach() -> None:
    data = TensorDataset(torch.arange(4))
    data.classes = ["a", "b"]  # type: ignore[attr-defined]
    loader = private(DataLoader(data, batch_size=2))
    assert len(loader.dataset) == 4
    assert loader.dataset.classes == ["a", "b"]


@pytest.mark.parametrize(
    "record",
    [
        torch.ones(2, 3),
        np.ones(4, dtype=np.float32),
        np.float64(2.5),
        (torch.ones(1), 5, 2.5, True, "name", b"raw", None),
        [1, [2, 3]],
        Pair(torch.ones(2), 3),
        {"a": {"b": torch.ones(2)}},
        collections.OrderedDict(a=1),
        Record(torch.ones(2), "x"),
        Image.new("RGB", (3, 2), (9, 9, 9)),
    ],
    ids=lambda record: type(record).__name__,
)
def test_a_null_record_keeps_types_and_shapes(record: Any) -> None:
    null = null_record(record)
    assert type(null) is type(record)
    assert not any(_values(null))
    assert len(_values(null)) == len(_values(record))


def _values(record: Any) -> list[Any]:
    if isinstance(record, torch.Tensor):
        return record.flatten().tolist()
    if isinstance(record, Image.Image):
        return np.asarray(record).flatten().tolist()
    if isinstance(record, (np.ndarray, np.generic)):
        return np.ravel(record).tolist()
    if dataclasses.is_dataclass(record):
        return _values(list(vars(record).values()))
    if isinstance(record, dict):
        return _values(list(record.values()))
    if isinstance(record, (list, tuple)):
        return [value for part in record for value in _values(part)]
    return [record]


def test_a_record_of_unknown_kind_is_refused_with_its_type() -> None:
    with pytest.raises(errors.UnsupportedDataError, match="`object`"):
        null_record({"x": object()})


def test_a_nested_subset_that_repeats_a_record_is_refused() -> None:
    data = TensorDataset(torch.arange(10))
    inner = Subset(data, [0, 1, 1, 2])
    with pytest.raises(errors.UnsupportedDataError, match="more than once"):
        check_loader(DataLoader(Subset(inner, [1, 2]), batch_size=1))
    check_loader(DataLoader(Subset(inner, [0, 1]), batch_size=1))


def test_fingerprints_tell_data_sets_apart_whose_records_are_at_other_places() -> None:
    records = TensorDataset(torch.arange(50.0))
    reversed_ones = TensorDataset(torch.arange(50.0).flip(0))
    parts = [Subset(records, [1, 2, 3]), Subset(records, [3, 2, 1]), ConcatDataset([records, Subset(records, [1])])]
    alike = [fingerprint(dataset) for dataset in (records, TensorDataset(torch.arange(50.0)))]
    assert alike[0] == alike[1]
    assert len({alike[0], fingerprint(reversed_ones), *map(fingerprint, parts)}) == 5
    assert fingerprint([1, 2]) != fingerprint([1, 2, 3])
