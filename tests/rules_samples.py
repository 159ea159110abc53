"""Calls of every op that has rules, small and real, with dims that divide by 2, 3 and 4 wherever a shard may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from meshstep.ir import collectives, random
from meshstep.ir.updates import BY_OP
from meshstep.rules import pointwise

aten = torch.ops.aten
Call = tuple[tuple, dict[str, Any]]


class Draw:
    """Random tensors, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self.generator).to(dtype)

    def positive(self, *shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64, generator=self.generator) * 0.8 + 0.1

    def ints(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator)

    def bools(self, *shape: int) -> Tensor:
        return self.ints(2, *shape).bool()

    def distinct(self, high: int, count: int) -> Tensor:
        return torch.randperm(high, generator=self.generator)[:count]


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


# ---- elementwise: from the schema


def is_elementwise(op: Any) -> bool:
    """Whether an op takes its rules from PyTorch's tag, and is a plain function of tensors."""
    written = op._schema.is_mutable or any(a.is_out for a in op._schema.arguments)
    seeded = torch.Tag.nondeterministic_seeded in op.tags
    read = torch.Tag.data_dependent_output in op.tags
    return torch.Tag.pointwise in op.tags and not (written or seeded or read)


def tagged_elementwise() -> list[Any]:
    """Every such op of PyTorch."""
    schemas = sorted((s.name, s.overload_name) for s in torch._C._jit_get_all_schemas())
    names = [(name.removeprefix("aten::"), overload) for name, overload in schemas if name.startswith("aten::")]
    ops = (getattr(getattr(aten, name, None), overload or "default", None) for name, overload in names)
    return [op for op in ops if op is not None and is_elementwise(op)]


_SHAPES = (
    ((12, 4), (12, 4), (12, 4)),
    ((12, 1, 4), (12, 4), (1,)),
    ((4,), (3, 12, 4), (12, 1)),
    ((), (12,), ()),
)
_ALIKE, _MIXED = ("fff", "iii", "bbb"), ("bff", "fbf", "fii")  # float, int, bool
_NUMBERS = {
    "p": 1, "n": 2, "decimals": 1, "rounding_mode": "floor", "approximate": "tanh", "lambd": 0.3,
    "min_val": -0.5, "max_val": 0.5, "dtype": None, "beta": 2, "threshold": 1,
}  # fmt: skip


def elementwise(op: Any, draw: Draw) -> Iterator[Call]:
    """Calls for every broadcast shape, in every kind of dtype that the op takes."""
    for shapes in _SHAPES:
        for kinds in (_ALIKE, _MIXED):
            calls = [tuple(_arguments(op, shapes, kind, draw)) for kind in kinds]
            found = [args for args in calls if _runs(op, args)]
            yield from ((args, {}) for args in found)
            if found:
                break


def _arguments(op: Any, shapes: tuple, kind: str, draw: Draw) -> Iterator[Any]:
    makers = {"f": draw.positive, "i": lambda *s: draw.ints(5, *s) + 1, "b": draw.bools}
    tensors = 0
    for argument in op._schema.arguments:
        if argument.kwarg_only:
            return
        if str(argument.type) in ("Tensor", "Optional[Tensor]"):
            place = min(tensors, 2)
            yield makers[kind[place]](*shapes[place])
            tensors += 1
        else:
            yield _NUMBERS.get(argument.name, 2 if not argument.has_default_value() else argument.default_value)


def _runs(op: Any, args: tuple) -> bool:
    try:
        op(*args)
    except (RuntimeError, ValueError, TypeError):
        return False
    return True


def by_hand_elementwise(d: Draw) -> dict[Any, list[Call]]:
    x, y = d(12, 4), d(12, 4)
    return {
        aten._to_copy.default: [
            call(x, dtype=torch.float32),
            call(x, dtype=torch.int64),
            call(d.ints(9, 12), dtype=torch.float64),
            call(d.bools(12), dtype=torch.float64),
        ],
        aten._prelu_kernel.default: [call(x, d(1, 4))],
        aten.clamp.default: [call(x, -0.5, 0.5), call(x, None, 0.1)],
        aten.clip.default: [call(x, -0.5, 0.5)],
        aten.copy.default: [call(x, d(4)), call(d.ints(9, 12, 4), d.ints(9, 4)), call(x, d.ints(9, 12, 1))],
        aten.div.Tensor_mode: [call(x, d(4), rounding_mode="floor"), call(x, y, rounding_mode=None)],
        aten.div.Scalar_mode: [call(x, 0.3, rounding_mode="trunc")],
        aten.round.decimals: [call(x, decimals=1)],
        aten._prelu_kernel_backward.default: [call(x, y, d(1, 4)), call(x, y, d(12, 4))],
        aten.log_sigmoid_forward.default: [call(x)],
        aten.log_sigmoid_backward.default: [call(y, x, aten.log_sigmoid_forward(x)[1])],
        aten._conj.default: [call(torch.complex(x, y))],
        aten.add.Scalar: [call(x, 0.0)],
        aten.sub.Scalar: [call(x, 0)],
        aten.add.Tensor: [
            call(x, 1.5), call(x, 0), call(d.ints(9, 12), 0.0), call(d.bools(12), 0), call(x, d(4), alpha=3),
        ],
        aten.sub.Tensor: [call(x, 1.5), call(x, 0.0), call(x, d(12, 1), alpha=3)],
        aten.mul.Tensor: [call(x, 2.5)],
        aten.div.Tensor: [call(x, 2.5)],
        aten.elu_backward.default: [call(x, 1.0, 1.0, 1.0, False, y)],
        aten.fill.Scalar: [call(x, 0.3)],
        aten.fill.Tensor: [call(x, d())],
        aten.lerp.Scalar: [call(x, y, 0.3)],
        aten.masked_fill.Scalar: [call(x, d.bools(4), 0), call(x, d.bools(12, 4), -math.inf)],
        aten.masked_fill.Tensor: [call(x, d.bools(12, 4), d())],
        aten.softplus_backward.default: [call(x, y, 1.0, 20.0)],
        aten.where.Scalar: [call(d.bools(12, 4), 1.0, 2.0)],
        aten.where.ScalarOther: [call(d.bools(12, 1), x, 0), call(d.bools(12, 4), x, 1.0)],
        aten.where.ScalarSelf: [call(d.bools(12, 1), 0, x), call(d.bools(12, 4), 1.0, x)],
        aten.where.self: [call(d.bools(12, 1), x, d(4)), call(d.bools(12, 4), x, torch.tensor(-math.inf).double())],
    }  # fmt: skip


