"""Rewrites of a local program, each `Program -> Program`, and the lowering to a graph that torch runs."""

from .bucket import BucketAllReduces
from .common_subexpressions import CommonSubexpressions
from .dead_code import DeadCode
from .launch_early import LaunchEarly
from .lower import lower
from .pipeline import Pass, Pipeline

DEFAULT = Pipeline((CommonSubexpressions(), DeadCode(), BucketAllReduces(), LaunchEarly()))

__all__ = [
    "DEFAULT",
    "BucketAllReduces",
    "CommonSubexpressions",
    "DeadCode",
    "LaunchEarly",
    "Pass",
    "Pipeline",
    "lower",
]
