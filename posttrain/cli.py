"""The `posttrain` command: one verb per job. Each verb imports what it needs, so that `posttrain --help` is instant."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from posttrain.errors import UserError

Arguments = Sequence[str]


def train(args: Arguments) -> int:
    from posttrain import launch

    return launch.main(args)


def sft(args: Arguments) -> int:
    from posttrain.trainer import fsdp_sft_trainer

    return fsdp_sft_trainer.main(args)


def reward_model(args: Arguments) -> int:
    from posttrain.trainer import reward_model_trainer

    return reward_model_trainer.main(args)


def config(args: Arguments) -> int:
    from posttrain import launch

    return launch.show_config(args)


def plan(args: Arguments) -> int:
    if "-h" in args or "--help" in args:
        print(PLAN_USAGE)
        return 0
    from posttrain.doctor import table

    return table.main(args)


PLAN_USAGE = """usage: posttrain plan [--gpu_gb N] [key=value] ...              as posttrain.trainer.main_ppo reads it
       posttrain plan [--gpu_gb N] train [--flag VALUE] ...     as train.sh reads it

Predicts the memory of a run by role and stage, without loading weights, for a GPU of N GiB or for the device here.
The exit status is 1 if it does not fit."""


def explain(args: Arguments) -> int:
    parser = _parser("explain", "What an algorithm, a setting or a metric is, where it comes from, when to use it.")
    parser.add_argument("name", nargs="?", help="e.g. grpo, rollout.n, kl_loss; without it, all names are listed")
    from posttrain.explain import explain as page

    print(page(parser.parse_args(args).name))
    return 0


def reward(args: Arguments) -> int:
    if args and args[0] == "try":
        from posttrain.rewards import tryout

        return tryout.main(args[1:]) or 0
    parser = _parser("reward", "Rewards outside a run.")
    parser.add_argument("job", choices=["try"], help="score a data file: `posttrain reward try --help`")
    parser.parse_args(args)
    return 0


def export(args: Arguments) -> int:
    parser = _parser("export", "Write a checkpoint as a Hugging Face model folder.")
    parser.add_argument("checkpoint", type=Path, help="a folder .../checkpoints/global_step_N")
    parser.add_argument("out", type=Path, help="folder to write")
    options = parser.parse_args(args)
    from posttrain.checkpoint.export import export as write

    write(options.checkpoint, options.out)
    return 0


def data(args: Arguments) -> int:
    parser = _parser("data", "Prepare a data set.")
    recipes = parser.add_subparsers(dest="recipe", required=True, metavar="RECIPE")
    sums = recipes.add_parser("arithmetic", help="sums such as `15 + 27 = ?`: train and test files")
    sums.add_argument("out", type=Path, help="folder to write")
    sums.add_argument("--suffix", default="json", choices=["json", "parquet"], help="file format")
    sums.add_argument("--max-operand", type=int, default=100, help="operands lie below this number")
    sums.add_argument("--seed", type=int, default=1, help="seed of the split and of the order")
    words = recipes.add_parser("gsm8k", help="grade-school word problems, from a local copy or from the hub")
    words.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FOLDER",
        help="folder with a copy of the data set: train and test as "
        ".jsonl, .json or .parquet with the columns question and answer (default: the hub's openai/gsm8k)",
    )
    words.add_argument("--out", type=Path, metavar="FOLDER", help="folder to write (default: $HOME/data/gsm8k)")
    options = parser.parse_args(args)
    for path, rows in (_gsm8k if options.recipe == "gsm8k" else _arithmetic)(options).items():
        print(f"{path}: {rows} rows")
    return 0


def _arithmetic(options: argparse.Namespace) -> dict[Path, int]:
    from posttrain.data.recipes.arithmetic import arithmetic_rows, write_files

    rows = arithmetic_rows(max_operand=options.max_operand, seed=options.seed)
    return {path: len(rows[name]) for name, path in write_files(options.out, rows, suffix=options.suffix).items()}


def _gsm8k(options: argparse.Namespace) -> dict[Path, int]:
    from posttrain.data.recipes.gsm8k import prepare

    return prepare(options.source, options.out)


def bench(args: Arguments) -> int:
    from posttrain.bench import command

    return command.main(args)


def version(args: Arguments) -> int:
    from posttrain import __version__

    _parser("version", "The version that runs.").parse_args(args)
    print(f"posttrain {__version__}")
    return 0


VERBS: dict[str, tuple[Callable[[Arguments], int], str]] = {
    "train": (train, "train with the flags of train.sh and any key=value"),
    "sft": (sft, "fine-tune on prompts with responses, or on conversations"),
    "reward-model": (reward_model, "train a reward model on pairs of a better and a worse answer"),
    "config": (config, "print every setting that a run would use, and where it came from"),
    "plan": (plan, "predict the memory of a run, without loading weights"),
    "explain": (explain, "explain an algorithm, a setting or a metric"),
    "reward": (reward, "`reward try`: score a data file before a run"),
    "export": (export, "write a checkpoint as a Hugging Face folder"),
    "data": (data, "`data arithmetic OUT`, `data gsm8k`: prepare a data set"),
    "bench": (bench, "`bench rollout`, `bench step`, `bench sweep`: the same work here and in peer systems"),
    "version": (version, "print the version"),
}


def main(argv: Arguments | None = None) -> int:
    """Run the verb that the arguments name; returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `posttrain config | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if args else 2
    if args[0] == "--version":
        return version([])
    if args[0] in VERBS:
        return VERBS[args[0]][0](args[1:])
    near = difflib.get_close_matches(args[0], VERBS, n=1, cutoff=0.4)
    hint = f" Did you mean `posttrain {near[0]}`?" if near else ""
    print(f"posttrain has no verb `{args[0]}`.{hint}", file=sys.stderr)
    print(f"Known verbs: {', '.join(VERBS)}. `posttrain --help` says what each does.", file=sys.stderr)
    return 2


def _usage() -> str:
    verbs = "\n".join(f"  {name:<12} {text}" for name, (_, text) in VERBS.items())
    return (
        f"usage: posttrain VERB [arguments]\n\nRL post-training of language models.\n\n{verbs}\n\n"
        "`posttrain VERB --help` says more."
    )


def _parser(verb: str, text: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"posttrain {verb}", description=text)


if __name__ == "__main__":
    sys.exit(main())
