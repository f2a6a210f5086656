"""train.sh and its preparation of Python: when it installs, when it does not, and what a user sees if it fails.

A small checkout is made, with a posttrain that prints its arguments and a Python that records what it should install.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKE_CLI = """
import os, sys
print("RAN", sys.argv[1:])
print("ENV", os.environ["GOMP_SPINCOUNT"], os.environ["PYTHONUNBUFFERED"])
print("CWD", os.getcwd())
"""
# Forwards to the real Python, except for making environments and installing, which it only records.
FAKE_PYTHON = """#!/usr/bin/env bash
case "$1 $2" in
  "-m venv")
    echo "venv" >>"$RECORD"; for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python" ;;
  "-m pip")
    if [[ "$3" == --version ]]; then exit 0; fi
    echo "pip ${*:3}" >>"$RECORD"
    if [[ -n "${PIP_FAILS:-}" ]]; then echo "ERROR: no matching distribution" >&2; exit 1; fi ;;
  *) exec "$REAL_PYTHON" "$@" ;;
esac
"""


class Checkout:
    """A copy of the scripts, with the requirements that a test wants."""

    def __init__(self, folder: Path, dependencies: list[str]):
        self.root, self.record = folder / "check out", folder / "record"
        (self.root / "scripts").mkdir(parents=True)
        (self.root / "posttrain").mkdir()
        for name in ("train.sh", "constraints.txt", "scripts/env.sh", "scripts/requirements.py"):
            shutil.copy(ROOT / name, self.root / name)
        (self.root / "posttrain/__init__.py").touch()
        (self.root / "posttrain/cli.py").write_text(FAKE_CLI)
        self.require(dependencies)
        self.python = folder / "python"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)
        self.elsewhere = folder / "elsewhere"
        self.elsewhere.mkdir()

    def require(self, dependencies: list[str]) -> None:
        (self.root / "pyproject.toml").write_text(f"[project]\nname = 'x'\ndependencies = {dependencies}\n")

    def train(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        env = {"REAL_PYTHON": sys.executable, "RECORD": str(self.record), "PYTHON": str(self.python), **env}
        variables = {"PATH": os.environ["PATH"], "HOME": str(self.elsewhere), **env}
        command = [str(self.root / "train.sh"), *args]
        return subprocess.run(command, cwd=self.elsewhere, env=variables, capture_output=True, text=True, timeout=60)

    def calls(self) -> list[str]:
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        self.record.unlink(missing_ok=True)
        return lines


@pytest.fixture
def unmet(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path, ["torch>=2.11,<2.14", "surely-not-installed>=1.0"])


def test_nothing_is_installed_where_every_requirement_is_met(tmp_path: Path):
    checkout = Checkout(tmp_path, ["hydra-core>=1.3", "pytest>=8"])
    ran = checkout.train("--lr", "5e-7", "a.b=c d")
    assert ran.returncode == 0, ran.stderr
    assert f"RAN ['train', '--train-sh={checkout.root}', '--lr', '5e-7', 'a.b=c d']" in ran.stdout
    assert "ENV 20000 1" in ran.stdout
    assert f"CWD {checkout.elsewhere}" in ran.stdout  # the user's paths stay relative to where the user is
    assert checkout.calls() == []
    assert not (checkout.root / ".venv").exists()


def test_what_is_lacking_is_named_and_installed_once(unmet: Checkout):
    first = unmet.train()
    assert "surely-not-installed>=1.0 is not installed" in first.stdout
    constraints = f"-c {unmet.root}/constraints.txt"
    assert unmet.calls() == [
        "venv",
        f"pip install {constraints} torch>=2.11,<2.14",
        f"pip install {constraints} --config-settings editable_mode=compat -e {unmet.root}",
    ]
    assert first.returncode == 0 and "RAN ['train'" in first.stdout
    again = unmet.train()
    assert again.returncode == 0 and "RAN" in again.stdout
    assert unmet.calls() == []
    unmet.require(["surely-not-installed>=2.0", "torch>=2.11,<2.14"])
    assert unmet.train().returncode == 0
    assert len(unmet.calls()) == 2  # into the same environment: no second venv


def test_a_machine_with_nvidia_takes_torch_by_range_and_not_the_cpu_pin(unmet: Checkout, tmp_path: Path):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\n")
    (tools / "nvidia-smi").chmod(0o755)
    unmet.train(PATH=f"{tools}:{os.environ['PATH']}")
    assert unmet.calls() == [
        "venv",
        "pip install torch>=2.11,<2.14",
        f"pip install --config-settings editable_mode=compat -e {unmet.root}",
    ]


def test_the_index_of_torch_builds_can_be_named(unmet: Checkout):
    unmet.train(TORCH_INDEX_URL="file:///builds")
    torch, rest = unmet.calls()[1:]
    assert "--index-url file:///builds torch" in torch
    assert "--index-url" not in rest


def test_a_failing_installation_shows_pips_message_and_is_tried_again(unmet: Checkout):
    failed = unmet.train(PIP_FAILS="1")
    assert failed.returncode != 0
    assert "ERROR: no matching distribution" in failed.stderr
    assert "pip could not install torch" in failed.stderr
    assert "RAN" not in failed.stdout
    unmet.calls()
    assert "RAN" in unmet.train().stdout
    assert len(unmet.calls()) == 2


def test_help_needs_nothing_installed(unmet: Checkout):
    shown = unmet.train("--model", "x", "--help")
    assert shown.returncode == 0 and "'--help'" in shown.stdout
    assert unmet.calls() == []


def test_an_interpreter_that_is_too_old_or_absent_is_named(unmet: Checkout):
    ran = unmet.train(PYTHON="/nowhere/python3")
    assert ran.returncode == 1
    assert "needs Python 3.11" in ran.stderr and "/nowhere/python3" in ran.stderr
