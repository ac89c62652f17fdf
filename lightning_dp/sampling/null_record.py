"""A record of the right structure that holds nothing: what an empty physical batch is made of."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from lightning_dp.errors import UnsupportedDataError


def null_record(record: Any) -> Any:
    """Returns a copy of ``record`` with every value replaced by zero, at any nesting.

    Tensors, arrays, numbers, strings, bytes, ``None``, PIL images, mappings, lists, tuples, named tuples and
    dataclasses are understood. Shapes, types and keys are kept; no value of the record is.

    Raises:
        UnsupportedDataError: The record holds an object of another kind.
    """
    # PRIVACY: nothing of the record but its structure may remain.
    if record is None:
        return None
    if isinstance(record, Tensor):
        return record.new_zeros(record.shape)
    if isinstance(record, (np.ndarray, np.generic)):
        return np.zeros_like(record) if isinstance(record, np.ndarray) else type(record)(0)
    if isinstance(record, (bool, int, float, complex, str, bytes)):
        return type(record)()
    return _null_container(record)


def _null_container(record: Any) -> Any:
    if isinstance(record, Mapping):
        values = {key: null_record(value) for key, value in record.items()}
        return values if type(record) is dict else type(record)(values)  # type: ignore[call-arg]
    if isinstance(record, tuple) and hasattr(record, "_fields"):
        return type(record)(*map(null_record, record))
    if isinstance(record, (list, tuple)):
        return type(record)(map(null_record, record))
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        fields = {field.name: null_record(getattr(record, field.name)) for field in dataclasses.fields(record)}
        return dataclasses.replace(record, **fields)
    pil_image = sys.modules.get("PIL.Image")
    if pil_image is not None and isinstance(record, pil_image.Image):
        return pil_image.new(record.mode, record.size)
    raise UnsupportedDataError(
        f"A record of the data set holds an object of type `{type(record).__qualname__}`, for which no empty"
        " counterpart is known, and Poisson sampling sometimes draws an empty batch. Let the data set return tensors,"
        " arrays, numbers, strings, or containers of them."
    )
