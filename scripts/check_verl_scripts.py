"""Run scripts as verl's users write them, brought over by `posttrain compat check --write` and run to their end.

    python scripts/check_verl_scripts.py [NAME ...]

Model and data are replaced by the embedded ones, counts of devices by 1, sizes by small ones, the engine by `native`.
Prints a table: how many settings got which answer, whether the run ended, and how long it took.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from posttrain.compat_check.command import command_of, read_script
from posttrain.compat_check.report import Report, examine
from posttrain.config.verl.rule import KINDS

FOLDER = Path(__file__).parent / "verl_scripts"
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
FURTHER: dict[str, list[str]] = {
    "ppo": ["critic.model.path=embedded"],
    "dapo": [
        f"{_ACTOR}.ulysses_sequence_parallel_size=1",
        "actor_rollout_ref.ref.ulysses_sequence_parallel_size=1",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.len=4",
        "+reward_model.reward_kwargs.max_resp_len=8",
    ],
    "own_reward": [f"{_ROLLOUT}.response_length=8", "reward.custom_reward_function.path=reward.py"],
    "sft": ["model.partial_pretrain=embedded"],
}
"""What a script needs beside the common replacements: sizes and paths that it spells in its own way."""
REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str) % 2\n"
)


def overrides(name: str, program: str) -> list[str]:
    """Settings that stand for what this machine does not have."""
    common = [one for one in (RL if program == "ppo" else SFT) if not (name == "sft" and one.startswith("model.path"))]
    return [*common, *DEVICES, *RUN, *FURTHER.get(name, [])]


def bring_over(script: Path, target: Path) -> Report:
    """The report of a script, its command written to `target`."""
    _, calls = read_script(script)
    report = examine(calls[0], overrides(script.stem, calls[0].program))
    command = command_of(report).replace("python3 -m", f"{sys.executable} -m")
    command = command.replace("posttrain sft", f"{sys.executable} -m posttrain sft")
    target.write_text(f"set -e\n{command}\n", encoding="utf-8")
    return report


def write_inputs(folder: Path) -> None:
    """A reward file, and rows with a question, its answer and the conversation of both."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    sums = [(f"{a}+{b}=", str(a + b)) for a in range(4) for b in range(4)]
    rows = [
        {
            "extra_info": {"question": question, "answer": answer},
            "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
        }
        for question, answer in sums
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / ROWS)


def run(script: Path, folder: Path) -> tuple[Report, bool, float, str]:
    """(report, whether the run ended well, seconds, the end of what it said)."""
    write_inputs(folder)
    report, begin = bring_over(script, folder / "run.sh"), time.time()
    done = subprocess.run(["bash", "run.sh"], cwd=folder, text=True, capture_output=True, check=False)
    return report, done.returncode == 0, time.time() - begin, (done.stdout + done.stderr)[-2000:]


def main(names: list[str]) -> int:
    print(
        "| script | "
        + " | ".join(KINDS)
        + " | refused | ran | seconds |\n|---|"
        + "---:|" * (len(KINDS) + 1)
        + "---|---:|"
    )
    good = True
    for script in sorted(FOLDER.glob("*.sh")):
        if names and script.stem not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            report, ended, seconds, said = run(script, Path(folder))
        counts = [sum(one.kind == kind for one in report.answers) for kind in KINDS]
        refused = ", ".join(f"`{one.key}`" for one in report.refused) or "none"
        cells = [script.stem, *map(str, counts), refused, "yes" if ended else "no", f"{seconds:.0f}"]
        print(f"| {' | '.join(cells)} |", flush=True)
        good = good and ended
        if not ended:
            print(said, file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
