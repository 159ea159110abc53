"""Everything that meshstep raises on purpose.

MeshstepError
  CaptureError        the Python cannot be captured (data-dependent value, unsupported input)
  InputError          a call does not fit (wrong rows, dtype, missing argument, ranks disagree on a shape)
  LayoutError         a placement that cannot be
  PlanError           a plan that does not fit the program
  RuleError           a rule that does not fit its op, or failed validation
  PassError           a pass broke the program
  RankMismatchError   ranks would run different programs
  VerifyError         numbers differ
  CheckpointError     missing, damaged or not fitting
"""

from __future__ import annotations


class MeshstepError(Exception):
    """Base of all errors. A message has three parts: what is wrong, where, and what to try.

    Args:
        what: One line that says what is wrong.
        at: Where: the user's source line, parameter name, axis. `None` if there is no such place.
        hint: What to try. `None` if nothing can be said.
    """

    def __init__(self, what: str, *, at: str | None = None, hint: str | None = None) -> None:
        """Join the parts into the message."""
        parts = (("", what), ("\n  at   ", at), ("\n  try  ", hint))
        super().__init__("".join(prefix + text for prefix, text in parts if text))
        self.what, self.at, self.hint = what, at, hint


class CaptureError(MeshstepError):
    """The Python of the step cannot be captured."""


class InputError(MeshstepError):
    """A call does not fit the compiled step."""


class LayoutError(MeshstepError):
    """A placement that cannot be."""


class PlanError(MeshstepError):
    """A plan that does not fit the program or the mesh."""


class RuleError(MeshstepError):
    """A sharding rule that does not fit its op, or failed validation."""


class PassError(MeshstepError):
    """A pass broke the program."""


class RankMismatchError(MeshstepError):
    """Ranks would run different programs."""


class VerifyError(MeshstepError):
    """The compiled program and the plain step computed different numbers."""


class CheckpointError(MeshstepError):
    """A checkpoint that is missing, damaged or does not fit."""