# ---- views


def views(d: Draw) -> dict[Any, list[Call]]:
    """Those of the ops that give a copy are those of the views."""
    found = true_views(d)
    for op, calls in list(found.items()):
        packet = getattr(aten, f"{op._schema.name.removeprefix('aten::')}_copy", None)
        if packet is not None and op._overloadname in packet.overloads():
            found[getattr(packet, op._overloadname)] = calls
    return found


def true_views(d: Draw) -> dict[Any, list[Call]]:
    x = d(12, 24, 4)
    shapes = [
        call(x, [288, 4]), call(x, [12, 96]), call(x, [12, 24, 2, 2]), call(x, [12, 12, 2, 4]), call(x, [-1]),
        call(x, [12, 1, 24, 1, 4]), call(d(2, 12, 2), [4, 12]), call(d(1, 12, 1, 4), [12, 4]), call(d(12), [12]),
        call(d(1), []), call(d(), [1, 1]),
    ]  # fmt: skip
    squeezed = d(2, 1, 12, 3, 4, 1)
    return {
        aten.view.default: shapes,
        aten._unsafe_view.default: shapes,
        aten.reshape.default: shapes,
        aten.alias.default: [call(x)],
        aten.detach.default: [call(x)],
        aten.t.default: [call(d(12, 24)), call(d(12)), call(d())],
        aten.transpose.int: [call(x, 0, 2), call(x, -1, 1), call(d(), 0, 0)],
        aten.permute.default: [call(x, [2, 0, 1]), call(x, [-1, 0, -2]), call(d(), [])],
        aten.movedim.int: [call(x, 0, 2), call(x, -1, 0)],
        aten.movedim.intlist: [call(x, [0, 1], [1, 2]), call(x, [2], [0])],
        aten.squeeze.default: [call(squeezed), call(d(1, 1))],
        aten.squeeze.dim: [call(squeezed, dim) for dim in (0, 1, 3, -2, -1)] + [call(d(), 0)],
        aten.squeeze.dims: [call(squeezed, [0, 1]), call(squeezed, [3, -1])],
        aten.unsqueeze.default: [call(x, 0), call(x, 2), call(x, -1), call(d(), 0)],
        aten.expand.default: [
            call(d(12, 1, 4), [3, 12, 24, 4]), call(d(4), [12, -1]), call(d(), [12]), call(x, [12, 24, 4]),
        ],
        aten.select.int: [call(x, 0, 5), call(x, 1, -1), call(x, -1, 2)],
        aten.select_backward.default: [call(d(24, 4), [12, 24, 4], 0, 5), call(d(12, 24), [12, 24, 4], -1, 2)],
        aten.slice.Tensor: [
            call(x, 0, 2, 10), call(x, 1, 0, 24), call(x, 1, 0, 2**63 - 1), call(x, -1, 0, 4, 2), call(x, 1, -3),
            call(x),
        ],
        aten.slice_backward.default: [
            call(d(8, 24, 4), [12, 24, 4], 0, 2, 10, 1), call(x, [12, 24, 4], 1, 0, 2**63 - 1, 1),
            call(x, [12, 24, 4], 1, 0, 24, 1), call(d(12, 24, 2), [12, 24, 4], -1, 0, 4, 2),
        ],
        aten.split.Tensor: [call(x, 5, 1), call(x, 4), call(x, 2, -1)],
        aten.split_with_sizes.default: [call(x, [5, 19], 1), call(x, [1, 3], -1)],
        aten.unsafe_split.Tensor: [call(x, 5, 1)],
        aten.chunk.default: [call(x, 5, 1)],
        aten.narrow.default: [call(x, 1, 3, 12)],
        aten.unbind.int: [call(x, 2), call(d(3, 12))],
        aten.diagonal.default: [call(x), call(x, 1, -1, 0)],
        aten.diagonal_backward.default: [call(d(4, 12), [12, 24, 4], 0, 0, 1), call(d(24, 4), [12, 24, 4], 0, 0, 2)],
        aten.diag_embed.default: [call(x), call(x, 1, 0, 2)],
        aten.unfold_backward.default: [call(d(12, 11, 4, 4), [12, 24, 4], 1, 4, 2)],
        aten.unfold.default: [call(x, 1, 4, 2), call(x, -1, 2, 1)],
        aten.flip.default: [call(x, [0, -1]), call(x, [])],
        aten.roll.default: [call(x, [3], [1]), call(x, [3, 1], [1, -1]), call(x, [5])],
        aten.repeat.default: [call(x, [1, 2, 1]), call(x, [3, 1, 1, 2])],
        aten.tril.default: [call(x), call(x, 1)],
        aten.triu.default: [call(x), call(d(4, 12, 3, 3), -1)],
        aten.cat.default: [
            call([x, d(12, 5, 4)], 1), call([x, x, d(3, 24, 4)]), call([d(0), x], -1), call([x, d(12, 24, 1)], -1),
        ],
        aten.stack.default: [call([x, d(12, 24, 4)]), call([x, d(12, 24, 4)], -1)],
        aten.view_as_complex.default: [call(d(12, 4, 2))],
        aten.view_as_real.default: [call(torch.complex(d(12, 4), d(12, 4)))],
        aten.constant_pad_nd.default: [call(x, [1, 2]), call(x, [0, 0, 2, 0], 1.5), call(x, [0, 0, -1, 0])],
    }  # fmt: skip


