"""`actor_rollout_ref.rollout.engine_kwargs`: arguments of a rollout engine's own, as a free dict under its name.

    engine_kwargs: {vllm: {max_model_len: 4096, block_size: 32}}

Those of the engine that generates reach it; null is "not given". Which names vLLM knows only vLLM can say: the fields
of its `EngineArgs` are read where it is installed. What posttrain itself decides is refused, with the setting that
decides it.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.config.checked import Checked, Finding, nearest_name
from posttrain.config.choices import ROLLOUT_ENGINES
from posttrain.config.closest import closest
from posttrain.config.devices import runs_on_cpu
from posttrain.config.problem import Problem

_ROLLOUT, _MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
KEY = f"{_ROLLOUT}.engine_kwargs"
VLLM = f"{KEY}.vllm"
LENGTH = "max_model_len"
ELSEWHERE = ("trtllm", "dynamo")
"""Engines that verl has, too."""

FIXED: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "logprobs_mode": "processed_logprobs",
    "enable_prefix_caching": True,
    "disable_log_stats": True,
    "async_scheduling": False,
    "stream_interval": 1,
    "seed": 0,
}
"""Arguments that the engine is built on: weights come from the trainer, requests are token ids with seeds of their own,
a step has ended when it gives its tokens."""
ON_CPU: dict[str, Any] = {"enforce_eager": True, "enable_chunked_prefill": False}
"""The same for vLLM's CPU build: its compiled graphs would hold old weights, and its seeds do not survive a prompt in
pieces."""
_PATH = ("model", "model_weights", "tokenizer", "tokenizer_mode", "hf_config_path", "config_format", "revision")
DECIDED: dict[str, str] = {
    **dict.fromkeys((*_PATH, "tokenizer_revision", "code_revision"), f"{_MODEL}.path"),
    "hf_overrides": f"{_MODEL}.override_config",
    "trust_remote_code": f"{_MODEL}.trust_remote_code",
    "dtype": f"{_MODEL}.dtype",
    **dict.fromkeys(("quantization", "quantization_config"), f"{_MODEL}.quantization"),
    "enable_lora": f"{_MODEL}.lora_rank",
    "seed": "trainer.seed",
    **{name: f"{_ROLLOUT}.{name}" for name in ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")},
    **dict.fromkeys(("kv_cache_memory_bytes", "num_gpu_blocks_override"), f"{_ROLLOUT}.kv_cache_gb"),
    "tensor_parallel_size": f"{_ROLLOUT}.tensor_model_parallel_size",
    **dict.fromkeys(("data_parallel_size", "pipeline_parallel_size"), f"{_ROLLOUT}.n_workers"),
}
"""Argument of vLLM -> the setting that decides it."""
OURS = (
    *("enable_sleep_mode", "distributed_executor_backend", "worker_cls", "worker_extension_cls", "logits_processors"),
    *("speculative_config", "spec_method", "spec_model", "spec_tokens", "runner", "convert"),
)
"""Arguments that no setting decides: vLLM runs in the worker's process, sleeps on GPUs, and makes one token after the
other, whose log-probs are those of the model."""

GONE = {
    "disable_mm_preprocessor_cache": "remove it: prompts are text (newer versions call it mm_processor_cache_gb=0)",
    "swap_space": "remove it: newer versions have no such space",
}
"""Arguments of older versions that scripts written for verl give -> what to do where they are not known."""


def given_for(engine: str, engine_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that were given for an engine."""
    given = engine_kwargs.get(engine)
    return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else {}


def longest_row(engine_kwargs: Mapping[str, Any], longest: int) -> int:
    """Tokens of the rows that vLLM is made for, in a run whose own have so many."""
    return given_for("vllm", engine_kwargs).get(LENGTH) or longest


