"""`python -m posttrain.trainer.main_generation model.path=... data.path=...`: `posttrain generate` in verl's spelling.

Each key stands for a flag or a key of `posttrain generate`; the file that it writes has the data's rows with a column
`responses`.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from posttrain.errors import UserError
from posttrain.tracking.console import exit_status

_ROLLOUT = "actor_rollout_ref.rollout"
FLAGS = {
    "data.path": "--data",
    "data.prompt_key": "--prompt-key",
    "data.n_samples": "--n",
    "data.output_path": "--out",
    "rollout.name": "--engine",
    "rollout.temperature": "--temperature",
    "rollout.top_k": "--top-k",
    "rollout.top_p": "--top-p",
    "rollout.min_p": "--min-p",
    "rollout.repetition_penalty": "--repetition-penalty",
    "rollout.response_length": "--max-tokens",
    "rollout.dtype": "--dtype",
    "rollout.seed": "--seed",
    "trainer.seed": "--seed",
    "trainer.device": "--device",
    "trainer.n_gpus_per_node": "--workers",
}
KEYS = {
    "rollout.prompt_length": "data.max_prompt_length",
    "rollout.ignore_eos": f"{_ROLLOUT}.ignore_eos",
    "rollout.max_num_seqs": f"{_ROLLOUT}.max_num_seqs",
    "rollout.max_num_batched_tokens": f"{_ROLLOUT}.max_num_batched_tokens",
    "rollout.gpu_memory_utilization": f"{_ROLLOUT}.gpu_memory_utilization",
    "model.trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
    "model.tokenizer_path": "actor_rollout_ref.model.tokenizer_path",
}
# Keys that must be 1, and why.
ONE = {
    "trainer.nnodes": "generation runs on one machine",
    "rollout.tensor_model_parallel_size": "each worker has an engine of its own, with the whole model in it",
}
# Keys that change nothing, and why.
IDLE = {"data.batch_size": "the engine is kept full; actor_rollout_ref.rollout.max_num_seqs bounds it"}
OTHERS = ("model.path", "rollout.do_sample")


def translate(args: Sequence[str]) -> list[str]:
    """The arguments of `posttrain generate` that these mean."""
    values = read_pairs(args, (*FLAGS, *KEYS, *ONE, *IDLE, *OTHERS), "main_generation")
    out = [arg for arg in args if arg.startswith("--")]
    if "model.path" not in values:
        raise UserError("model.path is missing: set it to a folder, a hub id, `embedded` or a checkpoint")
    if values.get("rollout.do_sample") is False:
        values["rollout.temperature"] = 0
    values.setdefault("rollout.temperature", 1.0)
    for key, why in ONE.items():
        if values.get(key, 1) != 1:
            raise UserError(
                f"{key}={values[key]}: {why}; set it to 1 (trainer.n_gpus_per_node is the number of workers)"
            )
    out.append(str(values["model.path"]))
    for key, reason in IDLE.items():
        if key in values:
            print(f"note: {key} has no effect here: {reason}.", file=sys.stderr)
    for key, flag in FLAGS.items():
        if key in values:
            for value in values[key] if isinstance(values[key], list) else [values[key]]:
                out += [flag, str(value)]
    return out + [f"{KEYS[key]}={value}" for key, value in values.items() if key in KEYS]


def read_pairs(args: Sequence[str], known: Sequence[str], entry: str) -> dict[str, Any]:
    """The values of `key=value` arguments, read as YAML; an unknown key is answered with the nearest."""
    values: dict[str, Any] = {}
    for arg in args:
        key, equals, text = arg.lstrip("+").partition("=")
        if arg.startswith("--"):
            continue
        if not equals:
            raise UserError(f"{entry}: `{arg}` is not key=value. Known keys: {', '.join(known)}")
        if key not in known and not any(key.startswith(f"{one}.") for one in known):
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise UserError(f"{entry}: `{key}` is not known.{hint} Known keys: {', '.join(known)}")
        values[key] = yaml.safe_load(text) if text else None
    return values


def main(args: Sequence[str]) -> int:
    from posttrain.commands.generation import command

    return command.main(translate(args))


def cli(entry: Callable[[Sequence[str]], int]) -> int:
    """An entry with errors meant for users printed as they are."""
    return exit_status(lambda: entry(sys.argv[1:]), if_interrupted="interrupted; the same command continues")


if __name__ == "__main__":
    sys.exit(cli(main))
