"""What a report says, as plain data: the page, the text, the trace and JSON are all made from it.

Times are in us, sizes in bytes of one rank where nothing else is said. Everything is text or a number.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """What the prediction is for.

    Args:
        name: As the hardware table has it.
        memory: Bytes that a rank has; None if nothing is known of it.
        about: What its figures are.
    """

    name: str
    memory: int | None
    about: str


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the mesh, and what its plan comes to.

    Args:
        axis: Its name.
        size: Number of ranks along it.
        kind: The plan that decides for it.
        does: What that means, in words.
        sharded: Number of parameters in shards along it.
        collectives: Number of collectives along it in a step.
        bytes: What a rank sends along it in a step.
        time: Time that its collectives take.
        exposed: The part of it during which nothing is computed.
    """

    axis: str
    size: int
    kind: str
    does: str
    sharded: int
    collectives: int
    bytes: int
    time: float
    exposed: float


@dataclass(frozen=True, slots=True)
class Time:
    """What a step is predicted to take.

    Args:
        step: From the first call to the last.
        compute: Sum over what is computed.
        communication: Sum over what is sent.
        exposed: What is sent while nothing is computed.
    """

    step: float
    compute: float
    communication: float
    exposed: float


@dataclass(frozen=True, slots=True)
class Held:
    """A value that is held where most memory is.

    Args:
        value: As the text form has it.
        op: What makes it.
        type: Its dtype and local shape.
        bytes: Its size.
        kind: "activations" or "temporaries".
        module: Path of the user's module.
        source: The user's line.
    """

    value: str
    op: str
    type: str
    bytes: int
    kind: str
    module: str
    source: str


@dataclass(frozen=True, slots=True)
class Memory:
    """What a rank holds at the call where it holds most.

    Args:
        parts: Bytes by what they are for.
        peak: Their sum.
        limit: What a rank may hold; None if nothing is known.
        at: The call, with the user's line.
        largest: The largest values of those that the program has made and still holds there.
        new_state: Bytes of state that this call makes and that later ones are given.
    """

    parts: dict[str, int]
    peak: int
    limit: int | None
    at: str
    largest: tuple[Held, ...]
    new_state: int

    @property
    def fits(self) -> bool | None:
        """Whether it stays below the limit; None without one."""
        return None if self.limit is None else self.peak <= self.limit


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter.

    Args:
        name: Fully-qualified.
        dtype: `bf16`.
        shape: Global.
        local: One rank's.
        placements: Along each axis of the mesh.
        bytes: Of one rank's part.
        state_bytes: Of the optimizer state that belongs to it.
        whole_bytes: Of the whole.
        why: Along each axis, why it lies so.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    placements: tuple[str, ...]
    bytes: int
    state_bytes: int
    whole_bytes: int
    why: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Side:
    """One of two ops that disagree.

    Args:
        what: The op, input or result.
        placement: What it gives, or wants.
        source: The user's line.
        module: Path of the user's module.
    """

    what: str
    placement: str
    source: str
    module: str


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Why a value is sent: its maker and its user disagree.

    Args:
        value: The value, as the text form has it.
        maker: What makes it.
        user: What wants it otherwise.
    """

    value: str
    maker: Side
    user: Side


@dataclass(frozen=True, slots=True)
class Alternative:
    """What could be done instead of sending a value.

    Args:
        what: The op that would be computed otherwise, and how.
        price: Time that it would take more; below 0 where it takes less.
        open: Whether the plan leaves it open, so that it was rejected for its price; else the plan rules it out.
    """

    what: str
    price: float
    open: bool


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a step.

    Args:
        name: Its name in the program.
        kind: `all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`.
        axis: The mesh axis.
        dtype: What is sent.
        bytes: Sent per rank and step by a ring.
        values: How many values ride in it.
        start: When it is launched.
        time: What it takes.
        exposed: The part of that during which nothing is computed.
        source: The user's line whose value is sent.
        module: Path of the user's module.
        phase: "forward", "backward" or "update".
        why: In words.
        causes: A disagreement for each value; none where an op is computed in shards by sending.
        alternative: The cheapest one for the first value; None if there is none.
    """

    name: str
    kind: str
    axis: str
    dtype: str
    bytes: int
    values: int
    start: float
    time: float
    exposed: float
    source: str
    module: str
    phase: str
    why: str
    causes: tuple[Disagreement, ...]
    alternative: Alternative | None


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a rank's program.

    Args:
        name: The value that it makes.
        op: As the text form has it.
        arguments: Likewise.
        type: Dtype, and global shape with the numbers of shards; of the first output.
        layout: Placement along each axis.
        source: The user's line.
        module: Path of the user's module.
        phase: "forward", "backward" or "update".
        lane: "compute", or the axis along which it sends.
        start: When it begins.
        time: What it takes.
        held: Bytes of activations and temporaries that are held while it runs.
    """

    name: str
    op: str
    arguments: str
    type: str
    layout: str
    source: str
    module: str
    phase: str
    lane: str
    start: float
    time: float
    held: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Facts:
    """All that is said of a lowered step.

    Args:
        step: Name of the user's function.
        ranks: Number of them.
        device: What the prediction is for.
        mesh: Its axes, outermost first.
        time: Of a step.
        memory: Of a rank.
        parameters: In the order of the program.
        collectives: In the order of the program.
        calls: What a rank computes and sends, in order.
        whole: Ops without a rule, computed whole on every rank, with their numbers of calls.
        passes: What each pass did.
    """

    step: str
    ranks: int
    device: Device
    mesh: tuple[Axis, ...]
    time: Time
    memory: Memory
    parameters: tuple[Parameter, ...]
    collectives: tuple[Collective, ...]
    calls: tuple[Call, ...]
    whole: tuple[tuple[str, int], ...]
    passes: tuple[str, ...]
