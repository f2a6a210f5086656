"""The `posttrain` command: one verb per job. Each verb imports what it needs, so that `posttrain --help` is instant."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import working_folder
from posttrain.interrupts import one_interrupt
from posttrain.spelling import OptionParser
from posttrain.tracking.console import exit_status, prepare_streams, print_page, print_text, protect_console
from posttrain.tracking.progress import waiting

Arguments = Sequence[str]


def train(args: Arguments) -> int:
    """Train as `train.sh` does."""
    from posttrain import launch
    from posttrain.tracking.console import split_output_mode

    args, mode = split_output_mode(args)
    request = launch.parse(args)
    if request.help:
        print(launch.help_text(os.environ))
        return 0
    resolved = launch.resolve(request, os.environ, environment="--cfg" not in args)
    if resolved.show is not None:
        print(resolved.to_yaml(), end="")
        return 0
    from posttrain.trainer.main_ppo import exit_status, run_command

    protect_console()
    return exit_status(run_command(resolved, mode))


def plan(args: Arguments) -> int:
    if "-h" in args or "--help" in args:
        print(PLAN_USAGE)
        return 0
    with waiting():
        from posttrain.doctor import plan_command

    return plan_command.main(args)


PLAN_USAGE = """usage: posttrain plan [--gpu_gb N] [key=value] ...              as posttrain.trainer.main_ppo reads it
       posttrain plan [--gpu_gb N] train [--flag VALUE] ...     as train.sh reads it
       posttrain plan [--gpu_gb N] sft [key=value] ...          as posttrain sft reads it
       posttrain plan [--gpu_gb N] reward-model [key=value] ... as posttrain reward-model reads it
       posttrain plan --gpus N --model NAME [--assume NAME=VALUE] [key=value] ...   for many GPUs

Predicts the memory of a run by role and stage, without loading weights, for a GPU of N GiB or for the device here.
The exit status is 1 if it does not fit.

