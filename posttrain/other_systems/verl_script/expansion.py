"""What `$NAME`, `${NAME:-default}`, `$((...))` and `$(...)` stand for, as far as a script itself says it."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping

_BRACED = re.compile(r"^(#|!)?(\w+|@|\*)(\[[@*]\]|\[\w+\])?(?:(:?[-=+?])(.*)|(##?|%%?|//?|:)(.*))?$", re.DOTALL)
_FALLBACK = re.compile(r"\|\|\s*echo\s+[\"']?(?P<word>[\w.-]+)[\"']?\s*\)$")
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Variables:
    """The script's variables (text) and arrays (words)."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.arrays: dict[str, list[str]] = {}
        # What the script takes from outside: shown as it was written.
        self.unset: list[str] = []

    def named(self, name: str) -> str | list[str]:
        """`$NAME`; `$@` gives its words."""
        if name in ("@", "*"):
            return []  # further arguments of the script
        if name in self.texts:
            return self.texts[name]
        if name in self.arrays:
            return self.arrays[name][0] if self.arrays[name] else ""
        return self.outside(f"${name}")

    def outside(self, text: str) -> str:
        if text not in self.unset:
            self.unset.append(text)
        return text

    def braced(self, inside: str) -> str | list[str]:
        """`${...}`; an array gives its words."""
        match = _BRACED.match(inside)
        if match is None or match[1]:
            return self.outside(f"${{{inside}}}")
        name, index, sign, word = match[2], match[3], match[4], match[5] or ""
        if index in ("[@]", "[*]"):
            return self.arrays.get(name, [])
        # `-` is read as `:-`: an empty value counts as unset.
        present = bool(self.texts.get(name)) or name in self.arrays
        if sign and sign.endswith(("-", "=")):
            return self.named(name) if present else expand_word(word, self)
        if sign and sign.endswith("+"):
            return expand_word(word, self) if present else ""
        if match[6]:
            return self.outside(f"${{{inside}}}")
        return self.named(name)


def expand(text: str, variables: Variables) -> str:
    """The text with its references replaced, quotes left as they are."""
    out, position = [], 0
    while position < len(text):
        value, position = (
            reference(text, position, variables) if text[position] == "$" else (text[position], position + 1)
        )
        out.append(" ".join(value) if isinstance(value, list) else value)
    return "".join(out)


def expand_word(word: str, variables: Variables) -> str:
    """The word of `${NAME:-word}`: as `expand`, without the quotes around its parts."""
    out, position, quote = [], 0, ""
    while position < len(word):
        char = word[position]
        if char == "$" and quote != "'":
            value, position = reference(word, position, variables)
            out.append(" ".join(value) if isinstance(value, list) else value)
        elif char in "\"'" and quote in ("", char):
            quote, position = "" if quote else char, position + 1
        else:
            out.append(char)
            position += 1
    return "".join(out)


def reference(text: str, start: int, variables: Variables) -> tuple[str | list[str], int]:
    """(what the reference at `start` stands for, where it ends)."""
    rest = text[start:]
    if rest.startswith("$(("):
        end = _closing(text, start + 1, "(", ")")
        return _arithmetic(text[start + 3 : end - 2], variables), end
    if rest.startswith("$("):
        end = _closing(text, start + 1, "(", ")")
        # Commands are never run. Where the script itself has a value for a failing one, that is taken.
        assumed = fallback(text[start:end])
        return variables.outside(text[start:end]) if assumed is None else assumed, end
    if rest.startswith("${"):
        end = _closing(text, start + 1, "{", "}")
        return variables.braced(text[start + 2 : end - 1]), end
    name = re.match(r"\$(\w+|[@*])", rest)
    if name is None:
        return "$", start + 1
    return variables.named(name[1]), start + len(name[0])


def fallback(command: str) -> str | None:
    """What `$(PROBE && echo A || echo B)` gives where the probe fails, as for a package that is not installed: B."""
    match = _FALLBACK.search(command)
    return match["word"] if match else None


def _closing(text: str, start: int, opening: str, closing: str) -> int:
    """The place behind the bracket that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == opening) - (text[place] == closing)
        if depth == 0:
            return place + 1
    return len(text)


def _arithmetic(expression: str, variables: Variables) -> str:
    # Parsed and computed here, never evaluated by a shell: a script is only read.
    known = expand(expression, variables)
    try:
        return str(_value(ast.parse(known.strip(), mode="eval").body, variables.texts))
    except (SyntaxError, ValueError, ZeroDivisionError, TypeError):
        return variables.outside(f"$(({expression}))")


def _value(node: ast.expr, names: Mapping[str, str]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return int(names.get(node.id, ""))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, names)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left, names), _value(node.right, names))
    raise ValueError("no arithmetic of whole numbers")
