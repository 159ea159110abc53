"""The forward and the backward of a function as graphs, for compilers of the user's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..capture.tree import flatten, paths
from ..errors import InputError
from ..mesh import Mesh
from ..passes import lower
from ..passes.split import split
from ..runtime.cache import Cache
from ..runtime.seed import Seed
from ..runtime.signature import Guards, Signature
from .pair import Pair
from .traced import Traced

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
_ALONE = Mesh(alone=1)


def aot_function(
    fn: Callable[..., Any],
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    *,
    pre_compile_fn: Callable[[list[Any]], Sequence[Any]] | None = None,
) -> Callable[..., Any]:
    """Trace a function and its backward ahead of time into two graphs of aten ops; run what compilers make of them.

    The forward takes the tensors among the arguments, in order, and then the tensors that the function has from
    elsewhere; it returns the tensors that the function returns, and then what the backward needs. The backward takes
    some of the forward's inputs, what the forward saved, and the gradients of those outputs that have one; it returns
    the gradients of the arguments that require one. A compiler is called once for each kind of call, at the first one.

    Args:
        fn: A function of tensors, in any structure; other arguments are compiled in.
        fw_compiler: Takes the forward and inputs like those that it will get; returns what is run in its place, with
            the same inputs and outputs: a sharded form of it, say.
        bw_compiler: The same for the backward; None is `fw_compiler`.
        pre_compile_fn: Takes the flat arguments of a call and returns as many: the function is traced with their shapes
            and dtypes instead. So a call with one rank's rows can be traced with those of all ranks.

    Returns:
        A function of the same arguments, under autograd.

    Raises:
        InputError: `fn` or `fw_compiler` is no function, or `pre_compile_fn` returns something else.
        CaptureError: The function cannot be traced, or computes with a tensor that requires a gradient and is no
            argument.
    """
    for given, what in ((fn, "fn"), (fw_compiler, "fw_compiler")):
        if not callable(given):
            raise InputError(
                f"{what} is a {type(given).__name__}", at="aot_function(fn, fw_compiler, ...)", hint="a function"
            )
    cache: Cache[Pair] = Cache()
    seed = Seed(None)

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        arguments, spec = flatten((args, kwargs))
        leaves, names = [None, *arguments], ["function", *(path or "input" for path in paths(spec))]
        seed.begin()
        signature = Signature.of(spec, names, leaves)
        found = cache.find(signature, leaves)
        if not isinstance(found, str):
            return found[0](leaves, found[1])
        traced = Traced(fn, None, spec, seed, _ALONE)
        pair, guards = _compile(traced, names, leaves, _logical(leaves, pre_compile_fn), (fw_compiler, bw_compiler))
        inputs = guards.bind(leaves)
        assert not isinstance(inputs, str), inputs
        cache.add(signature, guards, pair, found, getattr(fn, "__name__", "function"))
        return pair(leaves, inputs)

    return run


def _logical(leaves: Sequence[Any], pre_compile_fn: Callable[[list[Any]], Sequence[Any]] | None) -> list[Any]:
    """The leaves that are traced: tensors like those of the call, or of other shapes."""
    found = list(leaves[1:]) if pre_compile_fn is None else list(pre_compile_fn(list(leaves[1:])))
    alike = len(found) == len(leaves) - 1 and all(
        isinstance(a, Tensor) is isinstance(b, Tensor) for a, b in zip(found, leaves[1:], strict=True)
    )
    if not alike:
        raise InputError(
            f"pre_compile_fn returned {len(found)} values for {len(leaves) - 1} arguments, or others than tensors",
            at="aot_function(pre_compile_fn=...)",
            hint="one value for each leaf of the arguments, a tensor for a tensor",
        )
    return [None, *found]


def _compile(
    traced: Traced,
    names: list[str],
    leaves: list[Any],
    logical: list[Any],
    compilers: tuple[Compiler, Compiler | None],
) -> tuple[Pair, Guards]:
    shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in logical]
    given = [_plain(to, leaf) if isinstance(leaf, Tensor) else leaf for to, leaf in zip(logical, leaves, strict=True)]
    captured = alone = traced.forward(given, names, shapes)
    late: list[int] = []
    if any(output.requires_grad for output in traced.outputs):
        for i, output in enumerate(traced.outputs):
            if output.requires_grad:
                names, shapes = [*names, f"gradient of output {i}"], [*shapes, tuple(output.shape)]
                given = [*given, torch.empty(0, dtype=output.dtype, device=output.device)]
        captured = traced.joint(given, names, shapes)
        late = traced.gradients(captured)
    cut = split(captured.program, late)
    modules = [lower(part, {}) for part in ([cut.forward, cut.backward] if late else [cut.forward])]
    forward, backward = compilers
    return Pair(alone, captured, cut, modules, (forward, backward or forward), traced), Guards(
        captured, captured.program, gradients=False
    )


def _plain(logical: Tensor, real: Tensor) -> Tensor:
    """A tensor that says dtype, device, and whether it wants a gradient."""
    return torch.empty(0, dtype=logical.dtype, device=logical.device).requires_grad_(real.requires_grad)