With --gpus: proposes a layout that fits, and computes memory, bytes by link, time by stage and what saturates first
from constants that it prints. NAME is a size (70b, 235b-a22b), a config.json or its folder. Further options:
  --gpus_per_machine 8   --gpu_gb 139.8 (an H200)   --mean_response TOKENS (default: data.max_response_length)"""


def explain(args: Arguments) -> int:
    parser = _parser("explain", "What an algorithm, a setting or a metric is, where it comes from, when to use it.")
    help_ = "e.g. grpo, rollout.n, kl_loss, or words of the step line: no signal; without it, all names are listed"
    parser.add_argument("name", nargs="*", help=help_)
    from posttrain.explain import explain as page

    print_page(page(" ".join(parser.parse_args(args).name) or None))
    return 0


def reward(args: Arguments) -> int:
    if args and args[0] == "try":
        from posttrain.commands import reward_try

        return reward_try.main(args[1:], sample=_sample, tell=print_text)
    parser = _parser("reward", "Rewards outside a run.")
    parser.add_argument("job", choices=["try"], help="score a data file: `posttrain reward try --help`")
    parser.parse_args(args)
    return 0


def tool(args: Arguments) -> int:
    if args and args[0] == "try":
        from posttrain.conversations.tools import try_command

        return try_command.main(args[1:])
    parser = _parser("tool", "Tools that a model calls while it answers, outside a run.")
    parser.add_argument("job", choices=["try"], help="call a tool once: `posttrain tool try --help`")
    parser.parse_args(args)
    return 0


def _sample(options: argparse.Namespace, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from posttrain.commands.generation.command import sample_rows

    return sample_rows(options, rows)


def export(args: Arguments) -> int:
    parser = _parser("export", "Write a checkpoint as a Hugging Face model folder; LoRA adapters are folded in.")
    parser.add_argument("checkpoint", type=Path, help="a folder .../checkpoints/global_step_N")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--adapter", action="store_true", help="of a LoRA run: the adapter alone, in peft's format")
    parser.add_argument(
        "--base", metavar="FOLDER", help="of a LoRA run: where the base model lies now, if it was moved"
    )
    options = parser.parse_args(args)
    from posttrain.checkpoint.folders import free_folder, refuse_other_folders

    refuse_other_folders(options.checkpoint)
    free_folder(options.out)
    with waiting():
        from posttrain.commands.export import export_checkpoint

    print(f"written: {export_checkpoint(options.checkpoint, options.out, adapter=options.adapter, base=options.base)}")
    return 0


def version(args: Arguments) -> int:
    from posttrain.version import __version__

    _parser("version", "The version that runs.").parse_args(args)
    print(f"posttrain {__version__}")
    return 0


# Verb -> (its function, or "module:function", which is imported when the verb is used; its line of the help).
VERBS: dict[str, tuple[Callable[[Arguments], int] | str, str]] = {
    "train": (train, "train with the flags of train.sh and any key=value"),
    "sft": ("posttrain.trainer.fsdp_sft_trainer:main", "fine-tune on prompts with responses, or on conversations"),
    "reward-model": (
        "posttrain.trainer.reward_model_trainer:main",
        "train a reward model on pairs of a better and a worse answer",
    ),
    "config": ("posttrain.launch:show_config", "print every setting that a run would use, and where it came from"),
    "doctor": (
        "posttrain.doctor.command:main",
        "check a run for problems before it starts: settings, data, template, reward, memory, disk",
    ),
    "compat": (
        "posttrain.other_systems.verl_script.command:main",
        "`compat check SCRIPT`: print how each key of a verl script is treated",
    ),
    "selftest": (
        "posttrain.selftest.command:main",
        "check training over several devices on this machine, and write a report to attach to an issue",
    ),
    "plan": (plan, "predict the memory of a run, without loading weights"),
    "explain": (explain, "explain an algorithm, a setting or a metric"),
    "runs": ("posttrain.tracking.commands:runs", "list runs: how each stands, and what it reached"),
    "samples": ("posttrain.tracking.commands:samples", "show what a model answered at a step: `samples RUN --step N`"),
    "plot": ("posttrain.tracking.commands:plot", "draw a metric of one or more runs: `plot RUN ... --metric NAME`"),
    "view": (
        "posttrain.view.server:main",
        "look at runs in a browser: curves, samples token by token, health; `view RUN --export FILE`",
    ),
    "replay": ("posttrain.commands.replay:main", "repeat the update of a past step, bitwise: `replay RUN STEP`"),
    "reward": (reward, "`reward try FN DATA`: score a data file before a run; `--model M` samples responses"),
    "tool": (tool, "`tool try NAME ARGUMENTS`: a tool's schema, what a model would read, and its answer"),
    "export": (export, "write a checkpoint as a Hugging Face folder"),
    "push": (
        "posttrain.commands.push:main",
        "publish a checkpoint on the Hugging Face hub, with a model card of its run",
    ),
    "data": ("posttrain.data.command:main", "`data gsm8k`, `data convert FILE`, ...: prepare a data set"),
    "generate": (
        "posttrain.commands.generation.command:main",
        "answer prompts: `generate MODEL --prompt TEXT`, or a data file into a file",
    ),
    "eval": (
        "posttrain.commands.evaluation.command:main",
        "score a model on data, with intervals; `eval compare A B` compares two reports",
    ),
    "serve": (
        "posttrain.commands.serving:main",
        "serve a model over OpenAI's and Anthropic's APIs: `serve MODEL --port 8000`",
    ),
    "bench": (
        "posttrain.bench.command:main",
        "`bench rollout`, `step`, `train`, `sync`, `sweep`, `scale`: speed, beside peers; `algorithms`: what is learnt",
    ),
    "version": (version, "print the version"),
}


def main(argv: Arguments | None = None) -> int:
    """Run the verb that the arguments name; returns the exit status."""
    prepare_streams()
    if argv is not None:
        return _answer(list(argv))
    with one_interrupt():
        return _answer(sys.argv[1:])


def _answer(args: list[str]) -> int:
    def work() -> int:
        working_folder()
        return _dispatch(args)

    return exit_status(work)


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if args else 2
    if args[0] == "--version":
        return version([])
    if args[0] in VERBS:
        work = VERBS[args[0]][0]
        if isinstance(work, str):
            module, _, name = work.partition(":")
            work = getattr(importlib.import_module(module), name)
        return work(args[1:])
    from posttrain.spelling import closest

    near = closest(args[0], VERBS)
    hint = f" Did you mean `posttrain {near}`?" if near else ""
    print_text(f"posttrain has no verb `{args[0]}`.{hint}", sys.stderr)
    print_text(f"Known verbs: {', '.join(VERBS)}. `posttrain --help` says what each does.", sys.stderr)
    return 2


def _usage() -> str:
    verbs = "\n".join(f"  {name:<12} {text}" for name, (_, text) in VERBS.items())
    return (
        f"usage: posttrain VERB [arguments]\n\nRL post-training of language models.\n\n{verbs}\n\n"
        "`posttrain VERB --help` says more."
    )


def _parser(verb: str, text: str) -> argparse.ArgumentParser:
    return OptionParser(prog=f"posttrain {verb}", description=text)


if __name__ == "__main__":
    sys.exit(main())
