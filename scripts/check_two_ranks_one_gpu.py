#!/usr/bin/env python3
"""Ten steps of GRPO on recorded rollouts: with offload on and off, and on one rank and two that share a GPU by gloo.

    python scripts/check_two_ranks_one_gpu.py [--device cuda] [--rollout native] [--limit 115]

One process records rollouts of an untrained model (responses of 2 to 200 tokens); then further runs learn from them:

    one        one rank: what the others are compared with
    offloaded  one rank, parameters and optimizer in host memory between their uses: bitwise equal
    two        two ranks, FSDP2 over gloo (NCCL takes no two ranks on one GPU): losses and gradient norms within 1e-5
    two, offloaded   the same with offload: within 1e-5

Weights of the checkpoints and the exported folders are compared too. Needs neither Ray nor pytest: ranks are processes
that this one starts and calls by pipes. Prints a table, and exits 1 if anything differs by more than it may, or if
`--limit` seconds were not enough. With --device cpu two cores do it in 40 s.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
for room in ("", "tests", "tests/trainer", "tests/sft", "tests/engine", "tests/workers"):
    sys.path.insert(0, str(CHECKOUT / room))

from pipe_workers import PipeWorkers  # noqa: E402
from recorded_runs import Ran, Runs, exported, furthest, token_loss, weights_of  # noqa: E402

from posttrain.controller.pool import LocalWorkers  # noqa: E402
from posttrain.data.recipes.arithmetic import arithmetic_rows, write_files  # noqa: E402
from posttrain.models.embedded import write_model  # noqa: E402

ALLOWED = {"losses": 1e-5, "norms": 1e-5, "weights": 1e-4, "export": 1e-4}
"""On two ranks, in float32; weights are moved by Adam, which divides by gradients that rounding has changed."""
MODEL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
OFFLOAD = {
    "actor_rollout_ref__actor__fsdp_config__param_offload": True,
    "actor_rollout_ref__actor__fsdp_config__optimizer_offload": True,
    "actor_rollout_ref__ref__fsdp_config__param_offload": True,
}


class Check:
    """Runs that are compared with the first of them, and the table of what was found."""

    def __init__(self, device: str, rollout: str, folder: Path) -> None:
        self.begun, self.failed = time.monotonic(), False
        self.two = PipeWorkers(2, device)  # they import what they need while this process does
        self.log = (folder / "log").open("w")
        common = {
            "trainer.device": device,
            "trainer.deterministic": True,
            "trainer.resume_mode": "disable",
            "actor_rollout_ref.rollout.name": rollout,
        }
        model = write_model(folder / "model", **MODEL, initializer_range=0.02)
        data = write_files(folder / "sums", arithmetic_rows(max_operand=10))
        with self.quiet():
            made = {1: LocalWorkers(), 2: self.two}
            self.runs = Runs(made.__getitem__, model, data, folder / "runs", common)
            self.say("recorded")
            self.one = self.runs("grpo", "float32", 1)
        self.say("one")

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """What runs print goes into a file, whose end is shown where one fails."""
        try:
            with redirect_stdout(self.log):
                yield
        except BaseException:
            self.log.flush()
            print(Path(self.log.name).read_text()[-3000:], file=sys.stderr)
            raise

    def say(self, what: str) -> None:
        print(f"[{time.monotonic() - self.begun:5.1f} s] {what}", file=sys.stderr, flush=True)

    def compare(self, name: str, count: int, more: dict[str, Any], *, exact: bool) -> None:
        """Print how far a run is from the first one."""
        begun = time.monotonic()
        with self.quiet():
            other = self.runs.started("grpo", "float32", count, name, **more)
        apart = {
            **apart_in_metrics(self.one, other),
            "weights": furthest(weights_of(self.one.path), weights_of(other.path)),
            "export": furthest(exported(self.one.path), exported(other.path)),
        }
        good = all(value <= (0.0 if exact else ALLOWED[what]) for what, value in apart.items())
        self.failed |= not good
        found = " | ".join(f"{value:.1e}" for value in apart.values())
        how = "bit for bit" if exact else "within rounding"
        print(f"| {name} | {found} | {how}: {'yes' if good else 'NO'} | {time.monotonic() - begun:.1f} |", flush=True)


def apart_in_metrics(one: Ran, other: Ran) -> dict[str, float]:
    """The largest differences of losses, relative to the mean of |token loss|, and of gradient norms in any step."""
    apart = {"losses": 0.0, "norms": 0.0}
    for step, (mine, theirs) in enumerate(zip(one.metrics, other.metrics, strict=True), 1):
        for name in (name for name in mine if name.endswith(("loss", "grad_norm"))):
            what, scale = (
                ("losses", token_loss(one, step)) if name.endswith("loss") else ("norms", max(1.0, mine[name]))
            )
            apart[what] = max(apart[what], abs(theirs[name] - mine[name]) / scale)
    return apart


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rollout", default="native", choices=("native", "hf"))
    parser.add_argument("--limit", type=float, default=115.0)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.limit, exit=True)
    with tempfile.TemporaryDirectory() as folder:
        check = Check(args.device, args.rollout, Path(folder))
        with check.two:
            print("| run | losses | gradient norms | weights | export | equal | seconds |")
            print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
            check.compare("offloaded", 1, OFFLOAD, exact=True)
            check.compare("two", 2, {}, exact=False)
            check.compare("two, offloaded", 2, OFFLOAD, exact=False)
        check.say("done")
    return int(check.failed)


if __name__ == "__main__":
    sys.exit(main())
