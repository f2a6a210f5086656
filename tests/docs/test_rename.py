"""`scripts/rename.py` on a small repository: names by tokens, modules and files with all that mentions them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

TREE = {
    "posttrain/__init__.py": "",
    "posttrain/rollout/__init__.py": '__all__ = ["took"]\n\nfrom posttrain.rollout.loop import took\n',
    "posttrain/rollout/loop.py": '''"""The loop. `took` is not "took"."""


class Ledger:
    def took(self, row, *, took=1):
        # What it took: see `took`.
        again = self.took(took=took)
        return f"took {again.took(took)!r:>{took}} {{took}}"


def took(row):
    return Ledger().took(row), f"{row.strip(')')}, took {took}"
''',
    "posttrain/trainer.py": """import importlib

import posttrain.rollout.loop
from posttrain.rollout import loop, settings


def run():
    from posttrain.rollout.loop import took

    ledger = getattr(loop, "took")(1)
    importlib.import_module("posttrain.rollout.loop")
    took_other = {"took": 1}
    return posttrain.rollout.loop.took(ledger), loop.took, "posttrain.rollout.loop:took", took_other
""",
    "posttrain/rollout/settings.py": "loops = 1\n",
    "tests/test_loop.py": '''"""Of posttrain/rollout/loop.py."""

from posttrain.rollout.loop import took


def test_S0_1_it_took():
    assert took
''',
    "tests/seeds/manifest.tsv": "S0-1\ttests/test_loop.py::test_S0_1_it_took\n",
    "docs/page.md": "It took `took`, in `posttrain/rollout/loop.py` or `rollout/loop.py`.\n\n```python\ntook(1)\n```\n",
    "scripts/mutants/rollout.toml": """[[mutant]]
breaks = "what it took"
inside = "Ledger.took"
code = "self.took(took=took)"
becomes = "self.took()"
test = "tests/test_loop.py::test_S0_1_it_took"
""",
}


@pytest.fixture
def rename(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import rename

    return rename


@pytest.fixture
def renamed(rename, tmp_path):
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run("git init -q . && git add .", shell=True, cwd=tmp_path, check=True)

    def run(*lines, **files):
        for name, text in files.items():
            (tmp_path / f"posttrain/{name}.py").write_text(text)
        (tmp_path / "table.tsv").write_text("# a table\n" + "".join("\t".join(line) + "\n" for line in lines))
        report = rename.Renamer(tmp_path, rename.read_table(tmp_path / "table.tsv")).apply()
        return (lambda name: (tmp_path / name).read_text()), report

    return run


def test_a_name_changes_where_it_is_a_token_and_in_backticks(renamed):
    read, report = renamed(("took", "receive"))
    loop = read("posttrain/rollout/loop.py")
    assert '"""The loop. `receive` is not "took"."""' in loop
    assert "def receive(self, row, *, receive=1):\n        # What it took: see `receive`." in loop
    assert 'f"took {again.receive(receive)!r:>{receive}} {{took}}"' in loop
    assert """f"{row.strip(')')}, took {receive}\"""" in loop  # brackets in quotes close nothing
    assert '__all__ = ["receive"]' in read("posttrain/rollout/__init__.py")
    trainer = read("posttrain/trainer.py")
    assert 'getattr(loop, "receive")(1)' in trainer and '"posttrain.rollout.loop:receive"' in trainer
    assert '{"took": 1}' in trainer, "a string that is no name for certain stays"
    assert any('the string "took"' in line for line in report.left)
    assert read("docs/page.md").startswith("It took `receive`, in") and "\nreceive(1)\n" in read("docs/page.md")
    assert 'inside = "Ledger.receive"\ncode = "self.receive(receive=receive)"' in read("scripts/mutants/rollout.toml")
    assert report.changed[Path("posttrain/rollout/loop.py")]["took"] == 13
    assert "posttrain/rollout/loop.py: took (13)" in report.text()


def test_a_name_can_be_limited_to_places(renamed):
    read, _ = renamed(("row", "sample", "posttrain/rollout"), other="row = 1\n")
    assert "def took(sample):" in read("posttrain/rollout/loop.py") and read("posttrain/other.py") == "row = 1\n"


