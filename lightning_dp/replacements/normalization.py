"""Group normalization in place of batch normalization: each record by itself."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_dp._compat import BatchNorm

_MOST_GROUPS, _LEAST_CHANNELS = 32, 4  # of one group


class GroupNormForBatchNorm(nn.GroupNorm):
    """Normalises each record over groups of channels, and is saved as the ``BatchNorm`` that it stands for.

    Its outputs are other ones, as those of a ``BatchNorm`` depend on the batch. It takes over scale and shift, and
    keeps the running statistics as they were: they are saved and never used.

    There are up to 32 groups of at least 4 channels each, and one for inputs that may have no positions
    (``BatchNorm1d``), where a group of one channel would hold a single number, which normalised is zero.

    Args:
        original: Whose settings and weights it takes over.
    """

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, original: BatchNorm) -> None:
        super().__init__(_num_groups(original), original.num_features, original.eps, affine=False)
        self.affine, self.weight, self.bias = original.affine, original.weight, original.bias
        for name, statistic in original.named_buffers(recurse=False):
            self.register_buffer(name, statistic)


def _num_groups(original: BatchNorm) -> int:
    channels = original.num_features
    if isinstance(original, nn.BatchNorm1d):
        return 1
    most = max(1, min(_MOST_GROUPS, channels // _LEAST_CHANNELS))
    return max(groups for groups in range(1, most + 1) if channels % groups == 0)
