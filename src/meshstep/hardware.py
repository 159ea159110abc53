"""The hardware table, and a calibration of this machine."""

from .plan.hardware import Hardware, get, register, table
from .runtime.measure import measure

__all__ = ["Hardware", "get", "measure", "register", "table"]
