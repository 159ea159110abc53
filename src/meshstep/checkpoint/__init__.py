"""Checkpoints that move: from any mesh and plan to any other, to and from one process and a plain `state_dict`."""

from .api import Handle, load, save
from .rotating import Rotating

__all__ = ["Handle", "Rotating", "load", "save"]
