"""PTX text to kernels: parameters, registers, labels and instructions. What a name means is decided here, what an
instruction does is not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .errors import ParseError

TYPE_BITS = {
    "pred": 1,
    **{kind + str(bits): bits for kind in "usb" for bits in (8, 16, 32, 64)},
    "f32": 32,
    "f64": 64,
}


@dataclass(frozen=True)
class Statement:
    """kind is directive, header (of an entry, up to its brace), open, close, label or instruction."""

    kind: str
    text: str
    line: int


@dataclass(frozen=True)
class Register:
    index: int
    name: str
    type: str

    @property
    def bits(self) -> int:
        return TYPE_BITS[self.type]


@dataclass(frozen=True)
class SpecialRegister:
    name: str


@dataclass(frozen=True)
class IntImmediate:
    value: int


@dataclass(frozen=True)
class FloatImmediate:
    """A literal's pattern: bits is 32 for 0f..., 64 for 0d... and for a decimal."""

    pattern: int
    bits: int


@dataclass(frozen=True)
class Symbol:
    """A label, a parameter or something else that has a name."""

    name: str


@dataclass(frozen=True)
class Address:
    base: Register | Symbol
    offset: int


@dataclass(frozen=True)
class Vector:
    elements: tuple[Operand, ...]


@dataclass(frozen=True)
class Negated:
    """!%p as a source."""

    register: Register


@dataclass(frozen=True)
class PredicatePair:
    """%p|%q as a destination."""

    first: Register | Sink
    second: Register | Sink


@dataclass(frozen=True)
class Sink:
    """_: the destination of a value that nobody wants."""


Operand = (
    Register
    | SpecialRegister
    | IntImmediate
    | FloatImmediate
    | Symbol
    | Address
    | Vector
    | Negated
    | PredicatePair
    | Sink
)


@dataclass(frozen=True)
class Instruction:
    text: str
    line: int
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None = None
    guard_negated: bool = False


@dataclass(frozen=True)
class Parameter:
    """offset is from the start of the parameter block; size and alignment are in bytes."""

    name: str
    type: str
    offset: int
    size: int
    alignment: int


@dataclass
class KernelText:
    name: str
    line: int
    parameters: list[Parameter]
    max_threads: int | None = None
    required_threads: int | None = None
    registers: list[Register] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # to the index of the instruction that follows
    undefined: set[str] = field(default_factory=set)  # registers of which the compiler says that any value will do


@dataclass
class ModuleText:
    version: str
    target: str
    kernels: dict[str, KernelText]


# ---- statements ---------------------------------------------------------------------------------------------------

_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"[^"\n]*"', re.S)
_UNDEFINED = re.compile(r"//\s*implicit-def:\s*(%?[\w$]+)")
_LINE_DIRECTIVE = re.compile(r"\.(?:version|target|address_size|file|loc)\b[^\n]*")
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
_SPACE = re.compile(r"\s*")
_END = re.compile(r'[;{}"]')


def strip_comments(text: str) -> str:
    """Comments become blanks of as many lines, so that positions keep their line numbers."""

    def blank(match: re.Match[str]) -> str:
        piece = match.group()
        return piece if piece.startswith('"') else "\n" * piece.count("\n") + " "

    return _COMMENT.sub(blank, text)


def split_statements(text: str) -> Iterator[Statement]:
    """All statements of a file without comments, in order. Raises ParseError where one does not end."""
    at, line, counted = 0, 1, 0
    while True:
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        line += text.count("\n", counted, at)
        counted = at
        if at == len(text):
            return
        if match := _LINE_DIRECTIVE.match(text, at):
            yield Statement("directive", match.group().strip(), line)
            at = match.end()
        elif match := _LABEL.match(text, at):
            yield Statement("label", match.group(1), line)
            at = match.end()
        elif text[at] == "{":
            yield Statement("open", "{", line)
            at += 1
        elif text[at] == "}":
            yield Statement("close", "}", line)
            at += 1
        else:
            kind, end = _end_of_statement(text, at, line)
            yield Statement(kind, " ".join(text[at:end].split()), line)
            at = end if kind == "header" else end + 1


