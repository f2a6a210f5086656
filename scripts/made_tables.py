"""The tables of algorithms.md, rewards.md and api.md, made from the code; `scripts/generate.py` writes them."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from posttrain.config.choices import ESTIMATORS, POLICY_LOSSES, PRESETS
from posttrain.explain import explain, first_sentence, loss_page
from posttrain.rewards.scorers import ALIASES, SCORERS

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = ("algorithms.md", "rewards.md", "api.md")
_TABLE = re.compile(r"(<!-- made: (\w+) -->\n).*?(?=<!-- end -->)", re.S)


def presets() -> list[str]:
    chosen = [(name.split("/")[1], text) for name, (text, _) in PRESETS.items() if name.startswith("algorithm/")]
    return ["| preset | |", "|---|---|", *(f"| `algorithm={name}` | {text} |" for name, text in chosen)]


def estimators() -> list[str]:
    return _papers({name: name for name in ESTIMATORS})


def losses() -> list[str]:
    return _papers({name: loss_page(name) for name in POLICY_LOSSES})


def _papers(pages: dict[str, str]) -> list[str]:
    lines = ["| name | | paper |", "|---|---|---|"]
    for name, page in pages.items():
        paper = re.search(r"arXiv (\d{4}\.\d{5})", explain(page))
        assert paper is not None, f"the page of {name} names no paper"
        link = f"[arXiv {paper[1]}](https://arxiv.org/abs/{paper[1]})"
        lines.append(f"| `{name}` | {first_sentence(page)} | {link} |")
    return lines


def sources() -> list[str]:
    """A row per scorer: its data sources, its file, its first sentence on scores, and other names of data sets."""
    lines = ["| data_source | scorer | a response scores | also for |", "|---|---|---|---|"]
    for module in dict.fromkeys(scorer.__module__ for scorer in SCORERS.values()):
        names = [name for name, scorer in SCORERS.items() if scorer.__module__ == module]
        paragraphs = (sys.modules[module].__doc__ or "").split("\n\n")
        if len(paragraphs) < 2:
            raise SystemExit(f"the docstring of {module} needs a second paragraph: which response scores what")
        paragraph = " ".join(paragraphs[1].split())
        score = re.split(r"(?<=\.) (?=[A-Z])", paragraph)[0]
        others = ", ".join(alias for alias, name in ALIASES.items() if name in names)
        file = f"`{module.rpartition('.')[2]}.py`"
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {file} | {score} | {others} |")
    return lines


# -- api.md ------------------------------------------------------------------------------------------------------------
PACKAGE = DOCS.parent / "posttrain"
# Modules whose `__all__` is the API -> what they are for.
MODULES = {
    "posttrain": "train from Python, and the batch that flows between the stages",
    "posttrain.algorithms": "estimators, losses, KL and aggregation, as functions on tensors",
    "posttrain.rewards": "scorers, and reading answers",
    "posttrain.data": "rows, data sets, samplers",
    "posttrain.checkpoint": "saving and verifying",
    "posttrain.engine": "the train engine's contract",
}


def api() -> list[str]:
    """Lines of the page: a table of names per module."""
    lines: list[str] = []
    for module, what in MODULES.items():
        lines += [f"## {module}", "", f"{what[0].upper()}{what[1:]}.", "", "| name | |", "|---|---|"]
        lines += [f"| `{signature}` | {sentence} |" for signature, sentence in public_names(module)]
        lines.append("")
    return lines[:-1]


def public_names(module: str) -> Iterator[tuple[str, str]]:
    """(signature, first sentence) of each function and class in a module's `__all__`; other names are values."""
    tree = _tree(module)
    for name in sorted(_all(tree), key=str.lower):
        node = find(module, name)
        if node is not None:
            yield _signature(name, node), _sentence(node)


def find(module: str, name: str) -> ast.FunctionDef | ast.ClassDef | None:
    """Where a name is defined, followed through imports; None for a plain value."""
    tree = _tree(module)
    for node, behind in pairwise(tree.body):  # `Name = StrEnum(...)` is a class too; its docstring follows
        if not isinstance(node, ast.Assign) or getattr(node.targets[0], "id", "") != name:
            continue
        if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "StrEnum":
            return ast.ClassDef(name, bases=[], keywords=[], body=[behind], decorator_list=[])
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("posttrain"):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return find(node.module, alias.name)
    return None


def _tree(module: str) -> ast.Module:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _all(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    return []


def _signature(name: str, node: ast.FunctionDef | ast.ClassDef) -> str:
    # Without types and defaults, which would not fit into a table.
    if isinstance(node, ast.ClassDef):
        return name
    taken = node.args
    words = [one.arg for one in (*taken.posonlyargs, *taken.args)]
    words += [f"*{taken.vararg.arg}"] if taken.vararg else ["*"] if taken.kwonlyargs else []
    words += [one.arg for one in taken.kwonlyargs]
    words += [f"**{taken.kwarg.arg}"] if taken.kwarg else []
    return f"{name}({', '.join(words)})"


def _sentence(node: ast.FunctionDef | ast.ClassDef) -> str:
    text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    return text.replace("|", "\\|")


TABLES: dict[str, Callable[[], list[str]]] = {
    "presets": presets,
    "estimators": estimators,
    "losses": losses,
    "sources": sources,
    "api": api,
}


def text(page: str) -> str:
    """The page with its tables generated."""
    stored = (DOCS / page).read_text(encoding="utf-8")
    return _TABLE.sub(lambda found: "\n".join([found[1].rstrip(), *TABLES[found[2]](), ""]), stored)


def files() -> dict[Path, str]:
    """Every page with such tables and its text."""
    return {DOCS / page: text(page) for page in PAGES}