# ---- reductions, and ops along a dim


def reductions(d: Draw) -> dict[Any, list[Call]]:
    x = d(12, 24, 4)
    dims = [call(x, [0, 2]), call(x, [-1], True), call(x, [1], False), call(d(), [])]
    any_dims = [*dims, call(x, [])]
    one_dim = [call(x, 0), call(x, -1, True), call(x, 1)]
    mask = d.bools(12, 24, 4)
    seldom = d(12, 24, 4) > 1.5
    norms = [
        call(x, order, dim) for order in (1, 2, math.inf, -math.inf, 3, 0.5, 0, -1) for dim in (None, [1], [0, -1])
    ]
    spread = [call(x, [0, 2], correction=0), call(x, [-1], keepdim=True), call(x)]
    along = [call(x, 0), call(x, -1)]
    soft = [call(x, 1, False), call(x, -1, False)]
    soft_backward = [call(x, d.positive(12, 24, 4), dim, torch.float64) for dim in (1, -1)]
    return {
        aten.sum.default: [call(x), call(mask), call(d()), call(x, dtype=torch.float32)],
        aten.sum.dim_IntList: [*any_dims, call(x, None), call(mask, [1]), call(d.ints(9, 12, 4), [0])],
        aten.nansum.default: [*dims, call(torch.where(mask, x, math.nan), [0, 1])],
        aten.count_nonzero.dim_IntList: [call(d.ints(2, 12, 24, 4), [0, 2]), call(d.ints(2, 12, 4), [])],
        aten.mean.default: [call(x), call(d()), call(d.ints(9, 12), dtype=torch.float64)],
        aten.mean.dim: [*any_dims, call(x, None, True), call(d.ints(9, 12, 4), [0], dtype=torch.float64)],
        aten.linalg_vector_norm.default: [*norms, call(x, 2, [1], True)],
        aten.norm.Scalar: [call(x), call(x, 1)],
        aten.norm.ScalarOpt_dim: [call(x, p, [1], keep) for p in (2, 3) for keep in (True, False)],
        aten._fft_c2c.default: [call(torch.complex(x, x.flip(0)), [0, 2], 0, True)],
        aten._fft_r2c.default: [call(x, [2], 0, True)],
        aten._fft_c2r.default: [call(torch.complex(x, x.flip(0)), [2], 0, 6)],
        aten.amax.default: [*any_dims, call(mask, [0])],
        aten.amin.default: [*any_dims, call(d.ints(99, 12, 4), [0])],
        aten.max.default: [call(x), call(mask)],
        aten.min.default: [call(x)],
        aten.max.dim: one_dim,
        aten.min.dim: one_dim,
        aten.aminmax.default: [call(x), call(x, dim=1), call(x, dim=-1, keepdim=True), call(mask, dim=0)],
        aten.kthvalue.default: [call(x, 3, 0), call(x, 2, -1, True)],
        aten.mode.default: [call(d.ints(3, 12, 24, 4), 1), call(d.ints(3, 12, 24, 4), -1, True)],
        aten.nanmedian.dim: one_dim,
        aten.prod.default: [call(d.positive(12))],
        aten.renorm.default: [call(x, 2, 1, 0.5), call(x, 1, -1, 0.5)],
        aten.median.dim: one_dim,
        aten.prod.dim_int: one_dim,
        aten.any.default: [call(torch.arange(12) == 7), call(torch.arange(12) == 99), call(seldom)],
        aten.any.dim: [call(seldom, 1), call(seldom, -1, True)],
        aten.any.dims: [
            call(d.bools(12), [0]),
            call(torch.zeros(12, dtype=torch.bool), [0]),
            call(seldom, [0, 1]),
            call(seldom, [-1], True),
            call(seldom, None),
        ],
        aten.all.default: [call(torch.arange(12) != 7), call(torch.arange(12) != 99), call(~seldom)],
        aten.all.dim: [call(~seldom, 1), call(~seldom, -1, True)],
        aten.all.dims: [call(~seldom, [0, 1]), call(~seldom, [-1], True), call(~seldom, None)],
        aten.argmax.default: [*one_dim, call(x)],
        aten.argmin.default: [*one_dim, call(x)],
        aten.logsumexp.default: [
            call(x, [1]), call(x, [0, -1], True), call(torch.full((12,), -math.inf).double(), [0]), call(d(), [0]),
        ],
        aten.var.correction: spread,
        aten.var_mean.correction: spread,
        aten.std.correction: spread,
        aten.std_mean.correction: spread,
        aten.cumsum.default: [
            *along, call(d.ints(9, 12, 4), 1), call(d(), 0), call(d.ints(9, 12, 4), 0, dtype=torch.float64),
        ],
        aten.cumprod.default: along,
        aten.logcumsumexp.default: along,
        aten.cummax.default: along,
        aten.cummin.default: along,
        aten.sort.default: [*along, call(x, 1, True)],
        aten.sort.stable: [call(x, stable=True, dim=1)],
        aten.topk.default: [call(x, 3), call(x, 2, 0), call(x, 9, 1, False), call(x, 5, 0)],
        aten.glu.default: [call(x), call(x, 0)],
        aten.glu_backward.default: [
            call(d(12, 24, 2), x, -1),
            call(d(6, 24, 4), x, 0),
            call(d(12, 12, 4), x, 1),
        ],
        aten._softmax.default: soft,
        aten._safe_softmax.default: [call(x, 1), call(x, -1)],
        aten._log_softmax.default: soft,
        aten._softmax_backward_data.default: soft_backward,
        aten._log_softmax_backward_data.default: soft_backward,
    }  # fmt: skip


# ---- matrix products and norms


