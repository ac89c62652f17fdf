"""What a ledger promises, in one object that says of whom, against whom and on what grounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

ADJACENCY = "add_remove"
UNIT = "record"


def format_epsilon(epsilon: float, decimals: int = 4) -> str:
    """Writes epsilon with a number of decimals, rounded up, so that what is read is never below what holds."""
    if not math.isfinite(epsilon):
        return "infinite"
    scale = 10**decimals
    return f"{math.ceil(epsilon * scale) / scale:.{decimals}f}"


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """An (epsilon, delta) guarantee with everything needed to read it.

    For all data sets that differ by one unit in the way that ``adjacency`` says, and all sets of outcomes S,
    ``P[M(D) in S] <= exp(epsilon) P[M(D') in S] + delta`` (Dwork, McSherry, Nissim, Smith 2006).

    Attributes:
        epsilon: At least 0; infinite if a release carried no noise.
        delta: In (0, 1).
        num_updates: How many releases of a training run it covers.
        adjacency: ``"add_remove"``: one unit present or absent.
        unit: What is protected: ``"record"``, one element of the training data set.
        num_records: Number of records, public under this guarantee; ``None`` if none was declared.
        stamps: What weakens the guarantee beyond its numbers, such as an insecure seed; empty in a clean run.
    """

    epsilon: float
    delta: float
    num_updates: int
    adjacency: str = ADJACENCY
    unit: str = UNIT
    num_records: int | None = None
    stamps: tuple[str, ...] = ()

    @property
    def is_private(self) -> bool:
        """Whether epsilon is finite and nothing weakens the guarantee."""
        return math.isfinite(self.epsilon) and not self.stamps

    def __str__(self) -> str:
        size = f", N = {self.num_records:,} (public)" if self.num_records is not None else ""
        text = (
            f"({format_epsilon(self.epsilon)}, {self.delta:.3g})-differential privacy, unit: one {self.unit},"
            f" adjacency: {self.adjacency}{size}, from {self.num_updates:,} executed updates"
        )
        return text + "".join(f"; NOT VALID AS STATED: {stamp}" for stamp in self.stamps)