def test_a_module_moves_with_all_that_names_it(renamed):
    read, report = renamed(("posttrain.rollout.loop", "posttrain.conversations.loop"))
    trainer = read("posttrain/trainer.py")
    assert "import posttrain.conversations.loop\n" in trainer
    assert "from posttrain.conversations import loop\nfrom posttrain.rollout import settings\n" in trainer
    assert "    from posttrain.conversations.loop import took" in trainer
    assert 'import_module("posttrain.conversations.loop")' in trainer
    assert "posttrain.conversations.loop.took(ledger),\n        loop.took," in trainer
    assert '"""Of posttrain/conversations/loop.py."""' in read("tests/test_loop.py")
    assert "`posttrain/conversations/loop.py` or `conversations/loop.py`" in read("docs/page.md")
    assert "class Ledger" in read("posttrain/conversations/loop.py")
    assert report.moved == [(Path("posttrain/rollout/loop.py"), Path("posttrain/conversations/loop.py"))]


def test_uses_of_an_imported_module_follow_its_last_name_unless_that_is_taken(renamed):
    read, _ = renamed(
        ("posttrain.rollout.loop", "posttrain.rollout.runner"),
        taken="from posttrain.rollout import loop\n\nrunner = loop.took\n",
    )
    assert "from posttrain.rollout import runner, settings" in read("posttrain/trainer.py")
    assert 'getattr(runner, "took")' in read("posttrain/trainer.py") and " runner.took," in read("posttrain/trainer.py")
    assert "from posttrain.rollout import runner as loop\n\nrunner = loop.took" in read("posttrain/taken.py")


def test_a_package_moves_as_a_whole(renamed):
    read, _ = renamed(("posttrain.rollout", "posttrain.conversations"))
    assert "from posttrain.conversations import loop, settings" in read("posttrain/trainer.py")
    assert "from posttrain.conversations.loop import took" in read("posttrain/conversations/__init__.py")
    assert "`posttrain/conversations/loop.py`" in read("docs/page.md")


def test_tests_and_their_files_are_renamed_in_tables(renamed):
    read, _ = renamed(("test_S0_1_it_took", "test_it_took"), ("tests/test_loop.py", "tests/rollout/test_loops.py"))
    assert read("tests/seeds/manifest.tsv") == "S0-1\ttests/rollout/test_loops.py::test_it_took\n"
    assert 'test = "tests/rollout/test_loops.py::test_it_took"' in read("scripts/mutants/rollout.toml")
    assert "def test_it_took():" in read("tests/rollout/test_loops.py")


@pytest.mark.parametrize(
    ("line", "files", "said"),
    [
        (("took", "row"), {}, "posttrain/rollout/loop.py:5: `row` is used beside `took` in took"),
        (
            ("took", "kept"),
            {"other": "class A:\n    kept = 1\n\n    def took(self): ...\n"},
            "class A has `kept` and `took`",
        ),
        (
            ("took", "kept"),
            {"other": "class A:\n    kept = 1\n\n\nclass B(A):\n    def took(self): ...\n"},
            "class B has `kept` and `took`",
        ),
        (
            ("posttrain.rollout.loop", "posttrain.rollout.settings"),
            {},
            "posttrain/rollout/settings.py is there already",
        ),
        (("posttrain.gone", "posttrain.here"), {}, "there is no posttrain/gone.py"),
        (("loops", "took"), {"a": "loops = took = 1\n"}, "posttrain/a.py:0: `took` is used beside `loops` in top"),
        (("absent", "present"), {}, "there is no `absent`"),
        (("took", "not a name"), {}, "`not a name` is no name"),
    ],
)
def test_what_is_taken_or_missing_is_refused_and_nothing_changes(rename, renamed, tmp_path, line, files, said):
    with pytest.raises(rename.RefusedError) as refused:
        renamed(line, **files)
    assert said in str(refused.value)
    assert (tmp_path / "posttrain/rollout/loop.py").read_text() == TREE["posttrain/rollout/loop.py"]


def test_nothing_changes_in_a_dry_run(renamed, rename, tmp_path, monkeypatch, capsys):
    renamed(("loops", "rounds"))
    (tmp_path / "table.tsv").write_text("rounds\tturns\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rename.py", "table.tsv", "--dry-run"])
    assert rename.main() == 0 and "posttrain/rollout/settings.py: rounds (1)" in capsys.readouterr().out
    assert (tmp_path / "posttrain/rollout/settings.py").read_text() == "rounds = 1\n"
