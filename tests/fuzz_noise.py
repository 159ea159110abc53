"""How far rounding alone can move what a step computes: plain torch against itself, each result a little off.

Stochastic arithmetic (Vignes, CESTAC): every op's floating-point result is multiplied by one plus a random number of
the size of the rounding. Where that moves the end as far as a plan does, the step cannot tell a right plan from a wrong
one: it divides by what is left of a sum that cancels, or it asks whether a number is above what it equals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from meshstep.capture.randomness import CountedRandom, Draws
from meshstep.capture.source import definition_line
from meshstep.runtime.seed import Seed
from meshstep.verification import MakeArgs, compare

ROUNDING = 2.0**-52


class Noise(TorchDispatchMode):
    """Moves each result by at most one rounding, upwards or downwards by chance.

    Args:
        chosen: Seed of the chances.
    """

    def __init__(self, chosen: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(chosen)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
            return found  # a view
        for leaf in pytree.tree_leaves(found):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
                leaf.mul_(self._factors(leaf))
        return found

    def _factors(self, x: Tensor) -> Tensor:
        chances = torch.rand(x.shape, generator=self._generator, dtype=torch.float64)
        return 1 + (2 * chances - 1) * ROUNDING


def moved_by_rounding(step: Callable[..., Any], make_args: MakeArgs, steps: int, draws: int = 8) -> float:
    """The largest error, as `compare` measures it, between the plain step in float64 and itself with noise."""

    def noisy(chosen: int) -> Callable[..., Any]:
        seed = Seed(None)

        def run(*args: Any, **kwargs: Any) -> Any:
            seed.begin()
            seed.now(torch.device("cpu"))
            with Noise(chosen), CountedRandom(Draws(definition_line(step)), seed.now):
                return step(*args, **kwargs)

        return run

    return max(compare(step, noisy(i), make_args, steps, torch.float64).max_error for i in range(draws))
