"""Renames names, modules and files in the whole repository, by tokens and not by text.

    python scripts/rename.py table.tsv              rename, and print what changed and what was left alone
    python scripts/rename.py table.tsv --dry-run    only print

Each line of the table is OLD, NEW and, if only some folders or files are meant, these; separated by tabs:

    posttrain.rollout.turns     posttrain.conversations     a module or a package, moved with `git mv`
    tests/rollout/test_a.py     tests/conversations/test_a.py     a file, moved with `git mv`
    took                        receive     posttrain/controller tests/workers     a name, in these places only
    test_S0_01_it_is_yaml       test_it_is_yaml     a name: function, class, variable, parameter or attribute

In Python, a name changes wherever it is a token: also as an attribute and as a keyword argument, in the expressions of
f-strings, and as text in `__all__`, `getattr` and the like. In other text (strings, comments, docs) it changes in
backticks; modules and files change wherever their dotted name or path stands. Mutants (`scripts/mutants`) and the table
of seeds change with the code and the tests that they name.

Nothing is changed if a new name is already taken where the old one is used.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import shutil
import subprocess
import symtable
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from code_places import NoPlaceError, find, index
from python_source import (
    ClassMembers,
    apply_edits,
    follow_modules,
    line_starts,
    list_classes,
    list_scopes,
    may_follow,
    replace_in_fields,
    replace_words,
    strings_that_name,
    with_bases,
)

FOLDERS = ("posttrain", "compat", "tests", "scripts", "examples", "docs")
TEXTS = (".md", ".toml", ".yml", ".yaml", ".tsv", ".sh", ".ipynb", ".txt")
CODE_SPAN = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.S)
STRING = re.compile(r"(?P<prefix>[a-zA-Z]*)(?P<quote>'''|\"\"\"|'|\")(?P<body>.*)(?P=quote)", re.S)


@dataclass(frozen=True)
class Rename:
    """One line of the table. `where`: the folders or files that it is limited to; none means all."""

    old: str
    new: str
    where: tuple[str, ...] = ()

    @property
    def is_file(self) -> bool:
        return "/" in self.old

    @property
    def is_module(self) -> bool:
        return "." in self.old and not self.is_file

    def covers(self, file: Path) -> bool:
        return not self.where or any(file.is_relative_to(place) for place in self.where)


@dataclass
class Report:
    """What was renamed how often, by file, and what a person should look at."""

    changed: dict[Path, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    moved: list[tuple[Path, Path]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def text(self) -> str:
        lines = [f"moved {old} -> {new}" for old, new in self.moved]
        for file, counts in sorted(self.changed.items()):
            lines.append(f"{file}: " + ", ".join(f"{name} ({count})" for name, count in counts.items()))
        return "\n".join([*lines, *(f"left alone: {line}" for line in self.left)])


class RefusedError(Exception):
    """The table cannot be applied; the message says why."""


def read_table(path: Path) -> list[Rename]:
    """The lines of the table, without comments and empty ones."""
    found = []
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            old, new, *where = [part.strip() for part in re.split(r"\t+| {2,}", line.strip())]
            found.append(Rename(old, new, tuple(" ".join(where).split())))
    return found


class Renamer:
    """Applies a table to the tree at `root`."""

    def __init__(self, root: Path, table: list[Rename]) -> None:
        self.root, self.report = root, Report()
        self.names = [one for one in table if not one.is_file and not one.is_module]
        self.modules = [one for one in table if one.is_module]
        self.files = [one for one in table if one.is_file]
        self.paths = {one.old: one.new for one in self.files}
        for one in self.modules:
            old, new = one.old.replace(".", "/"), one.new.replace(".", "/")
            is_package = (root / old).is_dir()
            self.paths[old if is_package else f"{old}.py"] = new if is_package else f"{new}.py"

    def apply(self, *, dry_run: bool = False) -> Report:
        """Check everything, then change files, then move them."""
        sources = {file: (self.root / file).read_text() for file in self._listed()}
        python = {file: text for file, text in sources.items() if file.suffix == ".py"}
        if problems := [*self._missing(python), *self._collisions(python)]:
            raise RefusedError("\n".join(problems))
        mutants = {file: self._mutants(file, text) for file, text in sources.items() if self._is_mutants(file)}
        changed = {file: self._python(file, text) for file, text in python.items()}
        changed |= {file: self._text(file, text) for file, text in sources.items() if file not in python} | mutants
        changed = {file: text for file, text in changed.items() if text != sources[file]}
        moves = [(Path(old), Path(new)) for old, new in self.paths.items()]
        self.report.moved += moves
        if dry_run:
            return self.report
        for file, text in changed.items():
            (self.root / file).write_text(text)
        for old, new in moves:
            (self.root / new).parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["git", "mv", str(old), str(new)], cwd=self.root, check=True)
        self._format([self._moved(file) for file in changed if file.suffix == ".py"])
        return self.report

    def _listed(self) -> list[Path]:
        """The files that git knows, of the folders and at the top."""
        command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
        done = subprocess.run(command, cwd=self.root, capture_output=True, check=True, text=True)
        files = [Path(name) for name in done.stdout.split("\0") if name and (self.root / name).is_file()]
        wanted = [one for one in files if one.parts[0] in FOLDERS or (len(one.parts) == 1 and one.suffix != ".md")]
        wanted += [one for one in files if one.name.startswith("README") and len(one.parts) == 1]
        return sorted({one for one in wanted if one.suffix == ".py" or one.suffix in TEXTS})

    def _moved(self, file: Path) -> Path:
        for old, new in self.paths.items():
            if file.is_relative_to(old):
                return Path(new) / file.relative_to(old)
        return file

    def _format(self, files: list[Path]) -> None:
        """New names have other lengths and another order of imports."""
        ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
        if ruff and files:
            for command in (["check", "-q", "--select", "I", "--fix", "--exit-zero"], ["format", "-q"]):
                subprocess.run([ruff, *command, *map(str, files)], cwd=self.root, check=True)

    # Collisions

    def _missing(self, python: dict[Path, str]) -> Iterator[str]:
        words = {word for text in python.values() for word in re.findall(r"\w+", text)}
        yield from (f"there is no `{one.old}`" for one in self.names if one.old not in words)
        for one in self.names:
            if not one.new.isidentifier():
                yield f"`{one.new}` is no name"
        for old, new in self.paths.items():
            if not (self.root / old).exists():
                yield f"there is no {old}"
            elif (self.root / new).exists() and new not in self.paths:
                yield f"{new} is there already"

    def _collisions(self, python: dict[Path, str]) -> Iterator[str]:
        """New names that are already used in a scope, or by a class, that uses the old one."""
        classes: dict[str, ClassMembers] = {}
        for file, text in python.items():
            words = set(re.findall(r"\w+", text)) if self.names else set()
            here = {one.old: one.new for one in self.names if one.covers(file) and one.old in words}
            if self.names and "class" in words:
                classes |= {found.name: found for found in list_classes(ast.parse(text), file)}
            for table, inside in list_scopes(text, file) if here else ():
                for old in here.keys() & set(table.get_identifiers()):
                    if here[old] in {here.get(name, name) for name in inside if name != old}:
                        place = f"{file}:{table.get_lineno()}"
                        yield f"{place}: `{here[old]}` is used beside `{old}` in {table.get_name()}"
        for found in classes.values():
            names = {one.old: one.new for one in self.names if one.covers(found.file)}
            members = {name for each in with_bases(found, classes) for name in each.members}
            for old in found.members & names.keys():
                if names[old] in {names.get(name, name) for name in members if name != old}:
                    yield f"{found.file}: class {found.name} has `{names[old]}` and `{old}`"
        for one in self.modules:
            package, _, leaf = one.new.rpartition(".")
            home = Path(*package.split("."), "__init__.py")
            text = python.get(home, "")
            if text and leaf in symtable.symtable(text, str(home), "exec").get_identifiers():
                yield f"{home}: `{leaf}` is a name there already"

    # Python

    def _python(self, file: Path, text: str) -> str:
        names = {one.old: one.new for one in self.names if one.covers(file) and one.old in text}
        named = [one.old for one in self.modules if one.old.rpartition(".")[2] in text]
        if not names and not named and not self._has_path(text):
            return text
        text = self._imports(file, text)
        exact = strings_that_name(text) if names else set()
        edits: list[tuple[int, int, str]] = []
        tokens, starts = list(tokenize.generate_tokens(io.StringIO(text).readline)), line_starts(text)
        for token in tokens:
            at = starts[token.start[0] - 1] + token.start[1]
            new = token.string
            if token.type == tokenize.NAME:
                new = names.get(token.string, token.string)
                self._count(file, token.string, new)
            elif token.type in (tokenize.STRING, tokenize.COMMENT):
                new = self._string(file, token, names, is_name=token.start in exact)
            if new != token.string:
                edits.append((at, at + len(token.string), new))
        text = apply_edits(text, edits)
        return self._dotted(file, text) if self.modules else text

    def _string(self, file: Path, token: tokenize.TokenInfo, names: dict[str, str], *, is_name: bool) -> str:
        found = STRING.fullmatch(token.string) if token.type == tokenize.STRING else None
        text = token.string
        if found is not None:
            body = found["body"]
            if body in names:
                if not is_name:
                    self.report.left.append(f"{file}:{token.start[0]}: the string {token.string}")
                    return text
                self._count(file, body, names[body])
                return text.replace(body, names[body])
            if re.fullmatch(r"[\w.]+[.:](\w+)", body) and body.rpartition(".")[2].rpartition(":")[2] in names:
                if body.startswith(("posttrain.", "tests.", "compat.")):
                    text = replace_words(text, names, lambda old, new: self._count(file, old, new))
            elif "f" in found["prefix"].lower():
                text = replace_in_fields(text, lambda code: self._code(file, code, names))
        text = CODE_SPAN.sub(lambda span: self._span(file, span.group(), names), text)
        return self._replace_paths(file, text)

    def _span(self, file: Path, text: str, names: dict[str, str]) -> str:
        return replace_words(text, names, lambda old, new: self._count(file, old, new))

    def _code(self, file: Path, code: str, names: dict[str, str]) -> str:
        """Part of a statement, by tokens."""
        edits, starts = [], line_starts(code)
        try:
            for token in tokenize.generate_tokens(io.StringIO(code).readline):
                if token.type == tokenize.NAME and token.string in names:
                    at = starts[token.start[0] - 1] + token.start[1]
                    edits.append((at, at + len(token.string), names[token.string]))
                    self._count(file, token.string, names[token.string])
        except (tokenize.TokenError, IndentationError):
            pass
        return apply_edits(code, edits)

    def _dotted(self, file: Path, text: str) -> str:
        """Dotted names of modules: in imports, in expressions, and in all strings and comments."""
        for one in self.modules:
            pattern = rf"(?<![\w.]){re.escape(one.old)}(?!\w)"
            text, count = re.subn(pattern, one.new, text)
            if count:
                self.report.changed[file][one.old] += count
        return text

    def _imports(self, file: Path, text: str) -> str:
        """`from PACKAGE import MODULE`, where the module moves: the line is split, and uses take the new last name."""
        edits: list[tuple[int, int, str]] = []
        follow: dict[str, str] = {}
        moved = {one.old: one.new for one in self.modules}
        starts = line_starts(text)
        tree = ast.parse(text) if any(one.old.rpartition(".")[0] in text for one in self.modules) else None
        for node in ast.walk(tree) if tree is not None else ():
            if not isinstance(node, ast.ImportFrom) or node.module is None or node.level:
                continue
            gone = [alias for alias in node.names if f"{node.module}.{alias.name}" in moved]
            if not gone:
                continue
            kept = [alias for alias in node.names if alias not in gone]
            lines = [f"from {node.module} import " + ", ".join(map(ast.unparse, kept))] if kept else []
            for alias in gone:
                old, (package, _, leaf) = alias.name, moved[f"{node.module}.{alias.name}"].rpartition(".")
                name, follows = alias.asname, alias.asname is None and leaf != alias.name
                if follows and may_follow(text, file, node.module, old, leaf):
                    follow[old] = leaf
                elif follows:
                    name = old
                lines.append(f"from {package} import {leaf}" + (f" as {name}" if name and name != leaf else ""))
                self.report.changed[file][f"{node.module}.{old}"] += 1
            begin = starts[node.lineno - 1] + len(
                text.split("\n")[node.lineno - 1].encode()[: node.col_offset].decode()
            )
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            edits.append((begin, end, ("\n" + " " * node.col_offset).join(lines)))
        text = apply_edits(text, edits)
        return follow_modules(text, follow) if follow else text

    # Everything else

    def _has_path(self, text: str) -> bool:
        return any(old.partition("/")[2] in text for old in self.paths)

    def _replace_paths(self, file: Path, text: str) -> str:
        """Paths of files, also as they are written in docs, without the first folder."""
        for old, new in self.paths.items():
            for before, after in ((old, new), (old.partition("/")[2], new.partition("/")[2])):
                if "/" not in before or before == after:
                    continue
                last = r"(?![\w])" if before.endswith(".py") else r"(?![\w.-])"
                text, count = re.subn(rf"(?<![\w/.-]){re.escape(before)}{last}", after, text)
                if count:
                    self.report.changed[file][before] += count
        return text

    def _text(self, file: Path, text: str) -> str:
        """Docs and tables: names in backticks and code blocks; names of tests anywhere."""
        if file.suffix == ".md":
            names = {one.old: one.new for one in self.names if one.covers(file)}
            text = CODE_SPAN.sub(lambda span: self._span(file, span.group(), names), text)
        tests = {one.old: one.new for one in self.names if one.old.startswith("test_")}
        text = replace_words(text, tests, lambda old, new: self._count(file, old, new))
        return self._dotted(file, self._replace_paths(file, text))

    def _is_mutants(self, file: Path) -> bool:
        return file.parts[:2] == ("scripts", "mutants") and file.suffix == ".toml"

    def _mutants(self, file: Path, text: str) -> str:
        """Mutants name code by function and tokens: those in a file where a name changes change with it."""
        files, blocks = index(self.root / "posttrain"), re.split(r"(?m)^(?=\[\[mutant\]\])", text)
        for number, block in enumerate(blocks):
            if not block.startswith("[[mutant]]"):
                continue
            entry = tomllib.loads(block)["mutant"][0]
            try:
                place = find(files, entry["inside"], entry["code"]).file.relative_to(self.root)
            except NoPlaceError as error:
                self.report.left.append(f"{file}: {error}")
                continue
            names = {one.old: one.new for one in self.names if one.covers(place) and not one.old.startswith("test_")}
            keys = re.compile(r"(?ms)^(?:inside|code|becomes) = (?:'''.*?'''|\"\"\".*?\"\"\"|[^\n]*)$")
            blocks[number] = keys.sub(partial(self._matched, file, names), block)
        return self._text(file, "".join(blocks))

    def _matched(self, file: Path, names: dict[str, str], found: re.Match[str]) -> str:
        return self._span(file, found.group(), names)

    def _count(self, file: Path, old: str, new: str) -> None:
        if old != new:
            self.report.changed[file][old] += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("table", type=Path, help="OLD, NEW and, if only some are meant, folders or files")
    parser.add_argument("--dry-run", action="store_true", help="only print what would change")
    options = parser.parse_args()
    try:
        report = Renamer(Path.cwd(), read_table(options.table)).apply(dry_run=options.dry_run)
    except RefusedError as error:
        print(f"Nothing was changed:\n{error}")
        return 2
    print(report.text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