def check_engine_kwargs(checked: Checked) -> Iterator[Finding]:
    """Names of engines; for the one that generates, what it takes; for others a note."""
    rollout, idle = checked.config.actor_rollout_ref.rollout, []
    for engine, given in rollout.engine_kwargs.items():
        known = tuple(dict.fromkeys((*ROLLOUT_ENGINES, *ELSEWHERE, rollout.name)))
        if engine not in known:
            what = f"`{KEY}.{engine}`: there is no rollout engine of this name; known: {', '.join(known)}."
            yield _problem(checked, what, nearest_name(engine, known))
        elif given is not None and not isinstance(given, dict):
            what = f"`{KEY}.{engine}={given}`: expected arguments by their names."
            yield _problem(checked, what, f"give such as {KEY}.{engine}.NAME=VALUE")
        elif engine != rollout.name:
            idle += [f"{KEY}.{engine}.{name}" for name in given_for(engine, rollout.engine_kwargs)]
        elif engine == "vllm":
            yield from _of_vllm(checked, given_for(engine, rollout.engine_kwargs))
        elif engine in ("native", "hf") and given:
            what = f"`{KEY}.{engine}`: this engine has no arguments of its own."
            yield _problem(checked, what, f"set those of {_ROLLOUT}")
    if idle:
        verb = "has" if len(idle) == 1 else "have"
        yield f"{', '.join(idle)} {verb} no effect with {_ROLLOUT}.name={rollout.name}."


def _of_vllm(checked: Checked, given: Mapping[str, Any]) -> Iterator[Finding]:
    """What is wrong whatever the version of vLLM."""
    for what, do in faults(given):
        yield _problem(checked, what, do)
    data, length = checked.config.data, given.get(LENGTH)
    longest = data.max_prompt_length + data.max_response_length
    if _is_count(length) and length < longest:
        what = f"`{VLLM}.{LENGTH}={length}`: rows may have {longest} tokens (data.max_prompt_length + "
        what += "data.max_response_length)."
        yield _problem(checked, what, f"set it to {longest} or more, leave it out, or make rows shorter")
    if runs_on_cpu(checked.config):
        for name in ON_CPU.keys() & given.keys():
            if given[name] != ON_CPU[name]:
                yield f"{VLLM}.{name}={given[name]} has no effect: on a CPU vLLM runs with {ON_CPU[name]}."


def source_of(where: str) -> str:
    """Where the dict was set, without the one key that was written last."""
    return where.partition(", written `")[0]


def _problem(checked: Checked, what: str, do: str) -> Problem:
    return Problem(what, source_of(checked.where(KEY)), do, (KEY,))


def faults(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(what is wrong, what to do) of arguments for vLLM, whatever its version."""
    for name, value in given.items():
        key = f"{VLLM}.{name}"
        if name in FIXED and value == FIXED[name]:
            continue  # it is so anyway
        if name in DECIDED:
            yield f"`{key}` cannot be set: `{DECIDED[name]}` decides it.", f"set {DECIDED[name]}, or remove it"
        elif name in FIXED:
            yield f"`{key}={value}` cannot be used: posttrain's engine is built on {FIXED[name]}.", "remove it"
        elif name in OURS:
            yield f"`{key}` cannot be set: posttrain's engine decides it itself.", "remove it"
        elif name == LENGTH and not _is_count(value):
            yield f"`{key}={value}`: expected an integer above 0.", f"give {key} such a value"


def unknown(given: Mapping[str, Any], known: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The same of names that are not among those that vLLM has."""
    names = tuple(sorted({*known} - {*DECIDED, *OURS}))
    for name in (name for name in given if name not in {*names, *DECIDED, *OURS, *FIXED}):
        close = closest(name, names)
        near = f"did you mean `{close}`?" if close else "remove it: the fields of its `EngineArgs` are its arguments"
        do = GONE.get(name, near)
        yield f"`{VLLM}.{name}`: the vLLM that is installed has no such argument.", do


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def installed_arguments() -> set[str] | None:
    """The fields of the installed vLLM's `EngineArgs`, read from its source: an import would take seconds, and torch.
    None where there is none, or it lies elsewhere."""
    try:
        found = importlib.util.find_spec("vllm")
        if found is None or not found.submodule_search_locations:
            return None
        text = Path(found.submodule_search_locations[0], "engine", "arg_utils.py").read_text(encoding="utf-8")
        classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    except (ImportError, ValueError, OSError, SyntaxError):
        return None
    bodies = [node.body for node in classes if node.name == "EngineArgs"]
    fields = [line.target for body in bodies for line in body if isinstance(line, ast.AnnAssign)]
    return {field.id for field in fields if isinstance(field, ast.Name)} or None
