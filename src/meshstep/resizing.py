"""One program for calls whose tensors have other sizes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from torch import Tensor
from torch.distributed.tensor import DTensor

from .arguments import Call
from .ir.program import Program
from .ir.verifier import verify_program
from .layout import Layout
from .passes.family import Family, NoFamilyError, TooFewError, family
from .runtime.signature import Signature

log = logging.getLogger("meshstep")
Dim = tuple[int, int]  # of a leaf, which dim
Layouts = Sequence[Layout | None]
_KEPT = 4  # programs that are compared with a new one
_TRIES = 3  # to understand a change of sizes
_LEAST = 3  # sizes: two say what a formula is, another one whether it holds


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A program as it was compiled for one call."""

    signature: Signature
    layouts: tuple[Layout | None, ...]
    whole: Program
    local: Program


Compile = Callable[[Call], Compiled]


@dataclass(frozen=True, slots=True, eq=False)
class Resizable:
    """A step that was understood for all sizes.

    Args:
        signature: Of one call.
        ratios: The dims that change, each with its size by that of the first one.
        layouts: How the arguments lie.
        whole: The global programs.
        local: The local programs.
    """

    signature: Signature
    ratios: dict[Dim, Fraction]
    layouts: tuple[Layout | None, ...]
    whole: Family
    local: Family

    def size(self, signature: Signature) -> int | None:
        """The size that a call has; None if it is none of these."""
        apart = signature.sizes(self.signature)
        if apart is None or not apart.keys() <= self.ratios.keys():
            return None
        sizes = {dim: _size(signature, dim) for dim in self.ratios}
        first = sizes[next(iter(self.ratios))]
        return first if first > 1 and all(sizes[d] == r * first for d, r in self.ratios.items()) else None


@dataclass(slots=True)
class Resizing:
    """What one step has learnt about sizes."""

    known: list[Resizable] = field(default_factory=list)
    seen: list[Compiled] = field(default_factory=list)
    in_vain: dict[tuple[Dim, ...], int] = field(default_factory=dict)

    def find(self, signature: Signature, layouts: Layouts, whole: Program) -> Program | None:
        """The local program of a captured call, made of what is known; None if nothing fits.

        Args:
            signature: Of the call.
            layouts: How its arguments lie.
            whole: Its global program: the step must do for this size what it does for others.
        """
        for known in self.known:
            size = known.size(signature)
            if size is None or known.layouts != tuple(layouts):
                continue
            try:
                known.whole.check(whole, size)
                local = known.local.at(size)
            except NoFamilyError as error:
                log.info("size %d needs a program of its own: %s", size, error)
                continue
            verify_program(local, by="resizing")
            return replace(local, constants=whole.constants)
        return None

    def learn(self, call: Call, new: Compiled, dims: Sequence[Dim], compile_: Compile) -> None:
        """Understand a program that was just compiled, from others of the step.

        Args:
            call: The call.
            new: Its program.
            dims: What the user says changes from call to call; else it is what has changed.
            compile_: Gives the program for a call of other sizes.
        """
        if any(isinstance(leaf, DTensor) for leaf in call.leaves):
            return
        if dims:
            ratios = {dim: Fraction(_size(new.signature, dim), _size(new.signature, dims[0])) for dim in dims}
            self._understand(call, [new], ratios, (2, 3, 5), compile_)
            return
        for old in reversed(self.seen):
            apart = new.signature.sizes(old.signature)
            if apart and new.layouts == old.layouts and self.in_vain.get(tuple(apart), 0) < _TRIES:
                (n, m), *_ = apart.values()
                ratios = {dim: Fraction(ours, n) for dim, (ours, _) in apart.items()}
                together = all(theirs == ratios[dim] * m for dim, (_, theirs) in apart.items())
                more = [Fraction(size, n) for size in _others(n, m)]
                if together and self._understand(call, [new, old], ratios, more, compile_):
                    break
        self.seen = [*self.seen[1 - _KEPT :], new]

    def _understand(
        self,
        call: Call,
        found: list[Compiled],
        ratios: dict[Dim, Fraction],
        more: Sequence[int | Fraction],
        compile_: Compile,
    ) -> bool:
        """Find the formulas of what differs between programs.

        Args:
            call: The call.
            found: Programs for its size, and for others.
            ratios: The dims that change.
            more: The other sizes by that of the call that are to be tried, as many as are needed.
            compile_: Gives the programs for them.
        """
        name = found[0].whole.name
        try:
            if len(found) > 1:
                _families(found, ratios)  # if these two are none, a third one is in vain
        except TooFewError:
            pass
        except NoFamilyError as error:
            log.info("%s: one program for each size (%s)", name, error)
            return False
        for by in more:
            try:
                found = [*found, compile_(_resized(call, ratios, by))]
                if len(found) < _LEAST:
                    continue
                whole, local = _families(found, ratios)
            except TooFewError:
                continue
            except Exception as error:  # also what the user's Python says of a size that it was never given
                log.info("%s: one program for each size (%s)", name, error)
                break
            self.known.append(Resizable(found[0].signature, ratios, found[0].layouts, whole, local))
            return True
        self.in_vain[tuple(ratios)] = self.in_vain.get(tuple(ratios), 0) + 1
        return False


def _others(n: int, m: int) -> tuple[int, int]:
    """Sizes to try with two that were met: they divide by what those do, and the first lies between if it can."""
    low, high, unit = min(n, m), max(n, m), math.gcd(n, m)
    return (low + unit, high + unit) if high - low > unit else (high + unit, high + 2 * unit)


def _families(found: Sequence[Compiled], ratios: dict[Dim, Fraction]) -> tuple[Family, Family]:
    """Those of the global programs and of the local ones."""
    sizes = [_size(one.signature, next(iter(ratios))) for one in found]
    if min(sizes) < 2:
        raise NoFamilyError("a single row is a case of its own")
    if any(one.layouts != found[0].layouts for one in found):
        raise NoFamilyError("arguments of other sizes lie otherwise")
    return family([one.whole for one in found], sizes), family([one.local for one in found], sizes)


def _size(signature: Signature, dim: Dim) -> int:
    size: int = signature.leaves[dim[0]][0].shape[dim[1]]
    return size


def _resized(call: Call, ratios: dict[Dim, Fraction], times: int | Fraction) -> Call:
    """The call with tensors of other sizes, which take no memory and have no values."""
    leaves = list(call.leaves)
    for index, leaf in enumerate(leaves):
        dims = [dim for of, dim in ratios if of == index]
        if dims and isinstance(leaf, Tensor):
            shape = [int(n * times) if d in dims else n for d, n in enumerate(leaf.shape)]
            leaves[index] = leaf.detach().new_empty(1).expand(shape).requires_grad_(leaf.requires_grad)
    return replace(call, leaves=leaves)
