"""Runs that go wrong on purpose, on the embedded task: the diagnosis must name each within 20 steps, and be silent on a
healthy one.

    python scripts/check_diagnosis.py [--record FOLDER] [NAME ...]

Writes the table of docs/doctor.md. With --record what the rules saw of each run goes to FOLDER/NAME.tsv, one line per
step: tests/tracking/recorded holds these, and the tests ask the rules about them again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import posttrain
from posttrain.tracking.loggers import read_metrics
from posttrain.tracking.rundir import DIAGNOSIS, read_lines

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
STEPS = 20
SEEN = (
    *("reward_mean", "reward_std", "right/mean", "critic/score/max", "critic/score/min", "reward/failures"),
    *("groups/no_signal", "groups/all_right", "groups/all_wrong", "actor/entropy", "actor/grad_norm", "actor/ppo_kl"),
    *("actor/pg_clipfrac", "actor/bad_steps", "kl_loss", "mismatch/logp_mean", "response_length"),
    *("response_length/clip_ratio", "response_length/right/mean", "response_length/wrong/mean", "tools/failing"),
)
"""Metrics that rules look at, besides the means of a reward's parts."""


def right(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == ground_truth)


def pays_for_length(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str) / 16, "acc": float(solution_str.strip() == ground_truth)}


def looks_for_a_box(data_source, solution_str, ground_truth, extra_info=None):
    return float("\\boxed" in solution_str)


def pays_for_a_nine(data_source, solution_str, ground_truth, extra_info=None):
    nine = float(solution_str.startswith("9"))
    is_right = float(solution_str.strip() == ground_truth)
    return {"score": 0.2 * is_right + nine, "acc": is_right, "nine": nine}


def pays_for_being_wrong(data_source, solution_str, ground_truth, extra_info=None):
    is_right = float(solution_str.strip() == ground_truth)
    return {"score": 1.0 - is_right, "acc": is_right}


