"""docs/coming_with_an_agent.md: its files and commands train as printed."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
sys.path.append(str(ROOT / "compat"))

import check_docs  # noqa: E402

import posttrain  # noqa: E402
from posttrain.conversations.agents import AGENTS  # noqa: E402

PAGE = (ROOT / "docs" / "coming_with_an_agent.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(bash|python|yaml)\n(.*?)^```$", PAGE, re.M | re.S)
COMMANDS = [command for kind, block in BLOCKS if kind == "bash" for command in check_docs.commands_of(block)]
NAMES = ("careful_agent", "interactions", "treasure", "multiply", "ask_twice")
SAYS = {
    "careful_agent": "Agent: careful_agent; it leads each conversation.",
    "interactions": "Interactions: again; they answer the model's turns.",
    "treasure": "Tools: look; a response has any number of turns.",
    "multiply": "Tools: multiply; a response has any number of turns.",
    "ask_twice": "Agent: ask_twice.py:ask_twice; it leads each conversation.",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "compat"), str(tmp_path)]))
    made = []
    for kind, block in BLOCKS:
        if kind in ("python", "yaml"):
            made.append(block.splitlines()[0].removeprefix("# "))
            (tmp_path / made[-1]).write_text(block)
    answer = {"interaction_kwargs": {"name": "again", "answer": "7"}}
    rows = [{"prompt": f"{n} + 1 = ?", "ground_truth": str(n + 1), "extra_info": answer} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    yield tmp_path
    AGENTS.clear()
    for name in [Path(name).stem for name in made]:
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_command_of_the_page_trains_two_steps(name, folder, tiny_model, capsys):
    assert len(COMMANDS) == len(NAMES)
    [command] = [one for one in COMMANDS if name in one]
    arguments = shlex.split(command.replace("\\\n", " "))
    assert arguments[:2] == ["posttrain", "train"] and "actor_rollout_ref.model.path=embedded" in arguments
    small = [f"actor_rollout_ref.model.path={tiny_model}", "data.train_batch_size=4", "trainer.device=cpu"]
    small += [
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.export_hf=none",
    ]
    result = posttrain.train(
        [*arguments[2:], *small, "algorithm.adv_estimator=grpo", f"trainer.default_local_dir={folder}"]
    )
    lines = [json.loads(line) for line in (Path(result.path) / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and SAYS[name] in capsys.readouterr().out
