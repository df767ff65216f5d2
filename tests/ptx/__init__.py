"""An interpreter of the PTX that nvcc emits for our kernels: their bytes, on machines without a GPU."""

from .errors import (
    BudgetExceeded,
    DivisionByZero,
    ExecutionError,
    LaunchError,
    MemoryFault,
    Misaligned,
    ParseError,
    PtxError,
    Race,
    Trap,
    UndefinedRegister,
    UnsupportedInstruction,
)
from .machine import Kernel, Module, Statistics
from .memory import Memory

__all__ = [
    "BudgetExceeded",
    "DivisionByZero",
    "ExecutionError",
    "Kernel",
    "LaunchError",
    "Memory",
    "MemoryFault",
    "Misaligned",
    "Module",
    "ParseError",
    "PtxError",
    "Race",
    "Statistics",
    "Trap",
    "UndefinedRegister",
    "UnsupportedInstruction",
]
