"""A system runs the code that the bench says it runs, wherever the bench is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.bench.algorithms import Algorithm, Process, Run
from posttrain.bench.contest import Contest, Entry, apply_options
from posttrain.bench.device import Device
from posttrain.bench.output import StatusLine
from posttrain.bench.systems import HERE, STEP, folder_of
from posttrain.bench.training import step_table

ANSWER = "{'wall': [1.0], 'inside': [1.0], 'lengths': [1.0], 'code': __file__}"
RUNNER = (
    f"import json\nprint(json.dumps({{'ready': {{}}}}), flush=True)\ninput()\nprint(json.dumps({ANSWER}), flush=True)\n"
)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A checkout whose steps take a second."""
    for package in ("posttrain", "posttrain/bench", "posttrain/bench/ours", "posttrain/trainer"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "posttrain/bench/ours/training.py").write_text(RUNNER)
    (tmp_path / "posttrain/trainer/main_ppo.py").write_text("raise SystemExit('the code of another checkout')")
    return tmp_path


def test_a_row_with_a_pythonpath_runs_the_checkout_that_it_names_and_says_so(other: Path, monkeypatch):
    monkeypatch.chdir(HERE.parent)  # where `python -m` would find this checkout first
    *_, before = apply_options(STEP[:1], [f"before:PYTHONPATH={other}"], [], ["before=native"])
    contest = Contest("step", Device("cpu"), 1, repeat=1, warm_ups=0, line=StatusLine())
    (entry,) = contest.measure([before], lambda system: {})
    assert entry.problem is None and entry.answers[0]["code"] == str(other / "posttrain/bench/ours/training.py")
    assert entry.as_json()["code"] == str(other / "posttrain")
    assert f" from {other}/posttrain" in step_table([entry])


def test_without_one_the_code_of_the_bench_runs_whatever_stands_in_the_working_folder(other: Path, monkeypatch):
    monkeypatch.chdir(other)
    native = STEP[0]
    command, variables = native.command(Path("no-job.json"), "step"), native.variables_for(1)
    words = subprocess.run(command, env=variables, capture_output=True, text=True, input="\n", timeout=120).stderr
    assert str(HERE / "bench/ours/training.py") in words and "no-job.json" in words
    entry = Entry(native, {"code": native.code("cpu")})
    assert entry.facts["code"] == str(HERE) and " from " not in entry.version()


def test_runs_of_the_algorithms_are_made_by_the_code_of_the_bench(other: Path, monkeypatch):
    monkeypatch.chdir(other)
    process = Process(Run(Algorithm("x", "preset", ("no.such=1",)), 1, 1), other, other / "log", 1)
    assert process.process.wait(120) == 2
    words = (other / "log").read_text()
    assert "no.such" in words and "the code of another checkout" not in words


def test_a_package_is_found_as_a_script_of_that_environment_finds_it(other: Path, monkeypatch):
    monkeypatch.chdir(other)
    assert folder_of("posttrain", sys.executable, {"PYTHONPATH": str(other)}) == str(other / "posttrain")
    assert folder_of("no_such_package", sys.executable, {}) is None
    (other / "beside").mkdir()
    (other / "beside/__init__.py").touch()
    assert folder_of("beside", sys.executable, {}) is None, "the working folder is not part of an environment"
