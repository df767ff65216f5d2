"""Which instructions our kernels may use, as an explicit list: what is not on it is a violation.

A floating-point operation must be of one meaning on every GPU: rounded as IEEE 754 says by an explicit .rn, which ptxas
never fuses, or exact by nature. The one exception is rsqrt.approx, the seed of a square root that is proved for every
seed within 8 units.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .parse import Statement, split_statements, strip_comments

_FLOAT = r"f(?:32|64)"
_INT = r"[us](?:8|16|32|64)"
_BIT = r"b(?:16|32|64)"
_ANY = r"[usb](?:8|16|32|64)|f32|f64"
_COMPARE_INT = r"(?:eq|ne|lt|le|gt|ge|lo|ls|hi|hs)"
_COMPARE_FLOAT = r"(?:eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan)"
_COMBINE = r"(?:\.(?:and|or|xor))?"
_HINTS = r"(?:\.(?:ca|cg|cs|wb|wt|nc))?"

ALLOWED = (
    # floating point, rounded once to nearest even
    rf"(?:add|sub|mul|div|fma|sqrt|rcp)\.rn\.{_FLOAT}",
    rf"cvt\.rn\.{_FLOAT}\.{_INT}",
    r"cvt\.rn\.f32\.f64",
    r"cvt\.rn\.(?:bf16|f16)(?:x2)?\.f32",
    # the seed of the square root
    r"rsqrt\.approx(?:\.ftz)?\.f32",
    # floating point, exact
    rf"(?:min|max|neg|abs|copysign)\.{_FLOAT}",
    rf"setp\.{_COMPARE_FLOAT}{_COMBINE}\.{_FLOAT}",
    rf"set\.{_COMPARE_FLOAT}{_COMBINE}\.[us]32\.{_FLOAT}",
    rf"testp\.\w+\.{_FLOAT}",
    r"cvt\.f64\.f32",
    r"cvt\.f32\.(?:bf16|f16)",
    rf"cvt\.r[nzmp]i\.{_FLOAT}\.{_FLOAT}",
    rf"cvt\.r[nzmp]i\.{_INT}\.{_FLOAT}",
    # moving values
    rf"(?:mov|selp)\.(?:{_ANY}|pred)",
    rf"slct\.(?:{_ANY})\.s32",
    rf"cvt(?:\.sat)?\.{_INT}\.{_INT}",
    r"cvta(?:\.to)?\.(?:global|param)\.u64",
    rf"ld(?:\.param|\.global)?{_HINTS}(?:\.v[248])?\.(?:{_ANY})",
    rf"st\.global{_HINTS}(?:\.v[248])?\.(?:{_ANY})",
    # integers and bits
    rf"(?:add|sub)(?:\.cc)?\.{_INT}",
    rf"(?:addc|subc)(?:\.cc)?\.{_INT}",
    rf"mul\.(?:lo|hi|wide)\.{_INT}",
    rf"mad\.(?:lo|hi|wide)(?:\.cc)?\.{_INT}",
    rf"madc\.(?:lo|hi)(?:\.cc)?\.{_INT}",
    rf"(?:div|rem|min|max|neg|abs)\.{_INT}",
    rf"setp\.{_COMPARE_INT}{_COMBINE}\.(?:{_INT}|{_BIT})",
    rf"set\.{_COMPARE_INT}{_COMBINE}\.[us]32\.(?:{_INT}|{_BIT})",
    rf"(?:and|or|xor|not)\.(?:{_BIT}|pred)",
    rf"shl\.{_BIT}",
    rf"shr\.(?:{_BIT}|{_INT})",
    r"shf\.[lr]\.(?:wrap|clamp)\.b32",
    rf"bfe\.{_INT}",
    r"(?:bfi|brev|popc|clz)\.b(?:32|64)",
    r"(?:prmt|lop3)\.b32",
    # control
    r"bra(?:\.uni)?",
    r"ret|exit|trap",
)
_ALLOWED = re.compile("|".join(f"(?:{pattern})" for pattern in ALLOWED))
_OPCODE = re.compile(r"(?:@\s*!?\s*[%$\w]+\s+)?([A-Za-z_][\w.:]*)")
_WIDE_STORE = re.compile(rf"st\.global{_HINTS}\.v4\.[ubsf]32")
_FILE_DIRECTIVES = (".version", ".target", ".address_size", ".file")
_KERNEL_DIRECTIVES = (".reg", ".loc", ".pragma")


@dataclass
class Audit:
    """violations: one line each. opcodes: of each kernel, with how often each stands in its text."""

    violations: list[str] = field(default_factory=list)
    opcodes: dict[str, dict[str, int]] = field(default_factory=dict)

    def stores_128_bits(self, kernel: str) -> bool:
        return any(_WIDE_STORE.fullmatch(opcode) for opcode in self.opcodes[kernel])


def inspect(ptx_text: str) -> Audit:
    """Reads any PTX, also what the interpreter refuses."""
    result = Audit()
    depth, kernel = 0, ""
    for statement in split_statements(strip_comments(ptx_text)):
        where = f"line {statement.line}: {kernel + ': ' if kernel else ''}"
        text = statement.text[:100]
        if statement.kind == "header":
            kernel = _name(statement)
            result.opcodes[kernel] = {}
            if ".entry" not in statement.text.split():
                result.violations.append(f"line {statement.line}: {kernel}: only kernels are allowed: {text}")
        elif statement.kind == "open":
            depth += 1
        elif statement.kind == "close":
            depth -= 1
            kernel = kernel if depth else ""
        elif statement.kind == "directive":
            allowed = _KERNEL_DIRECTIVES if depth else _FILE_DIRECTIVES
            if statement.text.split()[0] not in allowed:
                result.violations.append(f"{where}directive not allowed: {text}")
        elif statement.kind == "instruction":
            match = _OPCODE.match(statement.text)
            opcode = match.group(1) if match else ""
            if not _ALLOWED.fullmatch(opcode):
                result.violations.append(f"{where}instruction not allowed: {text}")
            counts = result.opcodes.setdefault(kernel, {})
            counts[opcode] = counts.get(opcode, 0) + 1
    return result


def _name(statement: Statement) -> str:
    match = re.search(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)", statement.text)
    return match.group(1) if match else statement.text[:40]


def audit(ptx_text: str) -> list[str]:
    """The violations of a PTX file, one line each; empty where every instruction and directive is allowed."""
    return inspect(ptx_text).violations