def _end_of_statement(text: str, start: int, line: int) -> tuple[str, int]:
    is_directive = text[start] == "."
    at = start
    while match := _END.search(text, at):
        mark, at = match.group(), match.end()
        if mark == ";":
            return ("directive" if is_directive else "instruction"), at - 1
        if mark == '"':
            at = text.find('"', at) + 1
        elif mark == "{" and is_directive and "=" not in text[start:at]:
            return "header", at - 1
        elif mark == "{":  # a vector operand or an initialiser
            at = text.find("}", at) + 1
        else:
            break
        if at == 0:
            break
    raise ParseError(f"line {line}: a statement without end: {text[start : start + 60].strip()!r}")


# ---- operands -----------------------------------------------------------------------------------------------------

_INTEGER = re.compile(r"(-?)(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9][0-9]*)U?$")
_FLOAT_PATTERN = re.compile(r"0[fF]([0-9a-fA-F]{8})$|0[dD]([0-9a-fA-F]{16})$")
_ADDRESS = re.compile(r"\[\s*([%$\w.]+)\s*(?:([+-])\s*(-?\s*\w+)\s*)?\]$")
_NAME = re.compile(r"[%$A-Za-z_][\w$]*(?:\.[xyzw])?$")


def parse_integer(text: str) -> int | None:
    match = _INTEGER.match(text)
    if not match:
        return None
    digits = match.group(2).lower()
    if digits.startswith(("0x", "0b")):
        value = int(digits, 0)
    else:
        value = int(digits, 8 if digits.startswith("0") else 10)
    return -value if match.group(1) else value


class _Scopes:
    """Which register a name means; inline assembly opens scopes of its own."""

    def __init__(self, kernel: KernelText) -> None:
        self.kernel = kernel
        self.frames: list[dict[str, Register]] = [{}]

    def declare(self, type_: str, name: str) -> None:
        if name in self.frames[-1]:
            raise ParseError(f"{self.kernel.name}: register {name} is declared twice in one scope")
        register = Register(len(self.kernel.registers), name, type_)
        self.kernel.registers.append(register)
        self.frames[-1][name] = register

    def find(self, name: str) -> Register | None:
        for frame in reversed(self.frames):
            if name in frame:
                return frame[name]
        return None


def _split_operands(text: str) -> list[str]:
    pieces, depth, start = [], 0, 0
    for at, char in enumerate(text):
        if char in "{[(":
            depth += 1
        elif char in "}])":
            depth -= 1
        elif char == "," and depth == 0:
            pieces.append(text[start:at].strip())
            start = at + 1
    pieces.append(text[start:].strip())
    return pieces if pieces != [""] else []


def _parse_operand(text: str, scopes: _Scopes) -> Operand:
    if text == "_":
        return Sink()
    register = scopes.find(text)
    if register is not None:
        return register
    if text.startswith("{") and text.endswith("}"):
        return Vector(tuple(_parse_operand(piece, scopes) for piece in _split_operands(text[1:-1])))
    if match := _FLOAT_PATTERN.match(text):
        single, double = match.groups()
        return FloatImmediate(int(single, 16), 32) if single else FloatImmediate(int(double, 16), 64)
    value = parse_integer(text)
    if value is not None:
        return IntImmediate(value)
    if match := _ADDRESS.match(text):
        name, sign, offset_text = match.groups()
        offset = 0 if sign is None else parse_integer(offset_text.replace(" ", ""))
        if offset is None:
            raise ParseError(f"offset {offset_text!r} of an address must be an integer")
        base = scopes.find(name)
        if base is None and name.startswith("%"):
            raise ParseError(f"register {name} is not declared")
        if base is None and not _NAME.match(name):
            raise ParseError(f"an address must be a register or a name plus an offset, got {text!r}")
        return Address(base or Symbol(name), -offset if sign == "-" else offset)
    if text.startswith("!"):
        register = scopes.find(text[1:].strip())
        if register is None:
            raise ParseError(f"register {text[1:]} is not declared")
        return Negated(register)
    if "|" in text:
        halves = [_parse_operand(half.strip(), scopes) for half in text.split("|")]
        if len(halves) != 2 or not all(isinstance(half, Register | Sink) for half in halves):
            raise ParseError(f"a pair of destinations must be two registers, got {text!r}")
        return PredicatePair(*halves)  # type: ignore[arg-type]
    if _NAME.match(text):
        return SpecialRegister(text) if text.startswith("%") else Symbol(text)
    raise ParseError(f"operand {text!r} is not understood")


