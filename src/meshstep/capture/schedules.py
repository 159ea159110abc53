"""Learning-rate schedulers that the step itself steps.

A scheduler computes with Python floats and writes into the optimizer's groups, from which every call reads the numbers
anew. So its `step` does not run while the step is traced: it is noted, and runs after the program, at every call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ..errors import CaptureError
from .source import user_line


class Schedules:
    """What a step has done to its schedulers.

    Attributes:
        noted: The calls, in order, to be made after each run.
    """

    def __init__(self) -> None:
        """Nothing yet."""
        self.noted: list[Callable[[], Any]] = []
        self._stepped: dict[int, str] = {}  # at which line the scheduler of an optimizer has stepped

    @contextlib.contextmanager
    def noting(self, scheduler: LRScheduler) -> Iterator[None]:
        """Inside, stepping the scheduler is noted, and what that would have changed cannot be read."""
        real = scheduler.step

        def step(*args: Any, **kwargs: Any) -> None:
            if any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
                raise CaptureError(
                    f"{type(scheduler).__name__} steps by the value of a tensor",
                    at=user_line() or None,
                    hint="return the tensor, and call scheduler.step(value) after the step",
                )
            self._stepped[id(scheduler.optimizer)] = user_line()
            self.noted.append(lambda: real(*args, **kwargs))

        def read(*args: Any, **kwargs: Any) -> Any:
            raise CaptureError(
                "the learning rate is read from its scheduler in the step: the number would be that of the first call",
                at=user_line() or None,
                hint="call scheduler.get_last_lr() after the step",
            )

        before = dict(scheduler.__dict__)
        scheduler.__dict__.update(step=step, get_last_lr=read, get_lr=read)
        try:
            yield
        finally:
            scheduler.__dict__.clear()
            scheduler.__dict__.update(before)

    def check(self, optimizer: Any) -> None:
        """See that an optimizer does not step with numbers that a scheduler should have changed before.

        Raises:
            CaptureError: Its scheduler has stepped already.
        """
        line = self._stepped.get(id(optimizer))
        if line is not None:
            raise CaptureError(
                "an optimizer steps after its scheduler in the same step",
                at=f"{user_line()}, scheduler.step() at {line}",
                hint="step the scheduler last",
            )
