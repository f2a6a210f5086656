"""Runs that go wrong on purpose, on the embedded task: the diagnosis must name each within 20 steps, and be silent on a
healthy one.

    python scripts/check_diagnosis.py [NAME ...]

Writes the table of docs/doctor.md.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import posttrain
from posttrain.tracking.by_step import DIAGNOSIS, read_lines

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
STEPS = 20


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
        self.rollout, _ = build_engine(self.config.actor_rollout_ref.rollout, own, self.tokenizer, device=self.device)
        return result

    @wraps(before)
    def sync_weights(self: Any, version: int) -> dict[str, float]:
        self.rollout.load_weights((), version)
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


@dataclass
class Trouble:
    """One run, and the rules of which one must speak."""

    rules: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    reward: Callable[..., Any] = right
    within: Callable[[], Any] = contextlib.nullcontext


TROUBLES: dict[str, Trouble] = {
    "healthy": Trouble(()),
    "the reward pays for length": Trouble(
        ("length_drifts", "parts_diverge"), {"data.max_response_length": 16}, pays_for_length
    ),
    "all rewards are 0": Trouble(("rewards_all_zero",), {}, looks_for_a_box),
    "the reward pays for something else": Trouble(("parts_diverge",), {}, pays_for_a_nine),
    "the reward raises": Trouble(("reward_failures",), {}, stumbles),
    "a learning rate far too high": Trouble(("update_unstable", "reward_falls"), {f"{A}.optim.lr": 2e-2}),
    "a learning rate far too low": Trouble(
        ("kl_out_of_range",), {f"{A}.optim.lr": 1e-8, f"{A}.use_kl_loss": True, f"{A}.kl_loss_coef": 0.001}
    ),
    "far from the reference": Trouble(
        ("kl_out_of_range",), {f"{A}.optim.lr": 4e-3, f"{A}.use_kl_loss": True, f"{A}.kl_loss_coef": 1e-5}
    ),
    "another chat template": Trouble(("responses_run_on",), {}, right, another_template),
    "stale weights": Trouble(("mismatch_rises",), {f"{A}.old_log_probs": "trainer"}, right, stale_weights),
    "entropy collapses": Trouble(
        ("entropy_collapses",), {f"{A}.entropy_coeff": 0.0, f"{A}.optim.lr": 5e-3}, pays_for_a_nine
    ),
    "no variety in sampling": Trouble(("groups_without_signal",), {f"{R}.temperature": 0.05}),
    "answers are cut off": Trouble(("responses_cut_off", "responses_run_on"), {"data.max_response_length": 2}),
}


def run(name: str, folder: Path, steps: int = STEPS, **more: Any) -> dict[str, int]:
    """Rule -> the first step at which it spoke."""
    trouble = TROUBLES[name]
    settings = {
        "preset": "embedded",
        "data.train_batch_size": 60,
        "trainer.total_training_steps": steps,
        "data.val_files": None,
        "trainer.default_local_dir": str(folder),
        "trainer.experiment_name": name.replace(" ", "-"),
        "tracking.samples_freq": 0,
        "trainer.export_hf": "none",
        **trouble.settings,
        **more,
    }
    with trouble.within():
        result = posttrain.train(settings, reward=trouble.reward)
    first: dict[str, int] = {}
    for line in read_lines(result.path / DIAGNOSIS):
        for advice in line["advice"]:
            first.setdefault(advice["rule"], line["step"])
    return first


def main() -> int:
    wrong = 0
    print("| run | must be named by | named at step | what else was said |\n|---|---|---|---|")
    for name in sys.argv[1:] or TROUBLES:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            first = run(name, Path(folder))
        rules = TROUBLES[name].rules
        named = {rule: step for rule, step in first.items() if rule in rules}
        others = ", ".join(f"{rule} ({step})" for rule, step in first.items() if rule not in rules) or "-"
        wrong += bool(first) if not rules else not named
        at = ", ".join(f"{rule} {step}" for rule, step in named.items()) or ("-" if not rules else "NOT NAMED")
        print(f"| {name} | {', '.join(rules) or 'nothing'} | {at} | {others} |", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
