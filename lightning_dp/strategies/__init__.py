"""The mechanism: private training as a Lightning strategy."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_dp.strategies.mechanism import PrivateMechanism
from lightning_dp.strategies.policy import Budget, PrivacyPolicy
from lightning_dp.strategies.single_device import PrivateStrategy

if PrivateStrategy.strategy_name not in StrategyRegistry:
    PrivateStrategy.register_strategies(StrategyRegistry)

__all__ = ["Budget", "PrivacyPolicy", "PrivateMechanism", "PrivateStrategy"]
