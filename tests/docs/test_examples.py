"""The examples: headed by what they need, resolved as they are and in their small form; what is added wins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.config import load_config
from posttrain.config.ppo_tree import PPO
from posttrain.config.supervised_tree import SFT

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import check_examples  # noqa: E402

EXAMPLES = ROOT / "examples"
SHELL = [path for path in check_examples.examples() if path.suffix == ".sh"]
RUNNING = [path for path in SHELL if not check_examples.waits_for(path)]
FOLDERS = {  # S4-01, and the table of §12
    "ppo_trainer": 2,
    "grpo_trainer": 4,
    "remax_trainer": 1,
    "rloo_trainer": 1,
    "sft/gsm8k": 1,
    "sft/multiturn": 1,
    "sglang_multiturn": 1,
    "tuning/0.5b": 1,
    "tuning/7b": 1,
    "tuning/32b": 1,
    "data_preprocess": 10,
}
SHOWS = """#!/usr/bin/env bash
case "$1" in
  -c | */requirements.py) ;;  # it is a Python that has everything
  -m) printf '%s\\n' "$@" ;;
  *) exec {python} "$@" ;;
esac
"""


def name_of(script: Path) -> str:
    return script.relative_to(EXAMPLES).as_posix()


def started(script: Path, folder: Path, *more: str, smoke: bool) -> list[str]:
    """What the script starts: an interpreter that shows the arguments of `-m` stands for Python."""
    shim = folder / "python"
    shim.write_text(SHOWS.format(python=sys.executable))
    shim.chmod(0o755)
    own = {"PYTHON": str(shim), "HOME": "/home/somebody", "SMOKE": str(int(smoke)), "SMOKE_OUT": str(folder / "out")}
    done = subprocess.run(
        ["bash", str(script), *more], env={**os.environ, **own}, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    return words[len(words) - words[::-1].index("-m") - 1 :]


def test_S4_01_S4_108_S4_110_S4_111_S4_115_the_folders_of_the_document_are_there():
    counts = {folder: sum(path.parent == EXAMPLES / folder for path in check_examples.examples()) for folder in FOLDERS}
    assert counts == FOLDERS and sum(counts.values()) == len(check_examples.examples())


@pytest.mark.parametrize("script", SHELL, ids=name_of)
def test_S4_04_S4_05_S4_08_an_example_says_what_it_needs_and_what_to_expect(script):
    text = script.read_text()
    heading = text.partition("set -euo pipefail")[0]
    assert "#   needs    " in heading and os.access(script, os.X_OK)
    if check_examples.waits_for(script):
        assert "#   waits    " in heading
    else:
        assert "#   expect   " in heading and f"SMOKE=1 bash examples/{name_of(script)}" in heading
    command = text.partition("posttrain.trainer")[2]
    assert "#" not in command and command.endswith('  ${small[@]+"${small[@]}"} \\\n  "$@"\n')


@pytest.mark.parametrize("script", RUNNING, ids=name_of)
def test_S4_10_S4_107_an_example_resolves_as_it_is_and_small_and_what_is_added_wins(script, tmp_path):
    tree = SFT if script.parent.parent.name == "sft" else PPO
    for smoke in (False, True):
        added = "trainer.experiment_name=added_behind"
        _, module, *settings = started(script, tmp_path, added, smoke=smoke)
        assert module.startswith("posttrain.trainer.")
        resolved = load_config([*settings], tree=tree)
        assert resolved.value("trainer.experiment_name") == "added_behind"
        model = "model.path" if tree is SFT else "actor_rollout_ref.model.path"
        assert (resolved.value(model) == "embedded") == smoke
        assert (resolved.value("trainer.total_training_steps") == 2) == smoke


@pytest.mark.parametrize("script", [path for path in SHELL if path not in RUNNING], ids=name_of)
def test_S4_07_S4_56_an_example_that_waits_says_so_in_one_sentence_with_a_status_of_its_own(script, tmp_path):
    done = subprocess.run(["bash", str(script)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == check_examples.WAITS == 69
    assert done.stdout == "" and len(done.stderr.splitlines()) == 1 and "not built" in done.stderr
