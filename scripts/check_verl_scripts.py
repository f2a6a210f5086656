"""Run scripts as verl's users write them, run by bash through the package compat/ (`python3 -m verl.trainer...`).

    python scripts/check_verl_scripts.py [NAME | FILE.sh ...]
    python scripts/check_verl_scripts.py --read FOLDER

A script runs as it is, with settings behind it that stand for what this machine does not have: model and data are the
embedded ones, devices 1, sizes small, the engine `native` where the script's is not installed. `torchrun` is torch's;
`ray job submit ... -- COMMAND` and `uv run ... COMMAND` run COMMAND here. Prints a table: how many settings got which
answer, what is refused and why, whether the run ended, and how long it took. A script whose comment says `refused:`
must be refused with that word in its message.

`--read` starts nothing: every script below FOLDER (verl's `examples/`) is read as `posttrain compat check` does, and
the reasons for which scripts are rejected are counted.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from posttrain.cache import cache_folder
from posttrain.errors import UserError
from posttrain.other_systems.verl.rule import KINDS
from posttrain.other_systems.verl_script.command import ENGINE, TREES, Report, can_generate, examine, read_script
from posttrain.other_systems.verl_script.program import Call
from posttrain.spelling import lost_lines

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
]
SFT = [
    "model.path=embedded",
    f"data.train_files={ROWS}",
    f"data.val_files={ROWS}",
    "data.train_batch_size=4",
    "data.max_length=64",
]
SMALL: dict[str, str] = {
    r"critic\.model\.path|model\.partial_pretrain": "embedded",
    r".*\.(megatron\.\w+|ulysses_sequence)_parallel_size": "1",
    r".*\.overlong_buffer(_cfg)?\.len": "4",
    r".*\.max_resp_len|.*rollout\.response_length": "8",
    r"trainer\.device": "auto",
}
"""Key of a script (a pattern) -> the value that stands for what this machine does not have, or for a large size."""
FURTHER: dict[str, list[str]] = {
    "tools_multiturn": [
        f"{_ROLLOUT}.multi_turn.tool_config_path=null",
        f"{_ROLLOUT}.tools=[calculator]",
        "data.max_prompt_length=480",
    ],
}
"""What a script needs beside the common replacements."""
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
    "uv": '[ "$1" = run ] || exit 0; shift; while [ "${{1#-}}" != "$1" ]; do shift; done; exec "$@"',
}
"""Commands that a script calls -> what they are here."""


class Ran(NamedTuple):
    """A script that was run."""

    report: Report
    status: int
    seconds: float
    said: str


def overrides(name: str, call: Call) -> list[str]:
    """Settings that stand for what this machine does not have."""
    rl = call.program == "ppo"
    common = [one for one in (RL if rl else SFT) if not (name in ARGUMENTS and one.startswith("model.path"))]
    given = dict(setting.split("=", 1) for setting in call.settings)
    small = [f"{key}={to}" for key in given for pattern, to in SMALL.items() if re.fullmatch(pattern, key.lstrip("+"))]
    engine = [] if not rl or can_generate(given.get(ENGINE, "native").strip("\"'")) else [f"{ENGINE}=native"]
    return [*common, *engine, *small, *DEVICES, *RUN, *FURTHER.get(name, [])]


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
    settings = overrides(script.stem, calls[0])
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
    return next((line[2:].rstrip(".").replace("|", ",") for line in lines if line.startswith("# ")), "")


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


def read(folder: Path) -> int:
    """Read every script below a folder, and count why scripts are rejected."""
    accepted, reasons = [], Counter[str]()
    scripts = sorted(folder.rglob("*.sh"))
    for script in scripts:
        try:
            found = _rejections(script)
        except UserError as error:
            found = {str(error).replace(str(script), "the script")}
        reasons.update(found)
        accepted += [] if found else [script]
        print(f"{script.relative_to(folder)}: {'; '.join(sorted(found)) or 'accepted'}")
    print(f"\naccepted: {len(accepted)} of {len(scripts)}\n\n| scripts | rejected because |\n|---:|---|")
    for reason, count in reasons.most_common():
        print(f"| {count} | {reason} |")
    return 0 if len(accepted) == len(scripts) else 1


def _rejections(script: Path) -> set[str]:
    """Why a script is rejected: one sentence per reason, however many keys it has."""
    text, (_, calls) = script.read_text(encoding="utf-8"), read_script(script)
    found: set[str] = set()
    for call in (one for one in calls if one.program in TREES):
        report = examine(call, lost=lost_lines(text, call.settings), folder=script.parent)
        found |= {one.says.partition(";")[0] or f"{one.key} is unknown" for one in report.refused}
        found |= {problem.partition("\n")[0] for problem in report.problems}
    return found


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--read"]:
        return read(Path(arguments[1]))
    names = [name for name in arguments if not name.endswith(".sh")]
    own = sorted(FOLDER.glob("*.sh")) if names or not arguments else []
    others = [Path(name) for name in arguments if name.endswith(".sh")]
    print(f"| script | what it is | {' | '.join(KINDS)} | refused | ran | seconds |")
    print("|---|---|" + "---:|" * len(KINDS) + "---|---|---:|")
    failed = []
    for script in [*(one for one in own if not names or one.stem in names), *others]:
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
