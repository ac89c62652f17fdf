"""One clear error for mixing ``pytorch_lightning`` with ``lightning.pytorch``.

The two packages hold the same classes twice and neither accepts the other's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from lightning_dp.errors import TrainerSettingsError


def watch_for_other_package(strategy_class: type | None = None) -> None:
    """Makes mixing ``pytorch_lightning`` with ``lightning.pytorch`` one clear error, where both are in use.

    Their own messages do not say why ("Expected a parent", "invalid strategy name"). Nothing happens in a process that
    has loaded one package only.
    """
    other = sys.modules.get("pytorch_lightning")
    if other is None or not hasattr(other, "strategies"):
        return
    if strategy_class is not None:
        # The other Trainer then takes a strategy object, and `check_package` refuses it when it is put to use.
        other.strategies.Strategy.register(strategy_class)
    if "private" not in other.strategies.StrategyRegistry:
        other.strategies.StrategyRegistry.register("private", refuse_other_package)
        # `Trainer.fit` refuses a module of the other package before it asks the strategy or a callback anything.
        Trainer.fit = _checking_module(Trainer.fit)  # type: ignore[method-assign]


def _checking_module(fit: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(fit)
    def checked(self: Trainer, model: Any, *args: Any, **kwargs: Any) -> None:
        check_package(model)
        fit(self, model, *args, **kwargs)

    return checked


def check_package(*objects: Any) -> None:
    """Refuses instances of classes that are built on ``pytorch_lightning``."""
    for value in objects:
        if any(kind.__module__.split(".")[0] == "pytorch_lightning" for kind in type(value).__mro__):
            refuse_other_package()


def refuse_other_package(**_: Any) -> None:
    """Raises the error that names both packages."""
    raise TrainerSettingsError(
        "A Trainer, module or data module comes from `pytorch_lightning`, while lightning_dp is built on"
        " `lightning.pytorch`; their classes do not mix. Replace `import pytorch_lightning as pl` by"
        " `import lightning.pytorch as pl` in every file."
    )
