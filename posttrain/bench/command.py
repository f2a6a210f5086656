"""The arguments of `posttrain bench`; torch is imported only after they have been checked."""

from __future__ import annotations

import argparse
import importlib
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from posttrain.bench.device import DEVICES
from posttrain.bench.workload import LENGTHS, PRESETS, WORKS
from posttrain.cores import usable

# Job -> the module and the function that measure it.
JOBS = {
    "rollout": ("rollout", "main"),
    "sync": ("rollout", "main_sync"),
    "step": ("training", "main_step"),
    "train": ("training", "main_train"),
    "sweep": ("sweep", "main"),
    "scale": ("scale", "main"),
    "algorithms": ("algorithms", "main"),
}


def main(args: Sequence[str]) -> int:
    """`posttrain bench JOB ...`."""
    options = parser().parse_args(args)
    module, function = JOBS[options.job]
    with exit_on_sigterm():
        return getattr(importlib.import_module(f"posttrain.bench.{module}"), function)(options)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM (`timeout`, a queue's limit) close the systems too: one that is left behind keeps its device."""

    def end(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="posttrain bench", description="The same work here and in peer systems.")
    jobs = top.add_subparsers(dest="job", required=True, metavar="JOB")
    rollout = jobs.add_parser("rollout", help="tokens per second of several engines on the same rows")
    _sizes(rollout)
    _mean(rollout)
    rollout.add_argument("--slots", type=positive, help="rows that decode at a time (all; of --work tail 1024)")
    rollout.add_argument("--repeat", type=positive, default=3, help="timed runs of each system, in alternation (3)")
    text = "compare the log-probs of so many rows (of the first work) with those of the same model in float32"
    rollout.add_argument("--truth", type=positive, metavar="ROWS", help=text)
    _peers(rollout)
    step = jobs.add_parser("step", help="seconds of a whole GRPO step, here, in TRL and in verl")
    _sizes(step)
    step.add_argument("--steps", type=positive, help="steps of a run; those from the fifth on count (30; on CUDA 6)")
    step.add_argument("--repeat", type=positive, default=1, help="runs of each system, in alternation (1)")
    _updates(step)
    _peers(step)
    train = jobs.add_parser("train", help="seconds of an update on packed rows, and its share of the chip's rate")
    _sizes(train)
    _mean(train)
    train.add_argument("--repeat", type=positive, default=3, help="timed updates of each system (3)")
    _updates(train)
    _peers(train)
    sync = jobs.add_parser("sync", help="seconds until the rollout engine computes with new weights")
    sync.add_argument("--repeat", type=positive, default=3, help="timed hand-overs of each system (3)")
    _peers(sync)
    sweep = jobs.add_parser("sweep", help="time per token against rows, length and model, beside the machine's floor")
    sweep.add_argument("--engine", default="native", help="rollout engine by name (native)")
    sweep.add_argument("--rows", type=numbers, help="rows decoded side by side (1,2,4,...,512)")
    sweep.add_argument("--lengths", type=numbers, help="response lengths (16,32,...,4096)")
    sweep.add_argument("--row-tokens", type=positive, default=64, help="response length while rows vary (64)")
    sweep.add_argument("--length-rows", type=positive, default=8, help="rows while the length varies (8)")
    sweep.add_argument("--prompt-tokens", type=positive, default=16, help="tokens of each prompt (16)")
    text = "presets that are compared at length-rows x row-tokens, each in a process of its own (none)"
    sweep.add_argument("--models", type=lambda text: text.split(","), metavar="A,B", help=text)
    text = "lengths up to this are decoded from end to end, of longer ones --tail tokens in their middle (4096)"
    sweep.add_argument("--whole", type=positive, default=4096, metavar="N", help=text)
    text = "see --whole; the second half of them is timed (128; on CUDA 512)"
    sweep.add_argument("--tail", type=positive, metavar="N", help=text)
    text = "tokens that rows longer than --whole have together: there are fewer of them (1048576)"
    sweep.add_argument("--most-tokens", type=positive, default=2**20, metavar="N", help=text)
    sweep.add_argument("--repeat", type=positive, default=2, help="timed runs of each point; the best counts (2)")
    sweep.add_argument("--svg", type=Path, metavar="FILE", help="write the picture here")
    text = "measure nothing, show what --json wrote here"
    sweep.add_argument("--from", dest="from_json", type=Path, metavar="FILE", help=text)
    _common(sweep)
    _scale(
        jobs.add_parser(
            "scale", help="seconds of a step by workers and layout, with Ray and without, and where they go"
        )
    )
    _algorithms(jobs.add_parser("algorithms", help="what every algorithm learns on the embedded task, by seeds"))
    return top


def _scale(job: argparse.ArgumentParser) -> None:
    job.add_argument("--workers", type=numbers, default=[1, 2, 4], metavar="A,B", help="numbers of workers (1,2,4)")
    job.add_argument("--steps", type=positive, default=12, help="steps of a run; those from the third on count (12)")
    job.add_argument("--repeat", type=positive, default=1, help="runs of each layout, in alternation (1)")
    job.add_argument("--device", choices=DEVICES, default="auto", help="cpu or cuda (what is there)")
    job.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured here")
    text = "settings of the runs, as `posttrain train` takes them, e.g. actor_rollout_ref.model.path=FOLDER"
    job.add_argument("settings", nargs="*", metavar="KEY=VALUE", help=text)


def _algorithms(job: argparse.ArgumentParser) -> None:
    job.add_argument("--steps", type=positive, default=60, help="steps of a run (60)")
    job.add_argument("--seeds", type=positive, default=3, help="runs of each algorithm, with seeds 1, 2, ... (3)")
    job.add_argument("--only", metavar="A,B", help="these algorithms only")
    job.add_argument("--jobs", type=positive, default=1, help="runs at a time (1)")
    job.add_argument("--threads", type=positive, help="CPU threads of a run (the cores divided by the jobs)")
    text = "write every run here as it ends; runs that it holds already are not made again"
    job.add_argument("--json", type=Path, metavar="FILE", help=text)
    job.add_argument("--from", dest="from_json", type=Path, metavar="FILE", help="train nothing, show these runs")
    job.add_argument("--svg", type=Path, metavar="FILE", help="write the picture here")
    job.add_argument("--markdown", type=Path, metavar="PAGE", help="put the table between the markers of this page")


def _sizes(job: argparse.ArgumentParser) -> None:
    job.add_argument("--prompts", type=positive, help="distinct prompts")
    job.add_argument("--n", type=positive, help="responses per prompt")
    job.add_argument("--tokens", type=positive, help="tokens per response, at most")
    job.add_argument("--prompt-tokens", type=positive, help="tokens per prompt")
    job.add_argument("--lengths", choices=LENGTHS, help="all equal (fixed), or drawn with a long tail")


def _mean(job: argparse.ArgumentParser) -> None:
    job.add_argument("--mean-tokens", type=positive, help="mean of the drawn lengths (their median is tokens / 4)")


def _updates(job: argparse.ArgumentParser) -> None:
    job.add_argument("--budget", type=positive, help="tokens of one training pass (16384)")
    job.add_argument("--lora-rank", type=positive, help="train adapters of this rank on all linear layers")
    job.add_argument("--checkpointing", action="store_true", help="compute activations again in the backward pass")


def _peers(job: argparse.ArgumentParser) -> None:
    job.add_argument("--only", metavar="A,B", help="measure these systems only")
    text = "another setting of a system, e.g. vllm:enforce_eager=true; may be repeated"
    job.add_argument("--set", action="append", default=[], metavar="SYSTEM:KEY=VALUE", help=text)
    text = "another environment variable of a system, e.g. trl:GOMP_SPINCOUNT=0; may be repeated"
    job.add_argument("--env", action="append", default=[], metavar="SYSTEM:NAME=VALUE", help=text)
    text = "a second row of a system, to be changed by the two above, e.g. spawned=vllm; may be repeated"
    job.add_argument("--also", action="append", default=[], metavar="NEWNAME=SYSTEM", help=text)
    text = "the Python of an environment in which a peer is installed, e.g. verl=/opt/verl/bin/python; may be repeated"
    job.add_argument("--python", action="append", default=[], metavar="SYSTEM=PATH", help=text)
    text = "first make the environments of peers that have none (for the CPU)"
    job.add_argument("--install", action="store_true", help=text)
    works = sorted({name for known in WORKS.values() for name in known})
    text = "sizes by name, which given ones go before (small; on CUDA group): " + ", ".join(works)
    text += "; rollout takes several, A,B, in one loading of each system" if job.prog.endswith("rollout") else ""
    job.add_argument("--work", metavar="NAME", help=text)
    job.add_argument("--deadline", type=positive, metavar="S", help="seconds of a system to load, and for each run")
    _common(job)


def _common(job: argparse.ArgumentParser) -> None:
    job.add_argument("--model", help=f"{', '.join(PRESETS)}, or the folder of a model (1m; on CUDA 0.5b)")
    job.add_argument("--device", choices=DEVICES, default="auto", help="cpu or cuda (what is there)")
    job.add_argument("--threads", type=positive, default=usable(), help="CPU threads (all cores)")
    job.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured here")


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a whole number above 0")
    return int(text)


def numbers(text: str) -> list[int]:
    """`1,2,4`: whole numbers above 0."""
    return [positive(part.strip()) for part in text.split(",")]