def stumbles(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0 / (len(solution_str) - 2)


@contextmanager
def stale_weights() -> Iterator[None]:
    """The rollout decodes with a copy of the weights that is never brought up to date."""
    from posttrain.rollout.engines import build_engine
    from posttrain.workers.fsdp_workers import ActorRolloutRefWorker
    from posttrain.workers.roles import rollout_model

    before, built = ActorRolloutRefWorker.sync_weights, ActorRolloutRefWorker.init_model

    @wraps(built)  # with the mark of how its arguments are spread
    def init_model(self: Any) -> Any:
        result = built(self)
        own = rollout_model(self.config, self.device)
        settings = self.config.actor_rollout_ref.rollout
        self.rollout.engine, _ = build_engine(settings, own, self.tokenizer, device=self.device)
        return result

    @wraps(before)
    def sync_weights(self: Any, version: int) -> dict[str, float]:
        self.rollout.engine.load_weights((), version)
        return {}

    ActorRolloutRefWorker.init_model, ActorRolloutRefWorker.sync_weights = init_model, sync_weights
    try:
        yield
    finally:
        ActorRolloutRefWorker.init_model, ActorRolloutRefWorker.sync_weights = built, before


@contextmanager
def another_template() -> Iterator[None]:
    """Prompts are rendered by the chat template of another family of models."""
    from posttrain.data.chat import ChatRenderer

    before = ChatRenderer.__init__

    def init(self: Any, tokenizer: Any, **how: Any) -> None:
        tokenizer.chat_template = "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
        before(self, tokenizer, **how)

    ChatRenderer.__init__ = init
    try:
        yield
    finally:
        ChatRenderer.__init__ = before


@contextmanager
def calls_of_a_broken_tool() -> Iterator[None]:
    """Whatever the model writes is taken for a call: the embedded model does not know how to write one."""
    from posttrain.conversations.formats.base import FORMATS
    from posttrain.conversations.tools.base import ToolCall

    before = FORMATS["hermes"].read
    FORMATS["hermes"].read = lambda text: [ToolCall("broken", {})]
    try:
        yield
    finally:
        FORMATS["hermes"].read = before


def broken() -> str:
    """Raises."""
    raise ConnectionError("nobody answers")


@dataclass
class Trouble:
    """One run, and the rules of which one must speak."""

    rules: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    reward: Callable[..., Any] = right
    within: Callable[[], Any] = contextlib.nullcontext


TROUBLES: dict[str, Trouble] = {
    "healthy": Trouble(()),
    "healthy, another seed": Trouble((), {"trainer.seed": 2}),
    "healthy, as by default": Trouble((), {"data.train_batch_size": 200, "trainer.total_training_steps": 30}),
    "the reward pays for length": Trouble(
        ("length_drifts", "parts_diverge"), {"data.max_response_length": 16}, pays_for_length
    ),
    "all rewards are 0": Trouble(("rewards_all_zero",), {}, looks_for_a_box),
    "the reward pays for something else": Trouble(("parts_diverge",), {}, pays_for_a_nine),
    "the reward pays for being wrong": Trouble(("parts_diverge",), {}, pays_for_being_wrong),
    "the reward raises": Trouble(("reward_failures",), {}, stumbles),
    "a tool fails": Trouble(
        ("tools_fail",),
        {
            f"{R}.multi_turn": True,
            f"{R}.tools": ["scripts/check_diagnosis.py:broken"],
            f"{R}.max_turns": 2,
            "data.max_prompt_length": 240,
            "data.max_response_length": 160,
        },
        right,
        calls_of_a_broken_tool,
    ),
    "a learning rate far too high": Trouble(("update_unstable", "reward_falls"), {f"{A}.optim.lr": 2e-2}),
    "a learning rate far too low": Trouble(
        ("kl_out_of_range",), {f"{A}.optim.lr": 1e-8, f"{A}.use_kl_loss": True, f"{A}.kl_loss_coef": 0.001}
    ),
    "too many updates on one batch": Trouble(("update_unstable",), {f"{A}.ppo_epochs": 24, f"{A}.optim.lr": 1e-3}),
    "far from the reference": Trouble(
        ("kl_out_of_range",), {f"{A}.optim.lr": 4e-3, f"{A}.use_kl_loss": True, f"{A}.kl_loss_coef": 1e-5}
    ),
    "another chat template": Trouble(("responses_empty", "responses_run_on"), {}, right, another_template),
    "stale weights": Trouble(("mismatch_rises",), {f"{A}.old_log_probs": "trainer"}, right, stale_weights),
    "entropy collapses": Trouble(
        ("entropy_collapses",), {f"{A}.entropy_coeff": 0.0, f"{A}.optim.lr": 5e-3}, pays_for_a_nine
    ),
    "far too much entropy bonus": Trouble(("entropy_grows",), {f"{A}.entropy_coeff": 2.0}),
    "no variety in sampling": Trouble(("groups_without_signal",), {f"{R}.temperature": 0.05}),
    "answers are cut off": Trouble(("responses_cut_off", "responses_run_on"), {"data.max_response_length": 2}),
}


def named(name: str) -> str:
    return name.replace(",", "").replace(" ", "-")


def run(name: str, folder: Path, record: Path | None = None) -> dict[str, int]:
    """Rule -> the first step at which it spoke."""
    trouble = TROUBLES[name]
    settings = {
        "preset": "embedded",
        "data.train_batch_size": 60,
        "trainer.total_training_steps": STEPS,
        "data.val_files": None,
        "trainer.default_local_dir": str(folder),
        "trainer.experiment_name": named(name),
        "tracking.samples_freq": 0,
        "trainer.export_hf": "none",
        **trouble.settings,
    }
    with trouble.within():
        result = posttrain.train(settings, reward=trouble.reward)
    if record is not None:
        write_record(record / f"{named(name)}.tsv", trouble, list(read_metrics(result.path / "metrics.jsonl")))
    first: dict[str, int] = {}
    for line in read_lines(result.path / DIAGNOSIS):
        for advice in line["advice"]:
            first.setdefault(advice["rule"], line["step"])
    return first


def write_record(path: Path, trouble: Trouble, lines: list[dict[str, Any]]) -> None:
    """A line with the rules that must speak and the run's settings, the metrics' names, and their values."""
    steps = [line for line in lines if line["step"] > 0]
    parts = sorted({key for line in steps for key in line if key.startswith("reward/") and key.endswith("/mean")})
    names = [name for name in (*SEEN, *parts) if any(name in line for line in steps)]
    rows = [["" if line.get(name) is None else f"{line[name]:.4g}" for name in names] for line in steps]
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps({"rules": trouble.rules, "settings": trouble.settings})
    path.write_text("\n".join([head, "\t".join(names), *("\t".join(row) for row in rows)]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TROUBLES)}")
    parser.add_argument("--record", type=Path, metavar="FOLDER")
    options, wrong = parser.parse_args(), 0
    print("| run | must be named by | named at step | what else was said |\n|---|---|---|---|")
    for name in options.names or TROUBLES:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            first = run(name, Path(folder), options.record)
        rules = TROUBLES[name].rules
        spoke = {rule: step for rule, step in first.items() if rule in rules}
        others = ", ".join(f"{rule} {step}" for rule, step in first.items() if rule not in rules) or "-"
        wrong += bool(first) if not rules else not spoke or min(spoke.values()) > STEPS
        at = ", ".join(f"{rule} {step}" for rule, step in spoke.items()) or ("-" if not rules else "NOT NAMED")
        print(f"| {name} | {', '.join(rules) or 'nothing'} | {at} | {others} |", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
