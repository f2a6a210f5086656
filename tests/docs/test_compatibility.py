"""docs/compatibility.md is made from docs/compatibility.json, and a cell that is run again replaces the old one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[2] / "scripts" / "compatibility.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("compatibility", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_that_of_its_data():
    script = load()
    assert script.PAGE.read_text() == script.page(), "run python scripts/compatibility.py page"


def test_a_report_fills_a_cell_for_each_engine_and_a_later_one_replaces_it(tmp_path, monkeypatch):
    script = load()
    monkeypatch.setattr(script, "DATA", tmp_path / "cells.json")
    results = [
        {"check": "fsdp2", "status": "passed"},
        {"check": "resume", "status": "failed"},
        {"check": "vllm sync", "status": "passed"},
        {"check": "sglang sync", "status": "skipped"},
    ]
    report = {"layout": "8 GPUs", "date": "2026-11-18 01:00 UTC", "results": results}
    report["environment"] = {"torch": "2.13", "vllm": "0.32", "gpus": "8 x H200"}
    file = tmp_path / "selftest.json"
    file.write_text(json.dumps(report))
    script.keep(script.cells_of_report(file))
    cells = {cell["engine"]: cell for cell in json.loads(script.DATA.read_text())}
    assert cells.keys() == {"fsdp2", "vllm"}
    assert cells["fsdp2"]["passed"] == "1 of 2 (failed: resume)" and cells["vllm"]["version"] == "vllm 0.32"
    results[1]["status"] = "passed"
    file.write_text(json.dumps(report))
    script.keep(script.cells_of_report(file))
    assert [cell["passed"] for cell in json.loads(script.DATA.read_text())] == ["2 of 2", "1 of 1"]
    assert "| selftest | fsdp2 | torch 2.13 | 8 x H200 | 8 GPUs | 2 of 2 | 2026-11-18 |" in script.page()


def test_every_engine_of_the_conformance_suite_has_a_cell_of_its_own():
    from tests.rollout import test_conformance as suite

    script = load()
    real = {name for name in (*suite.ENGINES, *suite.SERVED) if "fake" not in name and "wrapped" not in name}
    assert set(script.ROLLOUT) == real
    cells = [(engine, layout) for engine, _, layout in [*script.ROLLOUT.values(), *script.TRAIN.values()]]
    assert len(set(cells)) == len(cells)
    assert all((script.ROOT / file).exists() for _, file, _ in [*script.ROLLOUT.values(), *script.TRAIN.values()])


def test_a_suite_is_run_for_one_engine_and_what_failed_or_was_skipped_did_not_pass(monkeypatch):
    script, ran = load(), []

    def run(words, *, cwd, env, check):
        (found,) = (word.partition("=")[2] for word in words if word.startswith("--junitxml="))
        counts = 'tests="9" failures="2" errors="1" skipped="3"'
        Path(found).write_text(f'<testsuites><testsuite name="pytest" {counts}></testsuite></testsuites>')
        Path(env["CONFORMANCE_LOGS"], "rank_0.log").write_text("==== 2 failed, 13 passed, 4 deselected in 9 s ====")
        ran.append((words[3], env.get("CONFORMANCE_ENGINE"), words[-1]))
        return subprocess.CompletedProcess(words, 1)

    monkeypatch.setattr(script.subprocess, "run", run)
    monkeypatch.setattr(script, "version_of", lambda engine: f"{engine} 1.0")
    cell = script.run_suite("rollout", "server over vllm")
    assert (cell["engine"], cell["layout"], cell["passed"]) == ("vllm", "behind a server", "3 of 6")
    assert ran[-1][:2] == ("tests/rollout/test_conformance.py", "server over vllm")
    cell = script.run_suite("rollout", "vllm-by-two")  # the counts of the ranks: the test around them is one
    assert (cell["layout"], cell["passed"], ran[-1][2]) == ("two ranks hold one engine", "13 of 15", "vllm-by-two")
    cell = script.run_suite("rollout", "vllm-two-stages")
    assert (cell["engine"], cell["layout"]) == ("vllm", "two ranks hold one engine in two stages")
    assert ran[-1][::2] == ("tests/rollout/test_conformance_teams.py", "vllm-two-stages")
    cell = script.run_suite("train", "fsdp2")
    assert (cell["suite"], cell["passed"], ran[-1][0]) == ("train conformance", "3 of 6", "tests/engine/test_ranks.py")
