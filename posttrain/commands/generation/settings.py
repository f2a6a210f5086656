"""The settings of `posttrain generate` and `posttrain eval`: flags, `key=value`, and a checkpoint's own run.

They are the keys of training (`data.*`, `actor_rollout_ref.model.*`, `actor_rollout_ref.rollout.*`): a prompt is
rendered, a response sampled and a reward given as there. Never imports torch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.checkpoint.folders import refuse_run
from posttrain.config.resolved import ConfigError, Problem
from posttrain.config.root import PPOConfig
from posttrain.config.schema import assign
from posttrain.conversations.settings import TurnSettings, turn_settings
from posttrain.errors import UserError
from posttrain.models.model_files import local_or_hub
from posttrain.texts import redact

_ROLLOUT, _MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
# Flag -> the key that it sets; ranges and choices are those of the key.
CHECKED = {
    "top_p": f"{_ROLLOUT}.top_p",
    "top_k": f"{_ROLLOUT}.top_k",
    "min_p": f"{_ROLLOUT}.min_p",
    "repetition_penalty": f"{_ROLLOUT}.repetition_penalty",
    "engine": f"{_ROLLOUT}.name",
    "max_tokens": "data.max_response_length",
    "seed": "trainer.seed",
    "device": "trainer.device",
    "dtype": f"{_MODEL}.dtype",
    "limit": "data.val_max_samples",
}
# The same for free texts, which are taken as they are.
TEXTS = {
    "stop": f"{_ROLLOUT}.stop",
    "prompt_key": "data.prompt_key",
    "data_source": "data.data_source",
    "system_prompt": "data.system_prompt",
    "reward_func": "custom_reward_function.path",
    "reward_name": "custom_reward_function.name",
}
# Keys (and sections) that have an effect here.
USED = (
    *(f"data.{name}" for name in ("prompt_key", "data_source", "system_prompt", "apply_chat_template_kwargs")),
    *(f"data.{name}" for name in ("max_prompt_length", "max_response_length", "filter_overlong_prompts", "truncation")),
    *(f"{_MODEL}.{name}" for name in ("tokenizer_path", "trust_remote_code", "dtype", "override_config")),
    *(f"{_ROLLOUT}.{name}" for name in ("name", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "ignore_eos")),
    *(f"{_ROLLOUT}.{name}" for name in ("max_num_seqs", "max_num_batched_tokens", "kv_cache_gb")),
    *(f"{_ROLLOUT}.{name}" for name in ("gpu_memory_utilization", "multi_turn", "engine_kwargs", "agent")),
    "trainer.seed",
    "trainer.device",
)
USED_BY_REWARDS = (
    "custom_reward_function",
    *(f"reward.{name}" for name in ("functions", "num_workers", "timeout_s", "failure_score", "sandbox")),
    "reward.code_partial_credit",
)
_STEP = re.compile(r"global_step_\d+")


@dataclass
class Settings:
    """What to generate with."""

    config: PPOConfig
    n: int
    temperature: float  # 0 takes the likeliest tokens
    raw: bool  # prompts as they are, without the chat template
    given: frozenset[str]  # keys that the command line or the checkpoint's run set

    @property
    def turns(self) -> TurnSettings:
        return turn_settings(self.config.actor_rollout_ref.rollout.multi_turn)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that both verbs have."""
    parser.add_argument(
        "--data", action="append", metavar="FILE", help="parquet, json or jsonl with a column `prompt`; may be repeated"
    )
    parser.add_argument("--prompt-key", metavar="COLUMN", help="column that holds the prompt (default prompt)")
    parser.add_argument("--limit", type=int, metavar="ROWS", help="take the first rows only")
    parser.add_argument("--n", type=int, help="responses per prompt (default 1)")
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="0 is greedy (default: 0 for one response per prompt, else 1)"
    )
    parser.add_argument("--top-p", type=float, metavar="P", help="sample from the likeliest tokens of this probability")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from this many likeliest tokens")
    parser.add_argument("--min-p", type=float, metavar="P", help="drop tokens below this share of the likeliest one")
    parser.add_argument("--repetition-penalty", type=float, metavar="X", help="divide scores of tokens seen before")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="text that ends a response; may be repeated")
    longest = ("--max-tokens", "--max-new-tokens")  # the second is what transformers calls it
    parser.add_argument(*longest, type=int, metavar="N", help="longest response (default 1024, or the run's)")
    parser.add_argument("--seed", type=int, help="seed of the samples (default 1)")
    parser.add_argument("--engine", metavar="NAME", help="native (default), hf or vllm")
    parser.add_argument("--device", metavar="NAME", help="auto (default), cpu or cuda")
    parser.add_argument("--dtype", metavar="NAME", help="auto (default), float32 or bfloat16")
    parser.add_argument("--system-prompt", metavar="TEXT", help="put before prompts that are plain texts")
    parser.add_argument(
        "--tools",
        action="append",
        metavar="NAME",
        help="a tool that the model may call: calculator, python, search or FILE.py:FUNCTION; may be repeated",
    )
    parser.add_argument("--raw", action="store_true", help="prompts as they are, without the chat template")
    parser.add_argument("--overwrite", action="store_true", help="replace the output, and begin anew")


