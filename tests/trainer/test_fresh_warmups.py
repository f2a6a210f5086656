"""scripts/check_fresh_warmups.py: runs side by side, a row for each as it ends, failures among them, a summary."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

CHILD = """
import json, os, sys
out, given = sys.argv[1], dict(word.split("=") for word in sys.argv[3:])
warmup, seed, names = given["--warmups"], given.get("--seeds"), sorted(given)
assert os.environ["POSTTRAIN_CACHE"].endswith("cache-" + warmup) and os.environ["OMP_NUM_THREADS"] == "1"
if warmup == "2" or seed == "13":
    sys.exit("no luck")
found = {"seconds": 10.0}
if seed:
    found |= {"curve": [[0, 0.5], [50, 0.7], [200, 0.9 + int(seed) / 100]], "cut_off": 0.25, "settings": sys.argv[6:]}
name = "warmup-" + warmup + ("-seed-" + seed if seed else "") + ".json"
open(os.path.join(out, name), "w").write(json.dumps(found))
"""


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """`fresh(*arguments)`: the script's exit status, its trainings replaced by the child above."""
    path = Path(__file__).parents[2] / "scripts" / "check_fresh_warmups.py"
    spec = importlib.util.spec_from_file_location("check_fresh_warmups", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(module, "CHILD", [sys.executable, "-S", str(tmp_path / "child.py")])

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["check", str(tmp_path / "out"), "--jobs=3", "--threads=1", *arguments])
        with pytest.raises(SystemExit) as ended:
            module.main()
        return ended.value.code

    return run


def test_every_warm_up_meets_every_seed_and_what_failed_is_a_row(fresh, capsys):
    assert fresh("--warmups=0,1,2", "--seeds=3,7,13") == 1
    shown = capsys.readouterr().out.splitlines()
    rows = {tuple(line.split(" | ")[:2]): line for line in shown[2:11]}
    assert len(rows) == 9
    assert rows["| 1", "7"] == "| 1 | 7 | 0.500 | 0.700 |  |  | 0.970 | 25.0% | 10 + 10 |"
    assert all("failed: status 1: no luck" in rows[f"| {w}", s] for w, s in [("0", "13"), ("2", "3"), ("2", "13")])
    assert shown[-1] == "| 4 | 5 | 0.930 | 0.950 | 22% | 25.0% | 20 |"


def test_pairs_are_as_many_as_warm_ups_and_what_is_there_is_not_made_again(fresh, capsys, tmp_path):
    assert fresh("--warmups=0,1", "--seeds=7,9", "--paired") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "| 2 | 0 | 0.970 | 0.980 | 100% | 25.0% | 20 |"
    (tmp_path / "child.py").write_text("raise SystemExit('started again')")
    assert fresh("--warmups=0,1", "--seeds=7,9", "--paired") == 0
    assert fresh("--warmups=0,1", "--seeds=7,9", "--paired", "trainer.total_training_steps=3") == 1
    assert "was made with other settings" in capsys.readouterr().out
    assert fresh("--warmups=0,1", "--seeds=7", "--paired") == 2