def matmuls(d: Draw) -> dict[Any, list[Call]]:
    a, b = d(12, 24), d(24, 4)
    batched = d(12, 4, 24), d(12, 24, 12)
    return {
        aten.mm.default: [call(a, b), call(d.ints(9, 12, 4), d.ints(9, 4, 12))],
        aten.bmm.default: [call(*batched)],
        aten.addmm.default: [
            call(d(4), a, b), call(d(12, 4), a, b, beta=0.5, alpha=2), call(d(12, 1), a, b), call(d(1), a, b),
            call(d(), a, b), call(d.ints(9, 4), d.ints(9, 12, 24), d.ints(9, 24, 4)),
        ],
        aten.baddbmm.default: [
            call(d(12, 4, 12), *batched), call(d(1, 4, 12), *batched, beta=2), call(d(12), *batched),
        ],
        aten.addbmm.default: [call(d(4, 12), *batched), call(d(12), *batched, alpha=2)],
        aten.mv.default: [call(a, d(24))],
        aten.addmv.default: [call(d(12), a, d(24), alpha=2), call(d(), a, d(24))],
        aten.dot.default: [call(d(12), d(12))],
        aten.vdot.default: [call(torch.complex(d(12), d(12)), torch.complex(d(12), d(12)))],
        aten.addr.default: [call(d(12, 4), d(12), d(4)), call(d(4), d(12), d(4), beta=2)],
        aten.embedding.default: [
            call(d(24, 4), d.ints(24, 12, 3)), call(d(24, 4), d.ints(24, 12), 3), call(d(24, 4), d.ints(24)),
        ],
        aten.embedding_dense_backward.default: [
            call(d(12, 3, 4), d.ints(24, 12, 3), 24, -1, False), call(d(12, 4), d.ints(5, 12), 24, 3, False),
            call(d(12, 4), d.ints(5, 12), 24, -1, True),
        ],
    }  # fmt: skip


_OF_MATRICES = (
    aten._linalg_det.default, aten._linalg_eigvals.default, aten._linalg_slogdet.default, aten.linalg_eig.default,
    aten.linalg_inv_ex.default, aten.linalg_matrix_exp.default,
)  # fmt: skip


def linalg(d: Draw) -> dict[Any, list[Call]]:
    square, tall, wide = d(12, 4, 3, 3), d(12, 4, 5, 3), d(12, 4, 3, 5)
    definite = torch.eye(3).double() + square @ square.mT
    factor = aten.linalg_cholesky_ex(definite)[0]
    lu, pivots, _ = aten.linalg_lu_factor_ex(square)
    reflectors, tau = aten.geqrf(tall)
    ldl, ldl_pivots, _ = aten.linalg_ldl_factor_ex(definite)
    right = d(12, 4, 3, 2)
    p, r = d(12, 6, 4), d(12, 8, 4)
    distances = aten._cdist_forward(p, r, 2.0, None)
    batch = [call(square), call(d(3, 3))]
    return {
        **dict.fromkeys(_OF_MATRICES, batch),
        **{op: [call(tall), call(wide), call(square)] for op in (
            aten._linalg_svd.default, aten.geqrf.default, aten.linalg_lu.default, aten.linalg_lu_factor_ex.default,
            aten.linalg_qr.default,
        )},
        **{op: [call(definite)] for op in (
            aten._linalg_eigh.default, aten.cholesky.default, aten.linalg_cholesky_ex.default,
            aten.linalg_ldl_factor_ex.default,
        )},
        aten._linalg_solve_ex.default: [
            call(square, right), call(square, d(12, 4, 3)), call(square, d(3)), call(square, d(3, 2)),
            call(d(3, 3), right), call(d(12, 3, 3), d(12, 3)),
        ],
        aten.cholesky_inverse.default: [call(factor)],
        aten.cholesky_solve.default: [call(right, factor)],
        aten.linalg_cross.default: [call(d(12, 3, 4), d(12, 3, 4), dim=1), call(d(12, 1, 3), d(1, 4, 3))],
        aten.linalg_householder_product.default: [call(reflectors, tau)],
        aten.linalg_ldl_solve.default: [call(ldl, ldl_pivots, right)],
        aten.linalg_lu_solve.default: [call(lu, pivots, right), call(lu, pivots, d(12, 4, 2, 3), left=False)],
        aten.linalg_pinv.atol_rtol_tensor: [
            call(tall), call(tall, atol=d.positive(12, 4), rtol=torch.tensor(0.0).double()),
        ],
        aten.linalg_solve_triangular.default: [
            call(square.triu(), right, upper=True), call(square.triu(), d(12, 4, 2, 3), upper=True, left=False),
        ],
        aten.lu_unpack.default: [call(lu, pivots), call(*aten.linalg_lu_factor_ex(tall)[:2])],
        aten.ormqr.default: [call(reflectors, tau, d(12, 4, 5, 2)), call(reflectors, tau, d(12, 4, 2, 5), False)],
        aten.triangular_solve.default: [call(right, square.triu())],
        aten._euclidean_dist.default: [call(p, r), call(d(6, 4), d(8, 4))],
        aten._cdist_forward.default: [call(p, r, 2.0, None), call(d(6, 4), d(8, 4), 1.0, None)],
        aten._cdist_backward.default: [call(d(12, 6, 8), p, r, 2.0, distances)],
    }  # fmt: skip