def split_words(words: Sequence[str], verb: str) -> tuple[str | None, list[str]]:
    """(MODEL, the key=value settings) among a command's words."""
    settings = [word for word in words if "=" in word and not Path(word).exists()]
    models = [word for word in words if word not in settings]
    if len(models) > 1:
        raise UserError(f"posttrain {verb} takes one model, not {len(models)}: {', '.join(models)}")
    return (models[0] if models else None), settings


def read_settings(
    options: argparse.Namespace,
    overrides: Sequence[str],
    run: Path | None = None,
    *,
    used: Sequence[str] = USED,
) -> Settings:
    """The settings of a command line, over those of the run in the folder `run`; ConfigError lists what is wrong.

    `used` are the keys and sections that have an effect.
    """
    from posttrain.config import load_config

    flags = vars(options)
    checked = [(flag, key) for flag, key in CHECKED.items() if flags.get(flag) is not None]
    labelled = [(f"{key}={flags[flag]}", f"flag --{flag.replace('_', '-')}") for flag, key in checked]
    if flags.get("tools"):
        several = {"enable": "True", "tools": json.dumps(flags["tools"])}
        labelled += [(f"{_ROLLOUT}.multi_turn.{name}={value}", "flag --tools") for name, value in several.items()]
    args = ["--config-path", str(run), "--config-name", "config", *overrides] if run else list(overrides)
    given = {key for _, key in checked}
    config = PPOConfig()
    if args or labelled:
        resolved = load_config(args, labelled=labelled)
        config = resolved.config
        mine = {key for key in resolved.explicit if resolved.where(key).startswith("command line")}
        _refuse_idle(mine, used)
        given |= resolved.explicit
    if flags.get("limit") is None:
        config.data.val_max_samples = -1  # a run's own limit is about its validation
    for flag, key in TEXTS.items():
        if flags.get(flag) is not None:
            assign(config, key, flags[flag])
            given.add(key)
    return Settings(config, *_sampling(options, config), bool(flags.get("raw")), frozenset(given))


def _sampling(options: argparse.Namespace, config: PPOConfig) -> tuple[int, float]:
    # (n, temperature). One response per prompt is greedy by default; several are sampled at the run's temperature.
    n, temperature = 1 if options.n is None else options.n, options.temperature
    if n < 1:
        raise UserError(f"--n {n}: at least one response per prompt is needed")
    if temperature is None:
        temperature = 0.0 if n == 1 else config.actor_rollout_ref.rollout.temperature
    if not 0 <= temperature < float("inf"):
        raise UserError(f"--temperature {temperature}: give 0 (greedy) or a number above it")
    if temperature == 0 and n > 1:
        raise UserError(f"--n {n} with --temperature 0: greedy responses to one prompt are all the same")
    return n, temperature


def _refuse_idle(keys: set[str], used: Sequence[str]) -> None:
    # A key without effect is a mistake of the user's, here as in training.
    idle = sorted(key for key in keys if not any(key == one or key.startswith(f"{one}.") for one in used))
    if idle:
        flags = {"actor_rollout_ref.rollout.n": "--n", "actor_rollout_ref.rollout.temperature": "--temperature"}
        flags |= {"data.val_max_samples": "--limit", "actor_rollout_ref.model.path": "the first argument"}
        raise ConfigError(
            Problem(
                f"`{key}` has no effect here.",
                "command line",
                f"use {flags[key]} instead" if key in flags else f"known: {', '.join(used)}",
            )
            for key in idle
        )


def find_run_of(checkpoint: Path) -> Path | None:
    """The folder of the run that wrote a checkpoint, if it holds the settings of such a run."""
    import yaml

    config = checkpoint.resolve().parent.parent / "config.yaml"
    try:
        stored = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return None
    return config.parent if isinstance(stored, dict) and "actor_rollout_ref" in stored else None


def is_checkpoint(name: str) -> bool:
    """Whether MODEL names a checkpoint folder of a run."""
    path = Path(os.path.expandvars(os.path.expanduser(name)))
    return path.is_dir() and (_STEP.fullmatch(path.resolve().name) is not None or (path / "manifest.json").is_file())


def check_model(name: str) -> None:
    """Raises ModelError, before torch is imported, for a MODEL that is neither there nor to be had."""
    if name == "embedded" or is_checkpoint(name):
        return
    refuse_run(Path(os.path.expandvars(os.path.expanduser(name))))
    local_or_hub(name)


def described(settings: Settings) -> dict[str, Any]:
    """What the samples depend on, as plain values: stored beside them, and compared before a run continues."""
    data, rollout = settings.config.data, settings.config.actor_rollout_ref.rollout
    return {
        "n": settings.n,
        "temperature": settings.temperature,
        **{name: rollout[name] for name in ("top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos")},
        "stop": list(rollout.stop),
        "max_tokens": data.max_response_length,
        "max_prompt_tokens": data.max_prompt_length,
        "seed": settings.config.trainer.seed,
        "raw": settings.raw,
        "system_prompt": data.system_prompt,
        "chat_template_kwargs": dict(data.apply_chat_template_kwargs),
        **({"multi_turn": redact(dict(rollout.multi_turn))} if settings.turns.enable else {}),
        **({"agent": redact(dict(rollout.agent))} if rollout.agent else {}),
    }
