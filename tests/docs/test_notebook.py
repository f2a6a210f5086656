"""examples/quickstart.ipynb runs from its first cell to its last, with fewer steps."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def cells(kind: str) -> list[str]:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_the_notebook_holds_no_outputs_and_its_links_lead_to_pages():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert all(not cell.get("outputs") for cell in notebook["cells"])
    links = re.findall(r"\]\((\.\./[^)#]+)", "\n".join(cells("markdown")))
    assert len(links) >= 3 and all((NOTEBOOK.parent / link).exists() for link in links)


@pytest.mark.slow
def test_the_notebook_runs_and_its_three_runs_finish(tmp_path, forked):
    script = tmp_path / "notebook.py"
    text = "\n".join(cells("code"))
    assert "STEPS = 40" in text
    script.write_text(text.replace("STEPS = 40", "STEPS = 1"), encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [forked.python, str(script)]
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.count("finished at step 1") == 3
    assert re.search(r"expected \d+  answered '", ran.stdout) and "mean reward" in ran.stdout
