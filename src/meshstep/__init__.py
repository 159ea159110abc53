"""Compiles a single-device PyTorch train step into one program for a mesh of devices, and proves it equal."""

from . import _torch, checkpoint, hardware, rules
from .api import CompiledStep, SimulatedStep, compile, simulate, verify  # noqa: A004
from .arguments import dynamic
from .batch_norm import LocalBatchNorm
from .contract import contract, get_registry
from .errors import (
    CaptureError,
    CheckpointError,
    InputError,
    LayoutError,
    MeshstepError,
    PassError,
    PlanError,
    RankMismatchError,
    RuleError,
    VerifyError,
)
from .layout import Layout
from .lowered import Lowered
from .materialize import materialize
from .mesh import Mesh
from .opaque import Opaque
from .override import Override
from .passes import Pass, Pipeline
from .plan import named as plans
from .plan.plan import Plan
from .rules.user import rule
from .runtime.cache import CacheInfo
from .runtime.world import World, init
from .schema import Schema
from .spmd import SPMD, DistributedGraph, aot_function, distribute
from .verification import Verification

_torch.check_version()

__version__ = "0.1.0"
__all__ = [
    "SPMD",
    "CacheInfo",
    "CaptureError",
    "CheckpointError",
    "CompiledStep",
    "DistributedGraph",
    "InputError",
    "Layout",
    "LayoutError",
    "LocalBatchNorm",
    "Lowered",
    "Mesh",
    "MeshstepError",
    "Opaque",
    "Override",
    "Pass",
    "PassError",
    "Pipeline",
    "Plan",
    "PlanError",
    "RankMismatchError",
    "RuleError",
    "Schema",
    "SimulatedStep",
    "Verification",
    "VerifyError",
    "World",
    "aot_function",
    "checkpoint",
    "compile",
    "contract",
    "distribute",
    "dynamic",
    "get_registry",
    "hardware",
    "init",
    "materialize",
    "plans",
    "rule",
    "rules",
    "simulate",
    "verify",
]
