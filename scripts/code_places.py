"""Finds a piece of code by its function and its tokens, whatever file it is in and however it is laid out.

    place = find(index(folder), inside="Objective._kl", code="return kl * self.config.kl_loss_coef")
    place.replaced("return kl")     the text of place.file with this piece replaced

`inside` is the name of a function or class, or of a variable that a module assigns, with as many names of what it is
defined in as it takes (`Objective._kl`). Comments, line breaks and trailing commas do not matter to `code`; a line
break before or behind it says that a statement begins or ends there.
"""

from __future__ import annotations

import ast
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DEFINITION = re.compile(r"^[ \t]*(?:async def|def|class)[ \t]+(\w+)|^(\w+)[ \t]*(?::[^=\n]*)?=[^=]", re.M)
LAYOUT = (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER)
END_OF_STATEMENT = "\n"
CLOSING = (")", "]", "}")


class NoPlaceError(Exception):
    """The piece of code is nowhere, or in several places; the message says which."""


@dataclass(frozen=True)
class Token:
    """Text, and where it begins and ends in the file."""

    text: str
    start: int = 0
    end: int = 0


@dataclass(frozen=True)
class Place:
    """A piece of a file: the characters from `start` to `end`."""

    file: Path
    start: int
    end: int

    def replaced(self, code: str) -> str:
        """The text of the file with other code in this place; its lines are indented as the first line is."""
        text = self.file.read_text()
        line = text[text.rfind("\n", 0, self.start) + 1 : self.start]
        indent = line[: len(line) - len(line.lstrip())]
        first, _, rest = textwrap.dedent(code.strip("\n")).partition("\n")
        return text[: self.start] + first + textwrap.indent("\n" * bool(rest) + rest, indent) + text[self.end :]


def index(*folders: Path) -> dict[str, list[Path]]:
    """The files of these folders by the names that they define."""
    files: dict[str, list[Path]] = {}
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            names = {found.group(1) or found.group(2) for found in DEFINITION.finditer(file.read_text())}
            for name in names:
                files.setdefault(name, []).append(file)
    return files


def find(files: dict[str, list[Path]], inside: str, code: str) -> Place:
    """The only place of this code; raises NoPlaceError if there is none, or more than one."""
    wanted = code_tokens(code)
    named = files.get(inside.rpartition(".")[2], [])
    possible = [file for file in named if all(text in file.read_text() for text in wanted)]  # others need no parsing
    places = list(dict.fromkeys(place for scope in _scopes(possible, inside) for place in _places(*scope, wanted)))
    if len(places) != 1:
        scopes = _scopes(named, inside)
        if not scopes:
            raise NoPlaceError(f"nothing is named `{inside}` any more")
        files_of = ", ".join(dict.fromkeys(str(file) for file, _, _ in scopes))
        count = f"is there {len(places)} times" if places else "is no longer there"
        raise NoPlaceError(f"`{inside}` ({files_of}): this code {count}: {code.strip()!r}")
    return places[0]


def code_tokens(code: str) -> list[str]:
    """The tokens of a piece of code, which need not be a whole statement."""
    tokens = [token.text for token in _tokens(textwrap.dedent(code.strip("\n")))]
    begins, ends = code.lstrip(" ").startswith("\n"), code.rstrip(" ").endswith("\n")
    return [END_OF_STATEMENT] * begins + tokens + [END_OF_STATEMENT] * ends


def _scopes(files: list[Path], inside: str) -> list[tuple[Path, int, int]]:
    """File, first and last line of whatever is named so."""
    return [(file, *lines) for file in files for lines in _lines_of(file, inside)]


def _lines_of(file: Path, inside: str) -> Iterator[tuple[int, int]]:
    def visit(node: ast.AST, names: str) -> Iterator[tuple[int, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{names}.{child.name}"
                if name.endswith(f".{inside}"):
                    yield min([child.lineno, *(one.lineno for one in child.decorator_list)]), child.end_lineno or 0
                yield from visit(child, name)
            elif isinstance(child, ast.Assign | ast.AnnAssign) and isinstance(node, ast.Module):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                if any(isinstance(target, ast.Name) and target.id == inside for target in targets):
                    yield child.lineno, child.end_lineno or 0
            elif not isinstance(child, ast.expr):
                yield from visit(child, names)

    yield from visit(_parsed(file.read_text()), "")


_parsed = cache(ast.parse)


def _places(file: Path, first: int, last: int, wanted: list[str]) -> Iterator[Place]:
    lines = re.findall(r"[^\n]*\n?", file.read_text())
    tokens = _tokens("".join(lines[first - 1 : last]), sum(map(len, lines[: first - 1])))
    tokens = [Token(END_OF_STATEMENT), *tokens]
    for at in range(len(tokens)):
        matched = _match(tokens, at, wanted)
        named = [token for token in matched if token.text != END_OF_STATEMENT]
        if named:
            yield Place(file, named[0].start, named[-1].end)


def _match(tokens: list[Token], at: int, wanted: list[str]) -> list[Token]:
    """The tokens from `at` on that are these; none if they are not. A comma before a closing bracket may be missing."""
    matched: list[Token] = []
    for place, text in enumerate(wanted):
        here = [token.text for token in tokens[at : at + 2]]
        if matched and text in CLOSING and here == [",", text]:
            at, here = at + 1, here[1:]
        if here[:1] == [text]:
            matched.append(tokens[at])
            at += 1
        elif text != "," or not matched or (wanted[place + 1 :] or here)[0] not in CLOSING:
            return []
    return matched


def _tokens(code: str, offset: int = 0) -> list[Token]:
    """The tokens that matter, of code that may begin or end in the middle of a statement."""
    starts = [offset, *(offset + found.end() for found in re.finditer("\n", code)), offset + len(code)]
    found: list[Token] = []
    try:
        for kind, text, start, end, _ in tokenize.generate_tokens(io.StringIO(code).readline):
            if kind in LAYOUT or (kind == tokenize.NEWLINE and not text):
                continue
            text = END_OF_STATEMENT if kind == tokenize.NEWLINE else text
            found.append(Token(text, starts[start[0] - 1] + start[1], starts[end[0] - 1] + end[1]))
    except (tokenize.TokenError, IndentationError):
        pass  # an open bracket, or a line that is indented less than the first: all tokens have been found
    return found
