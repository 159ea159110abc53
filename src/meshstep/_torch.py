"""Every private symbol of PyTorch that meshstep uses, with the versions it was tested on. Nowhere else.

Tested: torch 2.13.0.
"""

from __future__ import annotations

import contextlib
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import MeshstepError

SUPPORTED = ((2, 13), (2, 14))  # from, up to but not including


class UnsupportedTorchError(MeshstepError, ImportError):
    """This PyTorch is not one that meshstep was tested on."""


def check_version(version: str = torch.__version__) -> None:
    """Refuse a PyTorch that was not tested.

    Raises:
        UnsupportedTorchError: `version` is out of range.
    """
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    low, high = ((f"{major}.{minor}") for major, minor in SUPPORTED)
    if not SUPPORTED[0] <= found < SUPPORTED[1]:
        raise UnsupportedTorchError(
            f"meshstep needs torch >={low},<{high}, and this is torch {version}",
            at="import meshstep",
            hint="pip install 'torch==2.13.*'",
        )


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Make `torch.compiler.is_compiling()` true, so that optimizers and models take their tensor-only paths."""
    before, mkldnn = torch.compiler._is_compiling_flag, torch._C._get_mkldnn_enabled()
    torch.compiler._is_compiling_flag = True
    torch._C._set_mkldnn_enabled(False)  # its recurrent layers are one op that nobody can shard
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
        torch._C._set_mkldnn_enabled(mkldnn)


def storage_id(tensor: torch.Tensor) -> int:
    """What tells one storage from another as long as both live."""
    return tensor.untyped_storage()._cdata


def decompositions(ops: Iterable[Any]) -> dict[Any, Callable]:
    """PyTorch's own decompositions of some ops into simpler ones."""
    return dict(get_decompositions(list(ops)))


@cache
def has_composite_kernel(op: Any) -> bool:
    """Whether an op is only a composition of others, so that `op.decompose` gives them."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


# By itself Inductor waits for a collective right where it is launched.
_WAIT_LATE = {"reorder_for_compute_comm_overlap": True, "reorder_for_compute_comm_overlap_passes": ["sink_waits"]}


def compile_with_inductor(
    module: torch.fx.GraphModule, inputs: Sequence[Any], expansions: Mapping[OpOverload, Callable[..., Any]]
) -> Callable[..., Any]:
    """Compile a graph of aten ops by Inductor.

    Args:
        module: The graph.
        inputs: Its first inputs.
        expansions: Ops that are no aten ops, with functions that compute them by aten ops.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    with torch.no_grad(), config.patch(_WAIT_LATE):
        compiled: Any = compile_fx(module, list(inputs), decompositions={**select_decomp_table(), **expansions})
        return compiled


def inductor_cache() -> Path:
    """The directory that Inductor keeps compiled code in, whether it is there or not."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()).absolute()


def tensor_hooks(tensor: torch.Tensor) -> tuple[tuple[Callable, ...], tuple[Callable, ...]]:
    """The functions that `register_hook` and `register_post_accumulate_grad_hook` have put on a tensor."""
    hooks: Any = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    before, after = (tuple((found or {}).values()) for found in hooks)
    return before, after


_HOOKS = (operator.attrgetter("_backward_hooks"), operator.attrgetter("_post_accumulate_grad_hooks"))


def hooks_by_place(tensors: Sequence[torch.Tensor]) -> dict[int, tuple[Any, ...]]:
    """The functions of `tensor_hooks` of those tensors that have some, by their place in the list."""
    if not any(any(map(hooks, tensors)) for hooks in _HOOKS):  # asked at every call, of every parameter
        return {}
    found = enumerate(map(tensor_hooks, tensors))
    return {i: hooks for i, hooks in found if any(hooks)}


@contextlib.contextmanager
def without_hooks(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """The functions that `register_hook` and `register_post_accumulate_grad_hook` have put on tensors do not run."""
    tables: list[Any] = [t for tensor in tensors for t in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)]
    held = [(table, dict(table)) for table in tables if table]
    try:
        for table, _ in held:
            table.clear()
        yield
    finally:
        for table, before in held:
            table.update(before)


def default_store() -> Any:
    """The key-value store that the processes of the default group met at."""
    return torch.distributed.distributed_c10d._get_default_store()


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning-rate schedulers that the optimizer has stepped: they warn of a step that they did not see."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


@contextlib.contextmanager
def adafactor_by(update: Callable[..., None]) -> Iterator[None]:
    """Let `torch.optim.Adafactor` compute by another function of the same arguments as `torch`'s functional form."""
    module: Any = torch.optim._adafactor
    before, module.adafactor = module.adafactor, update
    try:
        yield
    finally:
        module.adafactor = before


@contextlib.contextmanager
def skip_dispatch_modes() -> Iterator[None]:
    """Run ops on real tensors although a tracer and a fake mode are active."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


def has_effects(op: OpOverload) -> bool:
    """Whether an op was registered as one that does more than compute its outputs."""
    from torch._higher_order_ops.effects import has_effects as registered

    return bool(registered(op))


@cache
def has_native_kernel(op: OpOverload) -> bool:
    """Whether compiled code computes an op, on any device; else Python does."""
    found = re.findall(
        r"^(?:CPU|CUDA|Composite\w+)(?:\[alias\])?: registered at (.+?):\d+ ", torch._C._dispatch_dump(op.name()), re.M
    )
    return any(file.endswith((".cpp", ".cc", ".cxx", ".cu", ".h", ".hpp", ".cuh", ".mm")) for file in found)


def registered_sharding(op: OpOverload) -> Callable[..., Any] | None:
    """The function given to torch's public `register_sharding` for an op; None if there is none."""
    from torch.distributed.tensor import DTensor

    strategy: Any = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs.get(op)
    if not isinstance(strategy, partial) or not strategy.func.__qualname__.startswith("register_sharding."):
        return None
    return strategy.args[0]


def next_sequence_number() -> int:
    """The number that the next autograd node created on this thread will get."""
    return torch._C._autograd._get_sequence_nr()


def running_sequence_number() -> int | None:
    """The number of the autograd node whose backward is running, `None` outside of a backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "StridedShard",
    "TorchDispatchMode",
    "UnsupportedOperatorException",
    "UnsupportedTorchError",
    "check_version",
    "compile_with_inductor",
    "compiling",
    "decompositions",
    "default_store",
    "has_composite_kernel",
    "has_effects",
    "has_native_kernel",
    "mark_stepped",
    "next_sequence_number",
    "registered_sharding",
    "running_sequence_number",
    "skip_dispatch_modes",
    "storage_id",
    "tensor_hooks",
]
