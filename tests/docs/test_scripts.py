"""What scripts/ needs beside posttrain is asked for at once, and what fails inside of a script is told."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))
from needs import need  # noqa: E402


def test_a_missing_package_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/compare.py"])
    need("json", "ast", get="nothing")
    with pytest.raises(
        SystemExit, match=r"^compare\.py needs no_such_one and nor_this, not installed in .*\n  to do:  get"
    ):
        need("no_such_one", "json", "nor_this", get="get them")


def test_scripts_ask_for_every_package_that_comes_from_elsewhere():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    own = {re.split(r"[<>=]", line)[0].replace("-", "_") for line in listed} | {"posttrain", "pytest"}
    own |= {path.stem for folder in (SCRIPTS, *ROOT.glob("tests/*/")) for path in folder.glob("*.py")}
    own |= {path.stem for path in (ROOT / "tests").glob("*.py")}
    asking = 0
    for script in SCRIPTS.glob("*.py"):
        tree = [*ast.walk(ast.parse(script.read_text()))]
        calls = [node for node in tree if isinstance(node, ast.Call) and ast.unparse(node.func) == "need"]
        asked = {str(ast.literal_eval(word)) for call in calls for word in call.args}
        names = [alias.name for node in tree if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in tree if isinstance(node, ast.ImportFrom)]
        unasked = {name.partition(".")[0] for name in names} - own - sys.stdlib_module_names - asked
        assert not unasked, f"{script.name}: need({unasked}) first"
        asking += bool(asked)
    assert asking >= 2


@pytest.mark.parametrize("failing, told", [("seed=2", "grpo-2 failed: see {}/grpo-2.log"), ("--check", "no TRL")])
def test_the_comparison_with_trl_ends_when_a_part_of_it_cannot_be_had(failing: str, told: str, tmp_path: Path):
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\necho "$*" >>{tmp_path}/calls\n[[ "$*" != *{failing}* ]] || {{ echo no TRL; exit 1; }}\n'
    )
    python.chmod(0o755)
    given = {**os.environ, "PYTHON": str(python), "TRL": "1", "SFT": "sft", "SEEDS": "1 2 3"}
    command = ["bash", str(SCRIPTS / "smollm_gsm8k.sh"), "model", "data", str(tmp_path / "out")]
    done = subprocess.run(command, env=given, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and told.format(tmp_path / "out") in done.stdout + done.stderr
    calls = (tmp_path / "calls").read_text()
    assert "smollm_trl.py --check" in calls and "--seconds" not in calls
    assert ("main_ppo" in calls) == (failing != "--check")


def test_a_mistyped_key_ends_the_run_on_gsm8k_before_anything_is_trained(tmp_path: Path):
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\n[[ "$*" == *"--cfg job"* ]] && exec {sys.executable} "$@"\necho "$*" >>{tmp_path}/calls\n'
    )
    python.chmod(0o755)
    given = {**os.environ, "PYTHON": str(python), "PYTHONPATH": str(ROOT)}
    command = ["bash", str(SCRIPTS / "smollm_gsm8k.sh"), "model", "data", str(tmp_path / "out"), "trainer.tset_freq=2"]
    done = subprocess.run(command, env=given, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "did you mean `trainer.test_freq`?" in done.stderr
    assert not (tmp_path / "calls").exists() and not (tmp_path / "out").exists()
