"""One private loader, alone or in a structure with public ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_dp import _compat
from lightning_dp.errors import TrainerSettingsError, UnsupportedDataError
from lightning_dp.sampling import PrivateDataLoader, PublicDataLoader
from lightning_dp.strategies.run import PrivateRun

_MODES = ("min_size", "max_size_cycle")


def check_batches(trainer: Trainer, run: PrivateRun) -> None:
    """Checks what Lightning made of the training data: one private loader, and whole updates only.

    Raises:
        UnsupportedDataError: There are several private loaders, or public ones that hand out no batch at times.
        TrainerSettingsError: ``limit_train_batches`` cuts through an update.
    """
    loaders = CombinedLoader(trainer.train_dataloader).flattened if run.has_data else []
    private = [loader for loader in loaders if not isinstance(loader, PublicDataLoader)]
    if len(private) != 1 or private[0] is not run.loader:
        raise UnsupportedDataError(
            "The training data comes from several loaders that may all hold private records. Private training draws"
            " from one: join data sets with `torch.utils.data.ConcatDataset` (each record once), and give public"
            " records in a `lightning_dp.PublicDataLoader`."
        )
    mode = _compat.combined_mode(trainer)
    if len(loaders) > 1 and mode not in _MODES:
        raise UnsupportedDataError(
            f"`CombinedLoader(mode={mode!r})` has batches without private records. Use one of"
            f" {', '.join(map(repr, _MODES))}."
        )
    batches, chunks = trainer.num_training_batches, run.plan.num_chunks
    if math.isinf(batches):
        raise UnsupportedDataError(
            "A `PublicDataLoader` streams its records, so that an epoch has no end. Give it a data set with `__len__`,"
            " or set `limit_train_batches` to a number of batches."
        )
    if batches % chunks:
        raise TrainerSettingsError(
            f"`limit_train_batches={trainer.limit_train_batches}` leaves {batches} physical batches an epoch, which"
            f" is no multiple of `accumulate_grad_batches={chunks}`: the last update would lack records that were"
            f" drawn for it. Use a multiple of {chunks}."
        )


def public_batches(trainer: Trainer) -> Callable[[Any], Any]:
    """Puts a batch of private records into what ``training_step`` gets: as it is, or beside public batches."""
    structure = trainer.train_dataloader
    if isinstance(structure, PrivateDataLoader):
        return lambda private: private
    public = apply_to_collection(structure, PublicDataLoader, lambda loader: next(iter(loader)))

    def beside(private: Any) -> Any:
        return apply_to_collection(public, PrivateDataLoader, lambda _: private)

    return beside