def norms(d: Draw) -> dict[Any, list[Call]]:
    x, w, b = d(12, 3, 24, 4), d(4), d(4)
    wide = d(24, 4)
    image, scale, shift = d(12, 24, 3, 2), d(24), d(24)
    mean, var = d(24), d.positive(24)
    return {
        aten.native_layer_norm.default: [
            call(x, [4], w, b, 1e-5), call(x, [4], None, None, 1e-5), call(x, [24, 4], wide, None, 1e-5),
        ],
        aten.native_layer_norm_backward.default: list(_layer_norm_backward(d, x, w, b))
        + [_over(aten.native_layer_norm.default, d, x, [24, 4], wide, wide, [True] * 3)],
        aten._fused_rms_norm.default: [call(x, [4], w, 1e-6), call(x, [24, 4], wide, None), call(x, [4], None, 1e-6)],
        aten.native_group_norm.default: [
            call(image, scale, shift, 12, 24, 6, 12, 1e-5), call(image, None, None, 12, 24, 6, 1, 1e-5),
            call(d(12, 24), scale, None, 12, 24, 1, 12, 1e-5),
        ],
        aten.native_group_norm_backward.default: [
            _group_norm_backward(d, image, scale, 12, [True, True, True]),
            _group_norm_backward(d, image, scale, 1, [True, True, False]),
            _group_norm_backward(d, image, None, 12, [True, False, False]),
        ],
        aten._native_batch_norm_legit_no_training.default: [
            call(image, scale, shift, mean, var, 0.1, 1e-5), call(d(12, 24), None, None, mean, var, 0.1, 1e-5),
        ],
        aten.native_batch_norm.default: [
            call(image, scale, shift, mean, var, False, 0.1, 1e-5),
            call(image, scale, shift, None, None, True, 0.1, 1e-5),
        ],
        aten.native_batch_norm_backward.default: [
            call(d(*image.shape), image, scale, None, None, mean, var, True, 1e-5, [True, True, True]),
            call(d(*image.shape), image, scale, mean, var, d(0), d(0), False, 1e-5, [True, True, True]),
            call(d(*image.shape), image, scale, None, None, mean, var, True, 1e-5, [False, True, True]),
        ],
    }  # fmt: skip


def _layer_norm_backward(d: Draw, x: Tensor, w: Tensor, b: Tensor) -> Iterator[Call]:
    op = aten.native_layer_norm.default
    yield _over(op, d, x, [4], w, b, [True, True, True])
    yield _over(op, d, x, [4], w, b, [False, True, True])
    yield _over(op, d, x, [4], w, None, [True, True, False])
    yield _over(op, d, x, [4], None, None, [True, False, False])


def _over(op: Any, d: Draw, x: Tensor, shape: list, w: Any, b: Any, mask: list) -> Call:
    _, mean, rstd = op(x, shape, w, b, 1e-5)
    return call(d(*x.shape), x, shape, mean, rstd, w, b, mask)


def _group_norm_backward(d: Draw, x: Tensor, w: Any, groups: int, mask: list) -> Call:
    n, c, size = x.shape[0], x.shape[1], x[0, 0].numel()
    _, mean, rstd = aten.native_group_norm(x, w, None, n, c, size, groups, 1e-5)
    return call(d(*x.shape), x, mean, rstd, w, n, c, size, groups, mask)


# ---- attention


def attention(d: Draw) -> dict[Any, list[Call]]:
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    q, k, v = d(12, 24, 5, 4), d(12, 24, 7, 4), d(12, 24, 7, 4)
    forward = [
        call(q, k, v), call(q, q, q, 0.0, True), call(q, k, v, scale=0.3), call(q, k, v, attn_mask=d(5, 7)),
        call(q, k, v, attn_mask=d(12, 1, 5, 7)), call(q, k, v, attn_mask=d(1, 24, 5, 7)),
        call(q, k, v, attn_mask=d(12, 24, 5, 7)),
    ]  # fmt: skip
    long = d(1, 1, 12, 4)  # queries divide over the ranks
    keys = d(1, 1, 7, 4)
    forward += [
        call(long, long, long, 0.0, True),
        call(long, keys, keys, attn_mask=d(12, 7)),
        call(long, keys, keys, attn_mask=d(1, 1, 12, 7)),
    ]
    grouped = [call(q, d(12, 12, 7, 4), d(12, 12, 7, 4)), call(q, d(12, 1, 7, 4), d(12, 1, 7, 4))]
    forward += [c for c in grouped if _runs(op, c[0])]
    return {
        op: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: [
            _attention_backward(op, d, c) for c in forward
        ],
    }


def _attention_backward(op: Any, d: Draw, forward: Call) -> Call:
    args, kwargs = forward
    out, lse = op(*args, **kwargs)
    return call(d(*out.shape), *args[:3], out, lse, 0.0, len(args) > 4 and args[4], **kwargs)


# ---- indexing


