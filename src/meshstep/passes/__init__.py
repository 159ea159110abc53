"""Rewrites of a local program, each `Program -> Program`, and the lowering to a graph that torch runs."""

from .bucket import Bucket
from .common_subexpressions import CommonSubexpressions
from .dead_code import DeadCode
from .launch_early import LaunchEarly
from .lower import lower
from .pipeline import Pass, PassRecord, Pipeline, parse, snake_case
from .regather import Regather
from .transform import Transform
from .two_sums import TwoSums

DEFAULT = Pipeline((CommonSubexpressions(), DeadCode(), Regather(), Bucket(), LaunchEarly()))
# Run op by op, the first buckets travel while the backward goes on; Inductor waits for them where it likes, so that
# fewer are better there. `make bench`, 4 MiB of gradients: 1.02 against 1.11 of DDP, and 1.07 against 0.93. Of gathered
# parameters it holds one small bucket at a time.
EAGER = Pipeline(
    (
        CommonSubexpressions(),
        DeadCode(),
        Regather(),
        TwoSums(),
        Bucket(bucket_bytes=2**20, shard_bytes=2**19),
        LaunchEarly(prefetch=False),
    )
)

KNOWN: dict[str, type] = {
    snake_case(kind.__name__): kind for kind in (Bucket, CommonSubexpressions, DeadCode, LaunchEarly, Regather, TwoSums)
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
    "LaunchEarly",
    "Pass",
    "PassRecord",
    "Pipeline",
    "Regather",
    "Transform",
    "TwoSums",
    "lower",
    "pipeline",
]
