"""Layers that stand in for those whose records cannot be told apart."""

from lightning_dp.replacements.attention import SeparableAttention
from lightning_dp.replacements.normalization import GroupNormForBatchNorm
from lightning_dp.replacements.recurrent import SeparableRecurrence
from lightning_dp.replacements.replace import replace_unsupported

__all__ = ["GroupNormForBatchNorm", "SeparableAttention", "SeparableRecurrence", "replace_unsupported"]
