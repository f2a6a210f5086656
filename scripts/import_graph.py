"""Who imports whom in a package: every form of import, read from source without running it.

    edges = read_graph(Path("posttrain"))  # Import(source="posttrain.cli", target="posttrain.config", line=12), ...
    cycles(as_mapping(edges))              # groups of modules that need each other

Forms: `import a.b`, `from a import b`, relative imports, imports inside functions and under TYPE_CHECKING,
`importlib.import_module("a.b")` and `__import__`, lazy loaders (`import_module(f"{__name__}.{_HOMES[name]}")`
with `_HOMES = {"Name": "module"}`), and any other string that is the whole name of a module (`python -m a.b`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DYNAMIC = {"import_module", "__import__", "find_spec", "resolve_name", "run_module"}
DOTTED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?::\w+)?")

RELATIVE = re.compile(r"\.+[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class Import:
    """One module needs another, at a line of its file; `typing` if for type checkers alone."""

    source: str
    target: str
    line: int
    typing: bool = False


def find_modules(package: Path) -> dict[str, Path]:
    """Every module below a package's folder by its dotted name; a package's name stands for its __init__.py."""
    paths = {file: file.relative_to(package.parent).with_suffix("") for file in sorted(package.rglob("*.py"))}
    return {".".join(path.parts).removesuffix(".__init__"): file for file, path in paths.items()}


def read_graph(package: Path) -> list[Import]:
    """All imports between the modules of a package."""
    modules = find_modules(package)
    return [edge for name, file in modules.items() for edge in _imports_of(name, file, modules)]


def _imports_of(module: str, file: Path, modules: Mapping[str, Path]) -> Iterator[Import]:
    is_package = file.name == "__init__.py"
    found: set[Import] = set()
    text = file.read_text()
    tree = ast.parse(text)
    lazily = _lazily_loaded(tree, module, is_package) if any(word in text for word in DYNAMIC) else []
    for node, typing in _walk(tree):
        for name in lazily if node is tree else _names_at(node, module, is_package):
            target = _nearest_module(name, modules)
            # A module that names itself (its logger, its own address) needs nothing.
            if target and target != module:
                found.add(Import(module, target, getattr(node, "lineno", 0), typing))
    yield from sorted(found, key=lambda edge: (edge.line, edge.target))


def _walk(tree: ast.Module) -> Iterator[tuple[ast.AST, bool]]:
    """Every node, and whether only a type checker reads it; docstrings are left out."""
    waiting: list[tuple[ast.AST, bool]] = [(tree, False)]
    for node, typing in waiting:
        yield node, typing
        guarded = isinstance(node, ast.If) and _last_name(node.test) == "TYPE_CHECKING"
        otherwise = node.orelse if guarded and isinstance(node, ast.If) else []
        for child in ast.iter_child_nodes(node):
            if not _is_docstring(child):
                waiting.append((child, typing or (guarded and child not in otherwise)))


def _last_name(node: ast.AST) -> str:
    """`import_module` of `importlib.import_module` and of `import_module`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _names_at(node: ast.AST, module: str, is_package: bool) -> Iterable[str]:
    """Dotted names that a node may import; the caller keeps those that are modules."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = _base_of(node, module, is_package)
        return [f"{base}.{alias.name}" if base else alias.name for alias in node.names]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        found = DOTTED.fullmatch(node.value)  # also "package.module:name", as entry points are written
        return [found[1]] if found else []
    return []


def _base_of(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """The module after `from`, with leading dots resolved."""
    if not node.level:
        return node.module or ""
    return _resolve("." * node.level + (node.module or ""), module if is_package else module.rpartition(".")[0])


def _lazily_loaded(tree: ast.Module, module: str, is_package: bool) -> list[str]:
    """What `import_module(f"{__name__}.{table[name]}")` can load: strings of the file that complete the prefix.

    With `import_module(name, package)` in the file, strings as "..high.roof" are relative names.
    """
    own_package = module if is_package else module.rpartition(".")[0]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _last_name(node.func) in DYNAMIC]
    texts = [call.args[0] for call in calls if call.args and isinstance(call.args[0], ast.JoinedStr)]
    prefixes = {start for text in texts if (start := _known_start(text, module, own_package)).endswith(".")}
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    found = [prefix + text for prefix in prefixes for text in strings]
    if any(len(call.args) > 1 or any(keyword.arg == "package" for keyword in call.keywords) for call in calls):
        found += [_resolve(text, own_package) for text in strings if RELATIVE.fullmatch(text)]
    return found


def _resolve(name: str, package: str) -> str:
    """A relative name: one dot is `package` itself, each further dot its parent."""
    rest = name.lstrip(".")
    parts = package.split(".")
    parts = parts[: len(parts) - (len(name) - len(rest) - 1)]
    return ".".join([*parts, rest] if rest else parts)


def _known_start(text: ast.JoinedStr, module: str, own_package: str) -> str:
    """The part of an f-string before its first unknown value."""
    start = ""
    for part in text.values:
        if isinstance(part, ast.Constant):
            start += str(part.value)
        elif isinstance(part, ast.FormattedValue) and _last_name(part.value) in ("__name__", "__package__"):
            start += module if _last_name(part.value) == "__name__" else own_package
        else:
            break
    return start


def _nearest_module(name: str, modules: Mapping[str, Path]) -> str | None:
    """`a.b.Name` is in module `a.b`; None if not even `a` is ours."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def cycles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of two or more names that reach each other (strongly connected components), each sorted."""
    reach = {name: reachable(name, graph) for name in graph}
    found = {tuple(sorted(other for other in reach[name] if name in reach.get(other, ()))) for name in graph}
    return [list(group) for group in sorted(found) if len(group) > 1]


