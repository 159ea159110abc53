"""Why something is sent: two ops want one value in different placements."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.tensor.placement_types import Placement

from ..layout import placement_text


@dataclass(frozen=True, slots=True)
class Party:
    """What makes a value, or what uses it.

    Args:
        node: Its name in the program that was partitioned; "" for a result of the program.
        what: The op as the text form has it, the slot of an input, or the result.
        placement: The placement that it gives, or wants.
        source: The user's line, "" if unknown.
        module: Path of the user's module, "" if in none.
    """

    node: str
    what: str
    placement: Placement
    source: str = ""
    module: str = ""


@dataclass(frozen=True, slots=True)
class Cause:
    """Along one axis, a value lies as its maker gives it, and a user wants it otherwise.

    Args:
        axis: Name of the mesh axis.
        value: The value, as the text form has it.
        index: Which output of its maker it is.
        maker: What makes it.
        user: The first of those that want it so.
    """

    axis: str
    value: str
    index: int
    maker: Party
    user: Party

    def __str__(self) -> str:
        """`%mm is P(sum), add_1 needs R`."""
        given, wanted = placement_text(self.maker.placement), placement_text(self.user.placement)
        return f"{self.value} is {given}, {self.user.node or self.user.what} needs {wanted}"