_INSTRUCTION = re.compile(r"(?:@\s*(!?)\s*([%$\w]+)\s+)?([A-Za-z_][\w.:]*)\s*(.*)$", re.S)


def _parse_instruction(statement: Statement, scopes: _Scopes) -> Instruction:
    match = _INSTRUCTION.match(statement.text)
    if not match:
        raise ParseError(f"{statement.text!r} is not an instruction")
    negated, guard_name, opcode, operands = match.groups()
    guard = None
    if guard_name is not None:
        guard = scopes.find(guard_name)
        if guard is None or guard.type != "pred":
            raise ParseError(f"guard {guard_name} must be a declared predicate")
    name, *modifiers = opcode.split(".")
    return Instruction(
        text=statement.text,
        line=statement.line,
        opcode=name,
        modifiers=tuple(modifiers),
        operands=tuple(_parse_operand(piece, scopes) for piece in _split_operands(operands)),
        guard=guard,
        guard_negated=bool(negated),
    )


# ---- declarations -------------------------------------------------------------------------------------------------

_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.+)$", re.S)
_RANGE = re.compile(r"([%$\w]+)<(\d+)>$")
_HEADER = re.compile(r"(?:\.visible\s+|\.weak\s+)?\.entry\s+([\w$]+)\s*(?:\((.*?)\))?\s*(.*)$", re.S)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s*"
    r"(?:\.ptr\s*(?:\.(?:global|const|shared|local)\s*)?(?:\.align\s+\d+\s*)?)?"
    r"\s([\w$]+)(?:\[(\d+)\])?$"
)
_TUNING = re.compile(r"\.(maxntid|reqntid|minnctapersm|maxnreg)\s+(\d+(?:\s*,\s*\d+)*)\s*")
# Neither changes what a kernel computes: the first is about unrolling, the second says which bytes of the next load
# are used.
_HARMLESS_PRAGMA = re.compile(r'\.pragma\s+"(?:nounroll|used_bytes_mask\s+(?:0x)?[0-9a-fA-F]+)"$')


def _declare_registers(text: str, scopes: _Scopes) -> None:
    match = _REGISTERS.match(text)
    if not match or match.group(1) not in TYPE_BITS:
        raise ParseError(f"register declaration {text!r} is not understood")
    for piece in match.group(2).split(","):
        piece = piece.strip()
        if numbered := _RANGE.match(piece):
            for number in range(int(numbered.group(2))):
                scopes.declare(match.group(1), f"{numbered.group(1)}{number}")
        elif _NAME.match(piece):
            scopes.declare(match.group(1), piece)
        else:
            raise ParseError(f"register declaration {text!r} is not understood")


