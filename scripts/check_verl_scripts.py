"""Run scripts as verl's users write them, run by bash through the package compat/ (`python3 -m verl.trainer...`).

    python scripts/check_verl_scripts.py [NAME ...]

A script runs as it is, with settings behind it that stand for what this machine does not have: model and data are the
embedded ones, devices 1, sizes small, the engine `native`. `torchrun` is torch's; `ray job submit ... -- COMMAND` runs
COMMAND here. Prints a table: how many settings got which answer, what is refused and why, whether the run ended, and
how long it took. A script whose comment says `refused:` must be refused with that word in its message.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from posttrain.cache import cache_folder
from posttrain.other_systems.verl.rule import KINDS
from posttrain.other_systems.verl_script.command import read_script
from posttrain.other_systems.verl_script.report import Report, examine

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "scripts" / "verl_scripts"
ROWS = "rows.parquet"
_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
RUN = ["trainer.default_local_dir=runs", "trainer.logger=[console]", "trainer.total_training_steps=2"]
DEVICES = ["trainer.n_gpus_per_node=1", "trainer.nnodes=1"]
RL = [
    "actor_rollout_ref.model.path=embedded",
    "data.train_files=embedded",
    "data.val_files=embedded",
    "data.val_max_samples=8",
    "data.train_batch_size=8",
    "data.max_prompt_length=32",
    "data.max_response_length=8",
    f"{_ACTOR}.ppo_mini_batch_size=4",
    f"{_ROLLOUT}.tensor_model_parallel_size=1",
    f"{_ROLLOUT}.name=native",
]
SFT = [
    "model.path=embedded",
    f"data.train_files={ROWS}",
    f"data.val_files={ROWS}",
    "data.train_batch_size=4",
    "data.max_length=64",
]
FURTHER: dict[str, list[str]] = {
    "ppo": ["critic.model.path=embedded"],
    "dapo": [
        f"{_ACTOR}.ulysses_sequence_parallel_size=1",
        "actor_rollout_ref.ref.ulysses_sequence_parallel_size=1",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.len=4",
        "+reward_model.reward_kwargs.max_resp_len=8",
    ],
    "own_reward": [f"{_ROLLOUT}.response_length=8"],
    "sft": ["model.partial_pretrain=embedded"],
    "sft_lora": ["model.partial_pretrain=embedded"],
    "megatron": [
        "critic.model.path=embedded",
        *(f"{_ACTOR}.megatron.{cut}_model_parallel_size=1" for cut in ("tensor", "pipeline")),
        *(f"{role}.megatron.tensor_model_parallel_size=1" for role in ("actor_rollout_ref.ref", "critic")),
    ],
    "gpg": ["reward_model.overlong_buffer.len=4"],
    "tools_multiturn": [
        f"{_ROLLOUT}.multi_turn.tool_config_path=null",
        f"{_ROLLOUT}.tools=[calculator]",
        "data.max_prompt_length=480",
    ],
}
"""What a script needs beside the common replacements: sizes and paths that it spells in its own way."""
ARGUMENTS = {"sft": ["1", "runs"], "sft_lora": ["1", "runs"]}
"""What a script takes before its settings."""
ENVIRONMENT = {"NUM_GPUS": "1", "NGPUS_PER_NODE": "1", "NNODES": "1"}
REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str) % 2\n"
)
COMMANDS = {
    "python": 'exec "{python}" "$@"',
    "python3": 'exec "{python}" "$@"',
    "torchrun": 'exec "{python}" -m torch.distributed.run "$@"',
    "ray": 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"',
}
"""Commands that a script calls -> what they are here."""


class Ran(NamedTuple):
    """A script that was run."""

    report: Report
    status: int
    seconds: float
    said: str


def overrides(name: str, program: str) -> list[str]:
    """Settings that stand for what this machine does not have."""
    common = [
        one for one in (RL if program == "ppo" else SFT) if not (name in ARGUMENTS and one.startswith("model.path"))
    ]
    return [*common, *DEVICES, *RUN, *FURTHER.get(name, [])]


def lay_out(script: Path, folder: Path) -> None:
    """The home of somebody who has this script: its copy (with a place for settings where it has none), a reward file,
    rows with a question, its answer and the conversation of both, and the commands that it calls."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = script.read_text(encoding="utf-8")
    (folder / "run.sh").write_text(text if "$@" in text else f'{text.rstrip()} "$@"\n', encoding="utf-8")
    (folder / "rewards").mkdir()
    (folder / "rewards" / "reward.py").write_text(REWARD, encoding="utf-8")
    for helper in script.parent.glob(f"{script.stem}*.py"):
        shutil.copy(helper, folder)
    sums = [(f"{a}+{b}=", str(a + b)) for a in range(4) for b in range(4)]
    rows = [
        {
            "extra_info": {"question": question, "answer": answer},
            "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
        }
        for question, answer in sums
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / ROWS)
    (folder / "bin").mkdir()
    for name, does in COMMANDS.items():
        command = folder / "bin" / name
        command.write_text(f"#!/usr/bin/env bash\n{does.format(python=sys.executable)}\n", encoding="utf-8")
        command.chmod(0o755)


def run(script: Path, folder: Path) -> Ran:
    lay_out(script, folder)
    _, calls = read_script(script)
    settings = overrides(script.stem, calls[0].program)
    own = {
        "HOME": str(folder),
        "POSTTRAIN_CACHE": str(cache_folder()),
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
    }
    environment = {**os.environ, **ENVIRONMENT, **own, "PYTHONPATH": f"{ROOT / 'compat'}:{ROOT}"}
    begin = time.time()
    command = ["bash", "run.sh", *ARGUMENTS.get(script.stem, []), *settings]
    done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, check=False)
    return Ran(examine(calls[0], settings), done.returncode, time.time() - begin, done.stdout + done.stderr)


def about(script: Path) -> str:
    """The first comment of a script."""
    lines = script.read_text(encoding="utf-8").splitlines()
    return next(line[2:].rstrip(".") for line in lines if line.startswith("# "))


def expected_refusal(script: Path) -> str | None:
    found = re.search(r"^# refused: (.+)$", script.read_text(encoding="utf-8"), re.M)
    return found[1] if found else None


def row(script: Path, ran: Ran) -> tuple[bool, str]:
    """(whether it went as it should, the row of the table)."""
    refusal = expected_refusal(script)
    good = ran.status == 0 if refusal is None else ran.status == 2 and refusal in ran.said
    counts = [str(sum(one.kind == kind for one in ran.report.answers)) for kind in KINDS]
    reasons = {one.says: one.setting for one in reversed(ran.report.refused)} if ran.status else {}
    refused = "; ".join(f"`{setting}`: {says}" for says, setting in reasons.items()) or "none"
    ended = {0: "yes", 2: "refused at once"}.get(ran.status, f"status {ran.status}")
    return good, f"| {' | '.join([script.stem, about(script), *counts, refused, ended, f'{ran.seconds:.0f}'])} |"


def main(names: list[str]) -> int:
    print(f"| script | what it is | {' | '.join(KINDS)} | refused | ran | seconds |")
    print("|---|---|" + "---:|" * len(KINDS) + "---|---|---:|")
    failed = []
    for script in sorted(FOLDER.glob("*.sh")):
        if names and script.stem not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            ran = run(script, Path(folder))
        good, line = row(script, ran)
        print(line, flush=True)
        if not good:
            failed.append(script.stem)
            print(ran.said[-3000:], file=sys.stderr)
    if failed:
        print(f"not as they should: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