def indexing(d: Draw) -> dict[Any, list[Call]]:
    x = d(12, 24, 4)
    picked, same = d.ints(24, 12, 3, 4), d.ints(24, 12, 24, 4)
    unique = torch.stack([torch.stack([d.distinct(24, 12) for _ in range(4)], -1) for _ in range(12)])
    zero = d.ints(1)
    indexed = [
        call(x, [None, d.ints(24, 12)]), call(x, [d.ints(12, 4, 12)]), call(x, [d.ints(12, 12), d.ints(24, 12)]),
        call(x, [d.ints(12, 12), None, d.ints(4, 12)]), call(x, [None, d.ints(24, 12, 1), d.ints(4, 3)]),
        call(d(3, 6, 12, 4), [None, d.ints(6, 12), None, d.ints(4, 12)]), call(x, [None, zero]),
        call(x, [d.ints(12, 1), d.ints(24, 12)]),
    ]  # fmt: skip
    put = [call(y, i, d(*aten.index(y, i).shape), True) for (y, i), _ in indexed]
    put += [
        call(x, [None, d.ints(24, 12)], d(4), True), call(x, [None, d.ints(24, 12)], d(), True),
        call(x, [None, d.distinct(24, 12)], d(12, 12, 4), False), call(x, [None, d.distinct(24, 12)], d(1), False),
    ]  # fmt: skip
    scattered = [
        call(x, 1, unique, d(12, 12, 4)),
        call(x, 1, unique, d(12, 14, 4)),
        call(x, 1, unique[:6], d(6, 12, 4)),
    ]
    rows = [call(x, 1, d.distinct(24, 12), d(12, 12, 4)), call(x, -1, d.distinct(4, 2), d(12, 24, 2))]
    logits, target, weight = d(12, 5).log_softmax(-1), d.ints(5, 12), d.positive(5)
    target[3] = -100
    return {
        aten.gather.default: [
            call(x, 1, picked), call(x, 1, same[:6]), call(x, -1, d.ints(4, 12, 24, 1)), call(d(), 0, d.ints(1)),
        ],
        aten.scatter.src: scattered,
        aten.scatter.value: [call(x, 1, picked, 0), call(x, 1, picked, 1.5), call(x, 1, picked[:6], 0.0)],
        aten.scatter.reduce: [call(x, 1, picked, d(12, 3, 4), reduce="multiply")],
        aten.scatter_reduce.two: [call(x, 1, picked, d(12, 3, 4), "amax"), call(x, 1, picked, d(12, 3, 4), "mean")],
        aten.scatter_add.default: [
            call(x, 1, same, d(12, 24, 4)), call(x, 1, picked, d(12, 6, 4)), call(x, 0, d.ints(12, 12, 24, 4), x),
        ],
        aten.index_select.default: [call(x, 1, d.ints(24, 12)), call(x, -1, d.ints(4, 24)), call(x, 1, d.ints(24))],
        aten.index_add.default: [*rows, call(x, 1, d.ints(24, 12), d(12, 12, 4), alpha=2)],
        aten.index_copy.default: rows,
        aten.index_reduce.default: [
            call(x, 1, d.ints(24, 12), d(12, 12, 4), how, include_self=own)
            for how in ("prod", "mean", "amax") for own in (True, False)
        ],
        aten.index_fill.int_Scalar: [call(x, 1, d.ints(24, 12), 0), call(x, 1, d.ints(24, 12), 1.5)],
        aten.index.Tensor: indexed,
        aten._unsafe_index.Tensor: indexed,
        aten.index_put.default: put,
        aten._unsafe_index_put.default: put,
        aten.select_scatter.default: [call(x, d(12, 4), 1, 3), call(x, d(12, 24), -1, 0), call(x, d(24, 4), 0, -1)],
        aten.slice_scatter.default: [
            call(x, d(12, 6, 4), 1, 3, 9), call(x, d(12, 24, 2), -1, 0, 4, 2), call(x, d(12, 24, 4), 1, 0, 2**63 - 1),
        ],
        aten.diagonal_scatter.default: [call(x, d(4, 12)), call(x, d(24, 3), 1, 0, -1)],
        aten.bucketize.Tensor: [call(x, d(5).sort()[0]), call(d.ints(9, 12), torch.arange(5), right=True)],
        aten.isin.Tensor_Tensor: [call(d.ints(9, 12, 4), d.ints(9, 3))],
        aten.searchsorted.Tensor: [call(d(5).sort()[0], x), call(d(12, 5).sort()[0], d(12, 4))],
        aten.binary_cross_entropy_with_logits.default: [
            call(x, d.positive(12, 24, 4), *w, reduction)
            for w in ((None, None), (d.positive(12, 1, 4), d.positive(4)))
            for reduction in (0, 1, 2)
        ],
        aten.nll_loss_forward.default: [
            call(logits, target, w, reduction, -100) for w in (None, weight) for reduction in (0, 1, 2)
        ],
        aten.nll_loss_backward.default: [
            call(d(12), logits, target, weight, 0, -100, torch.tensor(0.0).double()),
            call(d(), logits, target, weight, 1, -100, d.positive()),
            call(d(), logits, target, None, 2, -100, d.positive()),
        ],
        **margins(d),
    }  # fmt: skip


def margins(d: Draw) -> dict[Any, list[Call]]:
    x, target, weight = d(12, 5), d.ints(5, 12), d.positive(5)
    several = torch.stack([d.distinct(5, 5) for _ in range(12)])
    several[:, 3] = -1
    is_target = aten.multilabel_margin_loss_forward(x, several, 0)[1]
    found: dict[Any, list[Call]] = {
        aten.multi_margin_loss.default: [
            call(x, target, 1, 1.0, w, reduction) for w in (None, weight) for reduction in (0, 1, 2)
        ] + [call(d(5), d.ints(5))],
        aten.multi_margin_loss_backward.default: [
            call(d(12) if reduction == 0 else d(), x, target, 2, 1.0, weight, reduction) for reduction in (0, 1, 2)
        ],
        aten.multilabel_margin_loss_forward.default: [call(x, several, reduction) for reduction in (0, 1, 2)],
        aten.multilabel_margin_loss_backward.default: [
            call(d(12) if reduction == 0 else d(), x, several, reduction, is_target)
            for reduction in (0, 1, 2)
        ],
    }  # fmt: skip
    return found


# ---- factories, optimizers, collectives


def factories(d: Draw) -> dict[Any, list[Call]]:
    x = d(12, 24, 4)
    made = [call([12, 24, 4]), call([])]
    like, pattern = [call(x)], [call(x, [12, 3]), call(x, [])]
    return {
        aten.empty.memory_format: made,
        aten.zeros.default: made,
        aten.ones.default: made,
        aten.full.default: [call([12, 24], 1.5), call([12, 24], 0, dtype=torch.float64)],
        aten.new_empty.default: pattern,
        aten.new_zeros.default: pattern,
        aten.new_ones.default: pattern,
        aten.new_full.default: [call(x, [12, 3], 1.5), call(x, [12, 3], 0)],
        aten.empty_like.default: like,
        aten.zeros_like.default: like,
        aten.ones_like.default: like,
        aten.full_like.default: [call(x, 1.5), call(x, 0)],
        aten.arange.default: [call(12)],
        aten.arange.start: [call(2, 12)],
        aten.arange.start_step: [call(2, 12, 2)],
        aten.eye.default: [call(12)],
        aten.eye.m: [call(12, 4)],
        aten.linspace.default: [call(0, 1, 12)],
        aten.scalar_tensor.default: [call(1.5)],
    }


