"""The seed of a step's random numbers: what `torch.manual_seed` set, the same on all ranks, and which call it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import RankMismatchError
from .world import exchange

WAIT_S = 20.0  # ranks are in the same step


class Seed:
    """Gives (seed, step) to the programs of one step.

    The step starts at 0 and again whenever `torch.manual_seed` has set another seed; the seed is that of rank 0.

    Args:
        topic: Of this step, the same on all ranks; None where there is only this process.
    """

    def __init__(self, topic: str | None) -> None:
        """Nothing is drawn yet."""
        self._topic = topic
        self._initial: int | None = None
        self._agreed: int | None = None
        self._step, self._epoch, self._drawn = -1, 0, False

    def begin(self) -> None:
        """A call of the step begins."""
        initial = torch.initial_seed()
        if initial != self._initial or (self._drawn and _is_fresh(initial)):
            self._initial, self._agreed, self._step, self._drawn = initial, None, -1, False
        self._step += 1

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """Inside, it is as in the next call, which is still the next one afterwards."""
        self.begin()
        try:
            yield
        finally:
            self._step -= 1

    def now(self, device: torch.device) -> Tensor:
        """The seed and the step: i64[2].

        Raises:
            RankMismatchError: Another rank has not set its seed anew as this one has.
        """
        if self._agreed is None:
            self._agreed = self._agree()
        if not self._drawn:  # as the plain step would: so a later manual_seed is seen, also of the same seed
            torch.rand(())
            self._drawn = True
        return torch.tensor([self._agreed, self._step], dtype=torch.int64, device=device)

    def state_dict(self) -> dict[str, int]:
        """The seed and the number of the last call."""
        return {} if self._agreed is None else {"seed": self._agreed, "step": self._step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after that call; torch's own random state is set before."""
        if state:
            self._initial, self._agreed = torch.initial_seed(), state["seed"]
            self._step, self._drawn = state["step"], True

    def _agree(self) -> int:
        assert self._initial is not None
        signed = (self._initial + 2**63) % 2**64 - 2**63
        if self._topic is None:
            return signed
        self._epoch += 1
        said = exchange(f"{self._topic}/seed/{self._epoch}", str(signed), WAIT_S)
        absent = [rank for rank, message in enumerate(said) if message is None]
        if absent:
            raise RankMismatchError(
                f"ranks {', '.join(map(str, absent))} did not set a new seed with this rank",
                at=f"{self._topic.split('/')[0]}: torch.manual_seed({self._initial})",
                hint="call torch.manual_seed at the same step on all ranks",
            )
        return int(said[0] or "")


def _is_fresh(seed: int) -> bool:
    """Whether nothing was drawn since torch's generator was seeded."""
    return torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(seed).get_state())
