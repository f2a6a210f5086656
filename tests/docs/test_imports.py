"""Dependencies between packages are those of the table in docs/architecture.md, whatever form an import has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from import_graph import (  # noqa: E402
    FREE,
    Import,
    Row,
    as_mapping,
    back_imports,
    between_rows,
    cycles,
    depth,
    find_modules,
    forbidden,
    read_graph,
    read_table,
    row_of,
)

TABLE = read_table(ROOT / "docs" / "architecture.md")

FORMS = {
    "import": "import app.high.roof",
    "import as": "import app.high.roof as roof",
    "from the package's parent": "from app import high",
    "from the package": "from app.high import roof",
    "from the module": "from app.high.roof import tile",
    "relative, one dot": "from .sub import x\nfrom ..high import roof",
    "relative, a package": "from .. import high",
    "inside a function": "def f():\n    from app.high import roof",
    "inside a method, under try": "class A:\n    def f(self):\n        try:\n            import app.high.roof\n"
    "        except ImportError:\n            pass",
    "for type checkers": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from app.high.roof import tile",
    "for type checkers, qualified": "import typing\nif typing.TYPE_CHECKING:\n    import app.high",
    "import_module": "import importlib\nimportlib.import_module('app.high.roof')",
    "import_module, imported by name": "from importlib import import_module as load\nload('app.high')",
    "import_module, relative": "import importlib\nimportlib.import_module('..high.roof', __package__)",
    "__import__": "__import__('app.high.roof')",
    "f-string": "import importlib\nfor name in ['roof']:\n    importlib.import_module(f'app.high.{name}')",
    "table of a lazy loader": "HOMES = {'tile': 'app.high.roof'}",
    "an entry point's string": "run('app.high.roof:main')",
    "python -m": "import sys\ncommand = [sys.executable, '-m', 'app.high.roof']",
}


def make_package(folder: Path, low: str, low_init: str = "") -> Path:
    """`app` with the packages `low` (module `floor`) and `high` (module `roof`)."""
    texts = {
        "__init__.py": "",
        "low/__init__.py": low_init,
        "low/sub.py": "x = 1",
        "low/floor.py": low,
        "high/__init__.py": "",
        "high/roof.py": "tile = 1",
    }
    for name, text in texts.items():
        (folder / "app" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "app" / name).write_text(text)
    return folder / "app"


LOW, HIGH = Row("low", ("low",), frozenset()), Row("high", ("high",), frozenset({"low"}))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_import_is_seen_and_refused_where_the_table_does_not_allow_it(form: str, tmp_path: Path):
    edges = read_graph(make_package(tmp_path, FORMS[form]))
    found = forbidden(edges, [LOW, HIGH])
    assert {(edge.source, row_of(edge.target, [LOW, HIGH])) for edge in found} == {("app.low.floor", "high")}
    assert forbidden(edges, [HIGH, Row("low", ("low",), frozenset({"high"}))]) == []
    assert back_imports(edges, [LOW, HIGH]) == found and back_imports(edges, [HIGH, LOW]) == []


def test_the_table_of_a_lazy_package_is_its_dependency_on_its_own_modules(tmp_path: Path):
    lazy = "import importlib\n_HOMES = {'x': 'sub'}\ndef __getattr__(name):\n"
    lazy += "    return getattr(importlib.import_module(f'{__name__}.{_HOMES[name]}'), name)"
    edges = read_graph(make_package(tmp_path, "from app.low import x", lazy))
    assert {(edge.source, edge.target) for edge in edges} == {("app.low", "app.low.sub"), ("app.low.floor", "app.low")}


def test_words_that_name_no_module_and_docstrings_are_no_imports(tmp_path: Path):
    text = (
        '"""app.high.roof"""\nimport os.path\nfrom json import loads\nhelp_ = "app.high.roof: does much"\nname = "high"'
    )
    assert read_graph(make_package(tmp_path, text)) == []


def test_a_line_of_an_import_and_whether_it_is_for_type_checkers_are_told(tmp_path: Path):
    text = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import app.high.roof\nelse:\n    import app.low.sub"
    )
    assert read_graph(make_package(tmp_path, text)) == [
        Import("app.low.floor", "app.high.roof", 3, typing=True),
        Import("app.low.floor", "app.low.sub", 5),
    ]


def test_cycles_and_layers_of_a_graph():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e", "a"}}
    assert cycles(graph) == [["b", "c"]] and depth(graph) == 4
    assert cycles({"a": {"b"}, "b": set()}) == [] and depth({}) == 0


def test_a_module_belongs_to_the_row_with_the_longest_name():
    rows = [Row("t", ("trainer",), frozenset()), Row("entry", ("trainer.main", ""), frozenset())]
    assert [row_of(f"p.{name}", rows) for name in ("trainer.ppo.x", "trainer.main", "trainer.main_ppo", "other.x")] == [
        "t",
        "entry",
        "t",
        "other",
    ]
    assert row_of("p", rows) == "entry"


@pytest.fixture(scope="module")
def edges() -> list[Import]:
    """The imports of posttrain; reading them takes seconds, which collecting the tests must not."""
    return read_graph(ROOT / "posttrain")


def test_packages_import_what_the_architecture_page_allows_and_nothing_else(edges: list[Import]):
    found = [f"{edge.source}:{edge.line} imports {edge.target}" for edge in forbidden(edges, TABLE)]
    assert not found, "not allowed by the table in docs/architecture.md:\n" + "\n".join(found)


def test_the_table_has_every_package_once_and_allows_only_rows_above():
    members = [member for row in TABLE for member in row.members]
    assert len(set(members)) == len(members) and TABLE[0].name == FREE
    modules = find_modules(ROOT / "posttrain")
    tops = {name.partition(".")[2].partition(".")[0] for name in modules}
    assert tops - set(members) == set(), "without a row in docs/architecture.md"
    assert [name for name in members if f"posttrain.{name}".rstrip(".") not in modules] == []
    for place, row in enumerate(TABLE):
        assert row.allowed <= {above.name for above in TABLE[:place]}, f"{row.name} may import what is not above it"


def test_no_packages_and_no_modules_import_each_other(edges: list[Import]):
    assert cycles(between_rows(edges, TABLE)) == []
    assert cycles(as_mapping(edges)) == []