def _parse_header(statement: Statement) -> KernelText:
    match = _HEADER.match(statement.text)
    if not match:
        raise ParseError(f"line {statement.line}: only kernels (.entry) are supported, got {statement.text[:80]!r}")
    name, parameter_list, tuning = match.groups()
    kernel = KernelText(name, statement.line, [])
    end = 0
    for piece in (parameter_list or "").split(","):
        if not piece.strip():
            continue
        found = _PARAMETER.match(piece.strip())
        if not found or found.group(2) not in TYPE_BITS:
            raise ParseError(f"line {statement.line}: parameter {piece.strip()!r} of {name} is not understood")
        align, type_, parameter, count = found.groups()
        element = TYPE_BITS[type_] // 8
        alignment = int(align) if align else element
        offset = -(-end // alignment) * alignment
        size = element * (int(count) if count else 1)
        kernel.parameters.append(Parameter(parameter, type_, offset, size, alignment))
        end = offset + size
    at = 0
    while at < len(tuning):
        found = _TUNING.match(tuning, at)
        if not found:
            raise ParseError(f"line {statement.line}: directive {tuning[at:]!r} of {name} is not known")
        threads = 1
        for number in found.group(2).split(","):
            threads *= int(number)
        if found.group(1) == "maxntid":
            kernel.max_threads = threads
        elif found.group(1) == "reqntid":
            kernel.required_threads = threads
        at = found.end()
    return kernel


def extract_kernel(text: str, name: str) -> str:
    """The PTX of one kernel alone, on the lines where it stands in `text`. Raises KeyError without that kernel."""
    depth, inside = 0, False
    first = last = 0
    lines = text.split("\n")
    head = [line for line in lines if line.startswith((".version", ".target", ".address_size"))]
    for statement in split_statements(strip_comments(text)):
        if statement.kind == "header" and depth == 0:
            match = _HEADER.match(statement.text)
            inside = match is not None and match.group(1) == name
            first = statement.line if inside else first
        depth += {"open": 1, "close": -1}.get(statement.kind, 0)
        if inside and statement.kind == "close" and depth == 0:
            last = statement.line
            break
    else:
        raise KeyError(f"there is no kernel {name}")
    blank = max(0, first - 1 - len(head))
    return "\n".join([*head, *[""] * blank, *lines[first - 1 : last], ""])


def parse_module(text: str) -> ModuleText:
    """Raises ParseError for what is not understood, anywhere in the file: nothing is skipped."""
    undefined = set(_UNDEFINED.findall(text))
    module = ModuleText("", "", {})
    statements = split_statements(strip_comments(text))
    for statement in statements:
        first = statement.text.split(maxsplit=1)[0]
        if statement.kind == "header":
            kernel = _parse_header(statement)
            kernel.undefined = undefined
            if kernel.name in module.kernels:
                raise ParseError(f"line {statement.line}: kernel {kernel.name} is defined twice")
            _parse_body(kernel, statements)
            module.kernels[kernel.name] = kernel
        elif statement.kind == "directive" and first == ".version":
            module.version = statement.text.split()[1]
        elif statement.kind == "directive" and first == ".target":
            module.target = statement.text.split(maxsplit=1)[1]
        elif statement.kind == "directive" and first == ".address_size":
            if statement.text.split()[1] != "64":
                raise ParseError(f"line {statement.line}: addresses must have 64 bits")
        elif statement.kind != "directive" or first != ".file":
            raise ParseError(f"line {statement.line}: {statement.text[:80]!r} outside a kernel is not supported")
    return module


def _parse_body(kernel: KernelText, statements: Iterator[Statement]) -> None:
    scopes = _Scopes(kernel)
    if next(statements).kind != "open":
        raise ParseError(f"line {kernel.line}: {kernel.name} has no body")
    for statement in statements:
        first = statement.text.split(maxsplit=1)[0]
        try:
            if statement.kind == "open":
                scopes.frames.append({})
            elif statement.kind == "close":
                scopes.frames.pop()
                if not scopes.frames:
                    break
            elif statement.kind == "label":
                if statement.text in kernel.labels:
                    raise ParseError(f"label {statement.text} is defined twice")
                kernel.labels[statement.text] = len(kernel.instructions)
            elif statement.kind == "instruction":
                kernel.instructions.append(_parse_instruction(statement, scopes))
            elif statement.kind == "directive" and first == ".reg":
                _declare_registers(statement.text, scopes)
            elif statement.kind == "directive" and first == ".loc":
                pass  # where in the source
            elif statement.kind == "directive" and _HARMLESS_PRAGMA.match(statement.text):
                pass
            else:
                raise ParseError(f"directive {statement.text!r} in a kernel is not supported")
        except ParseError as error:
            raise ParseError(f"{kernel.name}, line {statement.line}: {error}") from None
    else:
        raise ParseError(f"line {kernel.line}: the body of {kernel.name} does not end")
