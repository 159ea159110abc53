"""The original system's module wrapper and graph functions: forward and backward under a plain loop."""

from .aot import aot_function
from .module import SPMD, DistributedGraph, distribute

__all__ = ["SPMD", "DistributedGraph", "aot_function", "distribute"]
