"""Records that nobody needs to be protected from, beside those that are."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader


class PublicDataLoader(DataLoader[Any]):
    """A ``DataLoader`` whose records are declared public: passed through as they are, neither sampled nor accounted.

    For a ``train_dataloader`` that returns a dictionary or list of loaders. One of them, a plain ``DataLoader``, holds
    the private records; all others must be of this class. ``training_step`` gets a batch of each, in the same
    structure. Nothing protects what is in a public batch. It may go through trainable layers under
    ``torch.no_grad()`` only: its gradient could not be told from that of private records, and is refused.

    Args:
        args: Those of :class:`torch.utils.data.DataLoader`.
        kwargs: Those of :class:`torch.utils.data.DataLoader`.

    Example:
        >>> import lightning_dp as ldp
        >>> from torch.utils.data import DataLoader
        >>> loaders = {"patients": DataLoader(range(90), 30), "prototypes": ldp.PublicDataLoader(range(10), 5)}
    """