def reachable(start: str, graph: Mapping[str, Iterable[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for name in graph.get(waiting.pop(), ()):
            if name not in found:
                found.add(name)
                waiting.append(name)
    return found


def depth(graph: Mapping[str, Iterable[str]]) -> int:
    """Layers of a graph: the number of names on its longest path; names in a cycle share a layer."""
    group_of = {name: name for name in graph}
    for group in cycles(graph):
        group_of.update(dict.fromkeys(group, group[0]))
    below: dict[str, set[str]] = {group: set() for group in group_of.values()}
    for name, needed in graph.items():
        below[group_of[name]] |= {group_of[other] for other in needed if other in group_of} - {group_of[name]}
    known: dict[str, int] = {}

    def layer(name: str) -> int:
        if name not in known:
            known[name] = 1 + max((layer(other) for other in below[name]), default=0)
        return known[name]

    return max((layer(name) for name in below), default=0)


@dataclass(frozen=True)
class Row:
    """A row of the dependency table: a package (or modules that belong together), and what it may import."""

    name: str
    members: tuple[str, ...]
    """Dotted names below the package: `config`, `trainer.main_ppo`; "" for its own __init__.py."""
    allowed: frozenset[str]


FREE = "basics"
"""The row that every other may import."""
_ROW = re.compile(r"^\| (?:([\w ]+): )?(`[\w./]+`(?:, `[\w./]+`)*) \|[^|]*\|([^|]*)\|$", re.M)


def read_table(page: Path) -> list[Row]:
    """The dependency table of docs/architecture.md, in its order: lowest first."""
    rows = []
    for name, members, allowed in _ROW.findall(page.read_text()):
        paths = [path.removesuffix("/").removesuffix(".py") for path in re.findall(r"`([^`]+)`", members)]
        names = tuple("" if path == "__init__" else path.replace("/", ".") for path in paths)
        rows.append(Row(name or names[0], names, frozenset(re.findall(r"`([^`]+)`", allowed))))
    return rows


def row_of(module: str, table: Iterable[Row]) -> str:
    """The row that a module belongs to: that of the longest matching name, or its top-level package's own name."""
    below = module.partition(".")[2]
    found = [(member, row.name) for row in table for member in row.members if _is_within(below, member)]
    return max(found, key=lambda one: len(one[0]))[1] if found else below.partition(".")[0]


def _is_within(module: str, member: str) -> bool:
    return module == member or (member != "" and module.startswith(member + "."))


def between_rows(edges: Iterable[Import], table: Sequence[Row]) -> dict[str, set[str]]:
    """The graph of rows."""
    pairs = [(row_of(edge.source, table), row_of(edge.target, table)) for edge in edges]
    graph: dict[str, set[str]] = {name: set() for pair in pairs for name in pair}
    for source, target in pairs:
        if source != target:
            graph[source].add(target)
    return graph


def forbidden(edges: Iterable[Import], table: Sequence[Row]) -> list[Import]:
    """Imports that the table does not allow, lazy ones and those for type checkers included."""
    allowed = {row.name: row.allowed | {row.name, FREE} for row in table}
    return [edge for edge in edges if row_of(edge.target, table) not in allowed.get(row_of(edge.source, table), ())]


def back_imports(edges: Iterable[Import], table: Sequence[Row]) -> list[Import]:
    """Imports from a row of one above it."""
    order = {row.name: place for place, row in enumerate(table)}
    top = len(order)
    return [e for e in edges if order.get(row_of(e.target, table), -1) > order.get(row_of(e.source, table), top)]


def as_mapping(edges: Iterable[Import], names: Iterable[str] = ()) -> dict[str, set[str]]:
    """source -> targets, with an entry for every name."""
    graph: dict[str, set[str]] = {name: set() for name in names}
    for edge in edges:
        graph.setdefault(edge.source, set()).add(edge.target)
        graph.setdefault(edge.target, set())
    return graph
