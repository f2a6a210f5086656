"""docs/compatibility.md is made from docs/compatibility.json, and a cell that is run again replaces the old one."""

from __future__ import annotations

import importlib.util
import json
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
