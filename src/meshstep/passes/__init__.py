"""Rewrites of a local program, each `Program -> Program`, and the lowering to a graph that torch runs."""

from .bucket import Bucket
from .common_subexpressions import CommonSubexpressions
from .dead_code import DeadCode
from .launch_early import LaunchEarly
from .lower import lower
from .pipeline import Pass, Pipeline
from .regather import Regather
from .transform import Transform

DEFAULT = Pipeline((CommonSubexpressions(), DeadCode(), Regather(), Bucket(), LaunchEarly()))
# Run op by op, the first buckets travel while the backward goes on; Inductor waits for them where it likes, so that
# fewer are better there. `make bench`, 4 MiB of gradients: 1.02 against 1.11 of DDP, and 1.07 against 0.93. Of gathered
# parameters it holds one small bucket at a time.
EAGER = Pipeline(
    (
        CommonSubexpressions(),
        DeadCode(),
        Regather(),
        Bucket(bucket_bytes=2**20, shard_bytes=2**19),
        LaunchEarly(prefetch=False),
    )
)

__all__ = [
    "DEFAULT",
    "EAGER",
    "Bucket",
    "CommonSubexpressions",
    "DeadCode",
    "LaunchEarly",
    "Pass",
    "Pipeline",
    "Regather",
    "Transform",
    "lower",
]
