"""An interpreter of the PTX that nvcc emits for our kernels: their bytes, on machines without a GPU."""

from .audit import Audit, audit, inspect
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
from .parse import extract_kernel

__all__ = [
    "Audit",
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
    "audit",
    "extract_kernel",
    "inspect",
]
