"""What schemas say of parameters and arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Placement

from ..errors import InputError, PlanError
from ..ir.program import SlotKind
from ..layout import REPLICATE, Layout, shard, shard_dim
from ..mesh import Mesh
from ..plan.plan import AxisPlan, Plan
from ..schema import Schema

Given = Schema | Mapping[str, Schema]


@dataclass(frozen=True, slots=True)
class Schemas:
    """The schemas of a module.

    Args:
        parameters: By patterns of names; the first that fits counts.
        inputs: Of the tensors among the arguments, in order; the last one counts for all after it.
        mesh: The mesh that all of them speak of.
    """

    parameters: Mapping[str, Schema]
    inputs: tuple[Schema, ...]
    mesh: Mesh

    @classmethod
    def of(cls, module: nn.Module, parameters: Given, inputs: Sequence[Schema]) -> Schemas:
        """Checked.

        Raises:
            InputError: They are no schemas, or not of one mesh.
            PlanError: A pattern fits no parameter.
        """
        found = dict(parameters) if isinstance(parameters, Mapping) else {"*": parameters}
        every = [*found.values(), *inputs]
        wrong = next((s for s in every if not isinstance(s, Schema)), None)
        if wrong is not None or not found:
            raise InputError(
                f"{'no schema' if not found else f'a {type(wrong).__name__}'} instead of a Schema",
                at=f"SPMD({type(module).__name__})",
                hint="meshstep.Schema(mesh, [Replicate()]), or schemas by patterns of names",
            )
        meshes = list(dict.fromkeys(schema.mesh for schema in every))
        if len(meshes) > 1:
            raise InputError(
                "schemas speak of different meshes", at=", ".join(map(repr, meshes)), hint="one mesh for all of them"
            )
        _check_patterns(found, module)
        return cls(found, tuple(inputs), meshes[0])

    def layout(self, name: str, shape: Sequence[int]) -> Layout:
        """How a parameter of a global shape lies; whole along axes along which its dim does not divide."""
        schema = next((s for pattern, s in self.parameters.items() if fnmatchcase(name, pattern)), None)
        layout, left = Layout(), list(shape)
        for axis, size in ((axis, self.mesh[axis]) for axis in self.mesh.axes):
            placement = REPLICATE if schema is None else schema.layout[axis]
            dim = shard_dim(placement)
            if dim is not None:
                if size == 1 or dim >= len(left) or left[dim] % size:
                    placement = REPLICATE
                else:
                    left[dim] //= size
            layout = layout.extended(axis, placement)
        return layout

    def arguments(self, leaves: Sequence[Any]) -> list[Layout | None]:
        """How each leaf that is a tensor lies; None for any other."""
        found, count = list[Layout | None](), 0
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                found.append(None)
                continue
            schema = self.inputs[min(count, len(self.inputs) - 1)] if self.inputs else None
            found.append(Layout(tuple((axis, self._along(axis, leaf, schema)) for axis in self.mesh.axes)))
            count += 1
        return found

    def _along(self, axis: str, leaf: Tensor, schema: Schema | None) -> Placement:
        if self.mesh[axis] == 1:
            return REPLICATE
        if schema is not None:
            return schema.layout[axis]
        return shard(0) if leaf.ndim else REPLICATE

    def plan(self, shapes: Mapping[str, Sequence[int]], arguments: Sequence[Layout | None]) -> Plan:
        """The same as a plan.

        Args:
            shapes: The global shape of each parameter, by its name in the program.
            arguments: The layouts of the arguments.
        """
        lies = {name: self.layout(name, shape) for name, shape in shapes.items()}
        plans = []
        for axis in self.mesh.axes:
            dims = [shard_dim(layout[axis]) for layout in arguments if layout is not None]
            batch_dim = next((dim for dim in dims if dim is not None), None)
            state = tuple(
                (f"{kind.value} {name}", layout[axis])
                for name, layout in lies.items()
                for kind in (SlotKind.PARAMETER, SlotKind.GRADIENT)
            )
            splits = any(shard_dim(placement) is not None for _, placement in state)
            plans.append(
                AxisPlan(
                    axis,
                    "schema",
                    batch_dim=batch_dim,
                    in_place=splits and batch_dim is None,
                    regather=splits and batch_dim is not None,
                    state=state,
                )
            )
        return Plan(tuple(plans))


def check_module(given: object, where: str) -> None:
    """See that what is to be distributed is a module.

    Raises:
        InputError: It is not.
    """
    if not isinstance(given, nn.Module):
        raise InputError(f"a {type(given).__name__} instead of a module", at=where, hint="an nn.Module")


def _check_patterns(schemas: Mapping[str, Schema], module: nn.Module) -> None:
    names = [name for name, _ in module.named_parameters()]
    unused = [p for p in schemas if p != "*" and not any(fnmatchcase(name, p) for name in names)]
    if unused:
        raise PlanError(
            f"a schema is for {unused[0]!r}, and no parameter has such a name",
            at=f"SPMD({type(module).__name__})",
            hint=f"one of {', '.join(map(repr, names[:5]))}",
        )
