"""Settings of single rollout engines, checked before anything is loaded: `rollout.server`, what only `native` follows,
and `actor_rollout_ref.rollout.engine_kwargs`, arguments of an engine's own as a free dict under its name.

    engine_kwargs: {vllm: {max_model_len: 4096, block_size: 32}}

Those of the engine that generates reach it; null is "not given". The names that an engine of
another package accepts are read from that package's source, if it is installed. What posttrain itself decides is
rejected, with the setting that decides it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from posttrain.config.checked import Checked, Finding, nearest_name
from posttrain.config.choices import ROLLOUT_ENGINES
from posttrain.config.resolved import Problem, Resolved
from posttrain.config.trainer import (
    COLOCATED_WORKERS,
    ENGINE_SIZE,
    ENGINE_STAGES,
    ROLLOUT_WORKERS,
    continues_responses,
    generating_workers_of,
    runs_on_cpu,
)
from posttrain.rollout.outside_engine import KEY, MODEL, ROLLOUT, OutsideEngine, given_for, is_count
from posttrain.rollout.sglang.settings import SGLANG
from posttrain.rollout.vllm.settings import VLLM

OUTSIDE: dict[str, OutsideEngine] = {engine.name: engine for engine in (VLLM, SGLANG)}
_NAME, SIZE = f"{ROLLOUT}.name", ENGINE_SIZE
ELSEWHERE = ("trtllm", "dynamo")
"""Engines that verl has, too."""


def longest_row(engine: str, engine_kwargs: Mapping[str, Any], longest: int) -> int:
    """Tokens of the rows that an engine of another package is made for, in a run whose own have so many."""
    known = OUTSIDE[engine]
    return known.given(engine_kwargs).get(known.length) or longest


def check(checked: Checked) -> Iterator[Finding]:
    """`engine_kwargs`, and settings that only one engine follows."""
    if hasattr(checked.config, "actor_rollout_ref"):  # supervised training has no rollout
        yield from _check_native_settings(checked)
        yield from _check_server_settings(checked)
        yield from _check_stages(checked)
        yield from _check_engine_kwargs(checked)


def _check_native_settings(checked: Checked) -> Iterator[Finding]:
    rollout, trainer = checked.config.actor_rollout_ref.rollout, checked.config.trainer
    others = [name for name in ROLLOUT_ENGINES if name != "native"]  # an engine of the user's own may read them
    for name in ("quantization", "speculation"):
        key, value = f"{ROLLOUT}.{name}", getattr(rollout, name)
        if value is not None and rollout.name in others:
            what = f"`{key}={value}` is built for the engine native, and rollout.name={rollout.name}."
            yield checked.problem(what, f"set {ROLLOUT}.name=native, or remove it", key)
    if rollout.speculation == "epochs" and trainer.deterministic and not trainer.exact:
        key = f"{ROLLOUT}.speculation"
        what = (
            f"`{key}=epochs` with trainer.deterministic=True: a resumed run lacks the responses of earlier epochs, "
            "computes tokens in other passes, and may round otherwise."
        )
        yield checked.problem(what, f"set {key}=batch, or trainer.exact=True", key, "trainer.deterministic")
    if rollout.speculation == "epochs" and trainer.replay_events is not None and continues_responses(trainer):
        key = f"{ROLLOUT}.speculation"
        what = (
            f"`{key}=epochs` with trainer.replay_events: after a checkpoint an engine may lack the responses "
            "of earlier epochs, and makes other steps: weights would not arrive where they did."
        )
        do = "record and replay the run with {key}=batch, or remove trainer.replay_events: the run has its own timing"
        yield checked.problem(what, do.format(key=key), key, "trainer.replay_events")


def _check_server_settings(checked: Checked) -> Iterator[Finding]:
    """Addresses, and the one worker that speaks with all servers."""
    rollout, url_key = checked.config.actor_rollout_ref.rollout, f"{ROLLOUT}.server.url"
    if rollout.name != "server":
        return
    if not rollout.server.url:
        what = f"`{_NAME}=server` generates in other processes, and there is no address."
        yield checked.problem(what, f"set {url_key}=[http://HOST:PORT], one or several", _NAME)
    for url in rollout.server.url:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            what = f"`{url_key}={url}` is no address."
            yield checked.problem(what, "give one such as http://127.0.0.1:8000", url_key)
    if (workers := generating_workers_of(checked.config)) > 1:
        what = f"`{_NAME}=server`: one worker speaks with all servers, and here {workers} would."
        yield checked.problem(what, f"set {COLOCATED_WORKERS}=1 (all workers train nevertheless)", _NAME)


def _check_stages(checked: Checked) -> Iterator[Finding]:
    """Engines that cannot be cut by their layers; one of the user's own may be."""
    rollout, able = checked.config.actor_rollout_ref.rollout, [name for name in OUTSIDE if OUTSIDE[name].by_stages]
    stages, name = rollout.pipeline_model_parallel_size, rollout.name
    if stages > 1 and name in ROLLOUT_ENGINES and name not in able:
        what = f"`{ENGINE_STAGES}={stages}`: an engine `{name}` cannot be cut into stages by its layers."
        by_matrices = f"{ENGINE_SIZE} cuts its matrices, or " if name == "native" else ""
        do = f"set {ENGINE_STAGES}=1 ({by_matrices}{_NAME}={', '.join(able)} has stages)"
        yield checked.problem(what, do, ENGINE_STAGES, _NAME)


