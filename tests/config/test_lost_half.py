"""A command that a comment, an empty line or a missing `\\` cut in two: the lines that never arrive are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.spelling import lost_lines

LORA = """\
set -x
python3 -m posttrain.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\

    # ===== LoRA =====
    actor_rollout_ref.model.lora_rank=16 \\
    actor_rollout_ref.model.lora_alpha=32 \\

    # ===== Rollout =====
    actor_rollout_ref.rollout.n=4
echo done
"""
FILE = """\
python3 -m posttrain.trainer.main_ppo \\
    --config-path=conf \\
    --config-name=my_grpo_config \\
    # still to be overridden
    data.train_files=train.parquet
"""
FORGOTTEN = """\
./train.sh --model tiny \\
  --lr 1e-5 # a fast one
  --epochs 3 \\
  trainer.seed=2
"""
WHOLE = """\
# posttrain, with LoRA
python3 -m posttrain.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    actor_rollout_ref.model.lora_rank=16
python3 -m posttrain.trainer.main_ppo algorithm.adv_estimator=gae
export trainer_seed=1
"""


@pytest.mark.parametrize(
    ("text", "args", "numbers"),
    [
        pytest.param(LORA, ["algorithm.adv_estimator=grpo"], [6, 7, 10], id="empty line"),
        pytest.param(FILE, ["--config-path=conf", "--config-name=my_grpo_config"], [5], id="comment line"),
        pytest.param(FORGOTTEN, [], [3, 4], id="no backslash"),
        pytest.param(WHOLE, ["algorithm.adv_estimator=grpo", "actor_rollout_ref.model.lora_rank=16"], [], id="whole"),
        pytest.param(WHOLE, ["algorithm.adv_estimator=gae"], [], id="the second"),
        pytest.param(LORA, ["algorithm.adv_estimator=gae", "trainer.seed=1"], [6, 7, 10], id="more by a variable"),
        pytest.param(LORA, ["trainer.seed=1"], [], id="another command"),
        pytest.param("python3 -m posttrain.trainer.main_ppo 'a", [], [], id="open quote"),
    ],
)
def test_lines_that_are_arguments_and_no_commands_are_found(text, args, numbers):
    assert [number for number, _ in lost_lines(text, args)] == numbers


def run(tmp_path: Path, *command: str, text: str = LORA, **options) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "run.sh"
    script.write_text(text.replace("python3", sys.executable))
    command = tuple(part.replace("TEXT", script.read_text()) for part in command)
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, **options)


@pytest.mark.parametrize("way", ["script", "text", "input"])
def test_a_run_that_lost_half_of_its_command_does_not_start(tmp_path, way):
    commands = {"script": ("bash", "run.sh"), "text": ("bash", "-c", "TEXT"), "input": ("bash", "-s")}
    (tmp_path / "run.sh").write_text(LORA.replace("python3", sys.executable))
    with open(tmp_path / "run.sh") as stdin:
        ended = run(tmp_path, *commands[way], stdin=stdin if way == "input" else subprocess.DEVNULL)
    assert "This command was cut short: 3 lines of its arguments never arrive (line 6: " in ended.stderr
    assert "`actor_rollout_ref.model.lora_rank=16`" in ended.stderr and "Step 0" not in ended.stdout
    assert not (tmp_path / "outputs").exists()
