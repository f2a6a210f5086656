"""Reading and editing Python source for `rename.py`: scopes, members of classes, strings that name something."""

from __future__ import annotations

import ast
import io
import re
import symtable
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

BY_TEXT = {"getattr", "setattr", "hasattr", "delattr", "delitem", "attrgetter", "methodcaller", "object"}
"""Functions whose string arguments name attributes; `object` is `patch.object`."""


@dataclass
class ClassMembers:
    name: str
    file: Path
    bases: list[str]
    members: set[str]


def list_classes(tree: ast.AST, file: Path) -> Iterator[ClassMembers]:
    """Classes with the names of their methods, class variables and attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            members = set()
            for each in ast.walk(node):
                if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self":
                    members.add(each.attr)
            for each in node.body:
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                    members.add(each.name)
                elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    members.add(each.target.id)
                elif isinstance(each, ast.Assign):
                    members |= {target.id for target in each.targets if isinstance(target, ast.Name)}
            bases = [base.id if isinstance(base, ast.Name) else getattr(base, "attr", "") for base in node.bases]
            yield ClassMembers(node.name, file, bases, members)


def with_bases(one: ClassMembers, classes: dict[str, ClassMembers]) -> list[ClassMembers]:
    """A class, and those that it inherits from."""
    found, todo = [], [one]
    while todo:
        each = todo.pop()
        if each not in found:
            found.append(each)
            todo += [classes[name] for name in each.bases if name in classes]
    return found


def list_scopes(text: str, file: Path) -> Iterator[tuple[symtable.SymbolTable, set[str]]]:
    """Each scope, with the names that are used in it and in the scopes that see its names."""

    def below(table: symtable.SymbolTable) -> list[symtable.SymbolTable]:
        return [table, *(inner for child in table.get_children() for inner in below(child))]

    for table in below(symtable.symtable(text, str(file), "exec")):
        seen = [table] if table.get_type() == "class" else below(table)  # methods do not see the names of their class
        yield table, {name for each in seen for name in each.get_identifiers()}


def follow_modules(text: str, names: dict[str, str]) -> str:
    """Uses of imported modules with their new last names; attributes and keyword arguments of the same name stay."""
    edits, starts, depth = [], line_starts(text), 0
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    for before, token, after in zip([tokens[-1], *tokens], tokens, [*tokens[1:], tokens[-1]], strict=False):
        depth += (token.string in ("(", "[", "{")) - (token.string in (")", "]", "}"))
        is_keyword = depth > 0 and after.string == "="
        if token.type == tokenize.NAME and token.string in names and before.string != "." and not is_keyword:
            at = starts[token.start[0] - 1] + token.start[1]
            edits.append((at, at + len(token.string), names[token.string]))
    return apply_edits(text, edits)


def may_follow(text: str, file: Path, package: str, old: str, new: str) -> bool:
    """Whether all uses of a module that is imported from `package` can take its new last name."""
    for node in ast.walk(ast.parse(text)):
        is_other = isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", None) != package
        if is_other and any((alias.asname or alias.name) == old for alias in node.names):
            return False
    for table, _ in list_scopes(text, file):
        names = table.get_identifiers()
        if new in names:
            return False
        if old in names and (symbol := table.lookup(old)).is_local() and not symbol.is_imported():
            return False
    return True


def strings_that_name(text: str) -> set[tuple[int, int]]:
    """Where strings stand that name something: in `__all__`, and as arguments of `getattr` and the like."""
    found: set[tuple[int, int]] = set()
    for node in ast.walk(ast.parse(text)):
        values: Iterable[ast.AST] = ()
        if isinstance(node, ast.Assign) and any(getattr(one, "id", "") == "__all__" for one in node.targets):
            values = ast.walk(node.value)
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            values = node.args if name in BY_TEXT else ()
        lines = text.split("\n")
        for one in values:
            if isinstance(one, ast.Constant) and isinstance(one.value, str):
                column = len(lines[one.lineno - 1].encode()[: one.col_offset].decode())
                found.add((one.lineno, column))
    return found


def replace_words(text: str, names: dict[str, str], count: Callable[[str, str], None]) -> str:
    def replaced(word: re.Match[str]) -> str:
        new = names.get(word.group(), word.group())
        count(word.group(), new)
        return new

    return re.sub(r"\w+", replaced, text) if names else text


def replace_in_fields(text: str, change: Callable[[str], str]) -> str:
    """An f-string with the expressions in its braces changed."""
    done, at = "", 0
    while at < len(text):
        if text[at] != "{" or text.startswith("{{", at):
            step = 2 if text.startswith("{{", at) else 1
            done, at = done + text[at : at + step], at + step
            continue
        depth, end, quote = 1, at + 1, ""
        while end < len(text) and depth:
            character = text[end]
            if quote:  # brackets in quotes close nothing: `f"{name.removesuffix(')')}"`
                quote = "" if character == quote else quote
            elif character in "'\"":
                quote = character
            else:
                depth += (character in "{[(") - (character in "}])")
            end += 1
        expression, mark, form = split_form(text[at + 1 : end - 1])
        done += "{" + change(expression) + mark + (replace_in_fields(form, change) if form else "") + "}"
        at = end
    return done


def split_form(field_text: str) -> tuple[str, str, str]:
    """The expression of a field, the `:` or `!`, and the format behind it."""
    depth, quote = 0, ""
    for at, character in enumerate(field_text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif depth == 0 and (character == ":" or (character == "!" and field_text[at + 1 : at + 2] != "=")):
            return field_text[:at], character, field_text[at + 1 :]
    return field_text, "", ""


def line_starts(text: str) -> list[int]:
    return [0, *(found.end() for found in re.finditer("\n", text)), len(text)]


def apply_edits(text: str, edits: list[tuple[int, int, str]]) -> str:
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text
