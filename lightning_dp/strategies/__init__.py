"""The mechanism: private training as a Lightning strategy."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_dp.strategies.distributed import PrivateDDPStrategy
from lightning_dp.strategies.mechanism import PrivateMechanism
from lightning_dp.strategies.policy import Budget, ClipNormPolicy, ClipNormQuery, PrivacyPolicy
from lightning_dp.strategies.single_device import PrivateStrategy

for _kind in (PrivateStrategy, PrivateDDPStrategy):
    if _kind.strategy_name not in StrategyRegistry:
        _kind.register_strategies(StrategyRegistry)

__all__ = [
    "Budget",
    "ClipNormPolicy",
    "ClipNormQuery",
    "PrivacyPolicy",
    "PrivateDDPStrategy",
    "PrivateMechanism",
    "PrivateStrategy",
]