def _check_engine_kwargs(checked: Checked) -> Iterator[Finding]:
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
        elif engine in OUTSIDE:
            yield from _of_outside(checked, OUTSIDE[engine], given_for(engine, rollout.engine_kwargs))
        elif engine in ("native", "hf", "server") and given:
            what = f"`{KEY}.{engine}`: this engine has no arguments of its own."
            yield _problem(checked, what, f"set those of {ROLLOUT}")
    if idle:
        verb = "has" if len(idle) == 1 else "have"
        yield f"{', '.join(idle)} {verb} no effect with {ROLLOUT}.name={rollout.name}."


def _of_outside(checked: Checked, engine: OutsideEngine, given: Mapping[str, Any]) -> Iterator[Finding]:
    """What is wrong whatever the engine's version."""
    for what, do in engine.faults(given):
        yield _problem(checked, what, do)
    data, length = checked.config.data, given.get(engine.length)
    longest = data.max_prompt_length + data.max_response_length
    if length is not None and is_count(length) and length < longest:
        what = f"`{engine.key}.{engine.length}={length}`: rows may have {longest} tokens (data.max_prompt_length + "
        what += "data.max_response_length)."
        yield _problem(checked, what, f"set it to {longest} or more, leave it out, or make rows shorter")
    if runs_on_cpu(checked.config):
        for name in engine.on_cpu.keys() & given.keys():
            if given[name] != engine.on_cpu[name]:
                so = f"on a CPU {engine.title} runs with {engine.on_cpu[name]}"
                yield f"{engine.key}.{name}={given[name]} has no effect: {so}."


def check_environment(resolved: Resolved, folder: Path) -> Iterator[Problem]:
    """An engine that is not installed or has no such argument, and devices that it cannot be spread over."""
    if hasattr(resolved.config, "actor_rollout_ref"):
        yield from _check_installed(resolved)
        yield from check_on_any_machine(resolved)
        yield from check_splitting(resolved, folder)


def _check_installed(resolved: Resolved) -> Iterator[Problem]:
    engine = OUTSIDE.get(resolved.value(_NAME))
    if engine is None:
        return
    if not engine.is_installed():
        what = f"`{_NAME}={engine.name}`: the package {engine.name} is not installed in this environment."
        yield Problem(what, resolved.where(_NAME), engine.install)
    elif (given := engine.given(resolved.value(KEY))) and (known := engine.installed_arguments()) is not None:
        yield from (Problem(what, source_of(resolved.where(KEY)), do) for what, do in engine.unknown(given, known))


def check_on_any_machine(resolved: Resolved) -> Iterator[Problem]:
    """How engines are spread over workers; `posttrain plan` may ask this for another machine than this one."""
    name, parallel = resolved.value(_NAME), SIZE
    size, where = resolved.value(parallel), resolved.where(parallel)
    if name in OUTSIDE and not OUTSIDE[name].by_teams:  # whatever the size, it is 1 there
        if size > 1:
            what = (
                f"`{parallel}={size}`: a {OUTSIDE[name].title} engine over several devices is not built; every worker "
            )
            what += "has one of its own, with the whole model in it."
            do = f"set {parallel}=1 (`posttrain plan` says whether a device holds the model), or {_NAME}=native"
            yield Problem(what, where, do)
        return
    training = ("trainer.n_gpus_per_node", "trainer.nnodes")
    keys = next(((key,) for key in (ROLLOUT_WORKERS, COLOCATED_WORKERS) if resolved.value(key)), training)
    counts = [resolved.value(key) for key in keys]
    stages = resolved.value(ENGINE_STAGES)
    if size > 0 and stages > 0 and math.prod(counts) % (size * stages):
        product = f"{' x '.join(map(str, counts))} = {math.prod(counts)}" if len(counts) > 1 else str(counts[0])
        what = f"`{parallel}={size}`"
        if stages > 1:
            what, where = f"{what} x `{ENGINE_STAGES}={stages}`", resolved.where(ENGINE_STAGES)
        do = f"set a divisor of {' x '.join(keys)}"
        yield Problem(f"{what} does not divide the {product} worker(s).", where, do)
    elif size > 1 and name in ("hf", "server"):
        what = f"`{parallel}={size}`: an engine `{name}` cannot be held by several workers; each has one of its own."
        yield Problem(what, where, f"set {parallel}=1, or {_NAME}=native")


def check_splitting(resolved: Resolved, folder: Path) -> Iterator[Problem]:
    """Models that workers cannot hold one `native` engine of, known from their config.json alone."""
    size, path = resolved.value(SIZE), resolved.value(f"{MODEL}.path")
    if resolved.value(_NAME) != "native" or size < 2 or path in (None, "embedded"):
        return
    from posttrain.models.decodable import KNOWN  # which imports torch
    from posttrain.models.model_files import model_type_of
    from posttrain.rollout.native.build import splitting_problem

    kind = model_type_of(str(path), folder)
    if kind is not None and kind not in KNOWN:
        what, do = splitting_problem(kind, size)
        yield Problem(f"{what}.", resolved.where(SIZE), do, (SIZE,))


def source_of(where: str) -> str:
    """Where the dict was set, without the one key that was written last."""
    return where.partition(", written `")[0]


def _problem(checked: Checked, what: str, do: str) -> Problem:
    return Problem(what, source_of(checked.where(KEY)), do, (KEY,))