def random_tensors(d: Draw) -> dict[Any, list[Call]]:
    seed, first = torch.tensor([3, 5]), torch.tensor(12)
    return {
        op: [
            call(seed, [None, None], 7, [12, 24], [12, 24], dtype),
            call(seed, [None, first, None], 1 << 31, [4, 12, 3], [4, 48, 3], dtype),
            call(seed, [], 0, [], [], dtype),
        ]
        for op, dtype in (
            (random.uniform, torch.float64),
            (random.normal, torch.float64),
            (random.integers, torch.int64),
        )
    }


_UPDATE_SETTINGS: dict[str, Any] = {
    "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False,
    "momentum": 0.0, "dampening": 0.0, "nesterov": False, "is_first_step": False, "lr_decay": 0.1,
}  # fmt: skip


def updates(d: Draw) -> dict[Any, list[Call]]:
    return {op: [_update(d, op), _update(d, op, shape=(12,))] + _more_updates(d, op) for op in BY_OP}


def _more_updates(d: Draw, op: Any) -> list[Call]:
    names = {a.name for a in op._schema.arguments}
    if "amsgrad" in names:
        return [_update(d, op, amsgrad=True, optional=True)]
    return [_update(d, op, momentum=0.9, optional=True)] if "momentum" in names else []


def _update(d: Draw, op: Any, shape: tuple = (12, 24), optional: bool = False, **settings: Any) -> Call:
    update, values = BY_OP[op], {}
    for argument in op._schema.arguments:
        name = argument.name
        if name == "state_steps":
            values[name] = torch.tensor(3.0)
        elif name == "lr":
            values[name] = torch.tensor(0.01, dtype=torch.float64)
        elif name in update.lists and (optional or name not in update.optional):
            values[name] = d.positive(*shape)
        elif name in _UPDATE_SETTINGS:
            values[name] = (_UPDATE_SETTINGS | settings)[name]
        else:
            values[name] = None
    return (), values


def communications(d: Draw) -> dict[Any, list[Call]]:
    """Each rank of the collective's own axis has its tensor."""
    x = [d(12, 24, 4), d(12, 24, 4)]
    return {
        collectives.all_reduce: [call(x, op, "own") for op in ("sum", "max")],
        collectives.all_gather: [call(x, 1, "own", 2)],
        collectives.reduce_scatter: [call(x, 1, op, "own", 2) for op in ("sum", "min")],
        collectives.all_to_all: [call(x, 1, 2, "own", 2)],
        collectives.axis_slice: [call(x, 1, "own", 2)],
        collectives.axis_index: [call("own", torch.device("cpu"))],
    }


# ---- vision


