"""PTX text to statements: where each begins and ends, whatever it means."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import ParseError


@dataclass(frozen=True)
class Statement:
    """kind is directive, header (of an entry, up to its brace), open, close, label or instruction."""

    kind: str
    text: str
    line: int


_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"[^"\n]*"', re.S)
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
