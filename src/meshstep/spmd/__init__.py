"""The original system's module wrapper: distributed forward and backward under a plain loop."""

from .module import SPMD, DistributedGraph, distribute

__all__ = ["SPMD", "DistributedGraph", "distribute"]