def vision(d: Draw) -> dict[Any, list[Call]]:
    x, w, b = d(12, 24, 6, 5), d(12, 24, 3, 3), d(12)
    plain = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    transposed = ([2, 2], [1, 1], [1, 1], True, [1, 1], 1)
    two_groups, depthwise = (*plain[:-1], 2), (*plain[:-1], 24)
    convolutions = [
        call(x, w, b, *plain), call(x, w, None, *plain), call(x, d(24, 12, 3, 3), b, *transposed),
        call(x, d(12, 12, 3, 3), b, *two_groups), call(x, d(24, 1, 3, 3), d(24), *depthwise),
        call(x, d(24, 2, 3, 3), d(48), *transposed[:-1], 24),
        call(d(12, 24, 9), d(12, 24, 3), b, [1], [1], [1], False, [0], 1),
    ]  # fmt: skip
    pooled, indices = aten.max_pool2d_with_indices(x, [2, 2], [2, 2])
    adaptive = aten._adaptive_avg_pool2d(x, [3, 2])
    line, block = d(12, 24, 6), d(12, 12, 4, 4, 4)
    pooled3, indices3 = aten.max_pool3d_with_indices(block, [2, 2, 2], [2, 2, 2])
    grid = d.positive(12, 3, 4, 2)
    found: dict[Any, list[Call]] = {
        aten.convolution.default: convolutions,
        aten.convolution_backward.default: [
            *(_convolution_backward(d, c, [True, True, c[0][2] is not None]) for c in convolutions),
            _convolution_backward(d, convolutions[0], [False, True, True]),
            _convolution_backward(d, convolutions[0], [True, False, False]),
        ],
        aten.max_pool2d_with_indices.default: [
            call(x, [2, 2], [2, 2]),
            call(d(12, 6, 5), [3, 3], [1, 1], [1, 1]),
        ],
        aten.max_pool2d_with_indices_backward.default: [
            call(d(*pooled.shape), x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices)
        ],
        aten.avg_pool2d.default: [call(x, [2, 2]), call(x, [3, 3], [1, 1], [1, 1], False, False)],
        aten.avg_pool2d_backward.default: [call(d(12, 24, 3, 2), x, [2, 2], [2, 2], [0, 0], False, True, None)],
        aten._adaptive_avg_pool2d.default: [call(x, [3, 2])],
        aten._adaptive_avg_pool2d_backward.default: [call(d(*adaptive.shape), x)],
        aten.adaptive_max_pool2d.default: [call(x, [3, 2])],
        aten.adaptive_max_pool2d_backward.default: [call(d(12, 24, 3, 2), x, aten.adaptive_max_pool2d(x, [3, 2])[1])],
        aten.pixel_shuffle.default: [call(x, 2)],
        aten.pixel_unshuffle.default: [call(d(12, 4, 6, 4), 2)],
        aten.im2col.default: [
            call(x, [2, 2], [1, 1], [0, 0], [1, 1]),
            call(x[0], [2, 2], [1, 1], [0, 0], [1, 1]),
        ],
        aten.col2im.default: [call(d(12, 48, 20), [6, 5], [2, 2], [1, 1], [0, 0], [1, 1])],
        aten.max_pool3d_with_indices.default: [call(block, [2, 2, 2], [2, 2, 2])],
        aten.max_pool3d_with_indices_backward.default: [
            call(d(*pooled3.shape), block, [2] * 3, [2] * 3, [0] * 3, [1] * 3, False, indices3)
        ],
        aten.avg_pool3d.default: [call(block, [2, 2, 2])],
        aten.avg_pool3d_backward.default: [
            call(d(12, 12, 2, 2, 2), block, [2] * 3, [2] * 3, [0] * 3, False, True, None)
        ],
        aten._adaptive_avg_pool3d.default: [call(block, [2, 2, 1])],
        aten._adaptive_avg_pool3d_backward.default: [call(d(12, 12, 2, 2, 1), block)],
        aten.adaptive_max_pool3d.default: [call(block, [2, 2, 1])],
        aten.adaptive_max_pool3d_backward.default: [
            call(d(12, 12, 2, 2, 1), block, aten.adaptive_max_pool3d(block, [2, 2, 1])[1])
        ],
        aten.max_unpool2d.default: [call(pooled, indices, [6, 5])],
        aten.max_unpool3d.default: [call(pooled3, indices3, [4, 4, 4], [2, 2, 2], [0, 0, 0])],
        **drawn_pools(d, x, block),
        aten.channel_shuffle.default: [call(x, 3), call(block, 3)],
        aten.native_channel_shuffle.default: [call(x, 3), call(block, 3)],
        aten.grid_sampler_3d.default: [call(block, d.positive(12, 2, 3, 4, 3), 0, 0, False)],
        aten.grid_sampler_3d_backward.default: [
            call(d(12, 12, 2, 3, 4), block, d.positive(12, 2, 3, 4, 3), 0, 0, False, [True, True]),
        ],
        aten.reflection_pad3d.default: [call(block, [1] * 6)],
        aten.reflection_pad3d_backward.default: [call(d(12, 12, 6, 6, 6), block, [1] * 6)],
        aten.grid_sampler_2d.default: [call(x, grid, 0, 0, False)],
        aten.grid_sampler_2d_backward.default: [
            call(d(12, 24, 3, 4), x, grid, 0, 0, False, [True, True]),
            call(d(12, 24, 3, 4), x, grid, 0, 0, False, [False, True]),
        ],
        aten.replication_pad1d.default: [call(line, [1, 2])],
        aten.replication_pad1d_backward.default: [call(d(12, 24, 9), line, [1, 2])],
        aten.replication_pad3d.default: [call(block, [1] * 6)],
        aten.replication_pad3d_backward.default: [call(d(12, 12, 6, 6, 6), block, [1] * 6)],
        aten.reflection_pad1d.default: [call(line, [1, 2])],
        aten.reflection_pad1d_backward.default: [call(d(12, 24, 9), line, [1, 2])],
    }
    for name in ("reflection_pad2d", "replication_pad2d"):
        found[getattr(aten, name).default] = [call(x, [1, 2, 1, 1])]
        found[getattr(aten, f"{name}_backward").default] = [call(d(12, 24, 8, 8), x, [1, 2, 1, 1])]
    for name, extra in _RESIZED:
        pixels = int(name.removesuffix("_aa")[-2])
        before, after = [6, 5, 2][:pixels], [9, 10, 3][:pixels]
        found[getattr(aten, name).default] = [call(d(12, 24, *before), after, *extra)]
        found[getattr(aten, f"{name}_backward").default] = [call(d(12, 24, *after), after, [12, 24, *before], *extra)]
    return found


def drawn_pools(d: Draw, image: Tensor, block: Tensor) -> dict[Any, list[Call]]:
    found: dict[Any, list[Call]] = {}
    for pixels, x in ((2, image), (3, block)):
        forward = getattr(aten, f"fractional_max_pool{pixels}d").default
        args = (x, [2] * pixels, [2] * pixels, d.positive(*x.shape[:2], pixels))
        y, places = forward(*args)
        found[forward] = [call(*args)]
        found[getattr(aten, f"fractional_max_pool{pixels}d_backward").default] = [call(d(*y.shape), *args[:3], places)]
    return found


_RESIZED = (
    ("upsample_nearest1d", ()), ("upsample_nearest2d", ()), ("upsample_nearest3d", ()),
    ("_upsample_nearest_exact1d", ()), ("_upsample_nearest_exact2d", ()), ("_upsample_nearest_exact3d", ()),
    ("_upsample_bilinear2d_aa", (False,)), ("_upsample_bicubic2d_aa", (False,)),
    ("upsample_linear1d", (False,)), ("upsample_bilinear2d", (True,)),
    ("upsample_bicubic2d", (False,)), ("upsample_trilinear3d", (True,)),
)  # fmt: skip


def _convolution_backward(d: Draw, forward: Call, mask: list[bool]) -> Call:
    (x, w, b, *settings), _ = forward
    out = aten.convolution(x, w, b, *settings)
    return call(d(*out.shape), x, w, [out.shape[1]], *settings, mask)


# ---- all together

_NOT_BROADCAST = (aten._prelu_kernel.default, aten._prelu_kernel_backward.default, aten.log_sigmoid_backward.default)

_BY_HAND: tuple[Callable[[Draw], dict[Any, list[Call]]], ...] = (
    by_hand_elementwise,
    views,
    reductions,
    matmuls,
    linalg,
    norms,
    attention,
    indexing,
    factories,
    updates,
    communications,
    random_tensors,
    vision,
)  # fmt: skip


def samples() -> dict[Any, list[Call]]:
    """All calls, by op."""
    draw = Draw(0)
    found: dict[Any, list[Call]] = {}
    for op in (*tagged_elementwise(), *pointwise.TABLE):
        found[op] = [] if op in _NOT_BROADCAST else list(elementwise(op, draw))
    for group in _BY_HAND:
        for op, calls in group(draw).items():
            found.setdefault(op, []).extend(calls)
    return found
