"""Rewrites of a local program, each `Program -> Program`, and the lowering to a graph that torch runs."""

from .bucket import Bucket
from .common_subexpressions import CommonSubexpressions
from .dead_code import DeadCode
from .fold_redistributions import FoldRedistributions
from .launch_early import LaunchEarly
from .lower import lower
from .pipeline import Pass, PassRecord, Pipeline, parse, snake_case
from .recompute import Recompute
from .regather import Regather
from .transform import Transform
from .two_sums import TwoSums

DEFAULT = Pipeline((CommonSubexpressions(), DeadCode(), FoldRedistributions(), Regather(), Bucket(), LaunchEarly()))
# Run op by op, what is gathered is held as long as the program says, so that less is gathered at once.
EAGER = Pipeline(
    (
        CommonSubexpressions(),
        DeadCode(),
        FoldRedistributions(),
        Regather(),
        TwoSums(),
        Bucket(shard_bytes=2**19),
        LaunchEarly(prefetch=False),
    )
)

KNOWN: dict[str, type] = {
    snake_case(kind.__name__): kind
    for kind in (Bucket, CommonSubexpressions, DeadCode, FoldRedistributions, LaunchEarly, Recompute, Regather, TwoSums)
}


def pipeline(text: str) -> Pipeline:
    """The pipeline that a text describes: `str(pipeline(text))` is the text again.

    >>> str(pipeline("common_subexpressions | bucket(bucket_bytes=4096) | launch_early(prefetch=False)"))
    'common_subexpressions | bucket(bucket_bytes=4096) | launch_early(prefetch=False)'

    Raises:
        InputError: There is no such pass, or it has no such option.
    """
    return parse(text, KNOWN)


__all__ = [
    "DEFAULT",
    "EAGER",
    "Bucket",
    "CommonSubexpressions",
    "DeadCode",
    "FoldRedistributions",
    "LaunchEarly",
    "Pass",
    "PassRecord",
    "Pipeline",
    "Recompute",
    "Regather",
    "Transform",
    "TwoSums",
    "lower",
    "pipeline",
]
