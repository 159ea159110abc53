"""Batch norm over each rank's own rows, as DistributedDataParallel has it: a choice with a name, never a surprise."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .errors import InputError
from .override import Override

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class LocalBatchNorm(Override):
    """Statistics of each rank's rows instead of those of the global batch: no communication in the forward.

    By itself a compiled step normalises over the global batch, as one device would. With

        ms.compile(module_override={nn.BatchNorm2d: ms.LocalBatchNorm(groups=8)})

    the batch is cut into `groups` parts of equal size, each normalised alone; with as many groups as ranks share the
    batch, that needs no other rank. Running statistics become the mean over the groups', the same on all ranks. One
    device with the stand-in in the place of the module computes the same, so nothing depends on the mesh.

    Args:
        groups: Number of parts; a multiple of the number of ranks that the batch is split over.

    Raises:
        InputError: `groups` is less than one.

    Source: "ghost batch normalization", Hoffer, Hubara & Soudry 2017.
    """

    def __init__(self, groups: int) -> None:
        """Keep the number of groups."""
        if groups < 1:
            raise InputError(f"{groups} groups of rows", at="LocalBatchNorm(groups=...)", hint="the number of ranks")
        self.groups = groups

    def replacement(self, module: nn.Module) -> nn.Module:
        """The stand-in, with the parameters and running statistics of the module.

        Raises:
            InputError: The module is no batch norm, or its running statistics are plain averages.
        """
        if not isinstance(module, BATCH_NORMS):
            raise InputError(
                f"LocalBatchNorm in the place of a {type(module).__name__}",
                at="compile(module_override=...)",
                hint="nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d",
            )
        if module.momentum is None:
            raise InputError(
                "LocalBatchNorm for running statistics that are plain averages",
                at="nn.BatchNorm(momentum=None)",
                hint="a number as momentum",
            )
        return _LocalBatchNorm(module, self.groups)


class _LocalBatchNorm(nn.Module):
    """Groups of rows as more channels: a channel of a group is normalised over the rows of that group."""

    def __init__(self, norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d, groups: int) -> None:
        super().__init__()
        self.norm, self.groups = norm, groups
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        """Of f32[N, C, ...], likewise."""
        norm, groups = self.norm, self.groups
        if not norm.training:
            return norm(x)
        if x.shape[0] % groups:
            raise InputError(
                f"{x.shape[0]} rows in {groups} groups",
                at="LocalBatchNorm(groups=...)",
                hint="a global batch that divides, or fewer groups",
            )
        apart = x.unflatten(0, (groups, -1)).transpose(0, 1)  # [N / groups, groups, C, ...]
        mean, variance = self._each(norm.running_mean), self._each(norm.running_var)
        given = (mean, variance, self._each(norm.weight), self._each(norm.bias))
        y = F.batch_norm(apart.flatten(1, 2), *given, True, norm.momentum, norm.eps)  # type: ignore[arg-type]
        self._keep(mean, variance)
        return y.unflatten(1, (groups, -1)).transpose(0, 1).flatten(0, 1)

    def _each(self, value: Tensor | None) -> Tensor | None:
        """A number a channel, for each group."""
        return None if value is None else value.repeat(self.groups)

    def _keep(self, mean: Tensor | None, variance: Tensor | None) -> None:
        """Running statistics are the mean over the groups'."""
        norm = self.norm
        if norm.running_mean is None or norm.running_var is None or mean is None or variance is None:
            return
        norm.running_mean.copy_(mean.unflatten(0, (self.groups, -1)).mean(0))
        norm.running_var.copy_(variance.unflatten(0, (self.groups, -1)).mean(0))
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
