"""`actor_rollout_ref.rollout.engine_kwargs`: arguments of a rollout engine's own, as a free dict under its name.

    engine_kwargs: {vllm: {max_model_len: 4096, block_size: 32}}

Those of the engine that generates reach it; null is "not given". Which names an engine of another package knows only
that package can say: they are read from its source where it is installed. What posttrain itself decides is refused,
with the setting that decides it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.config.checked import Checked, Finding, nearest_name
from posttrain.config.choices import ROLLOUT_ENGINES
from posttrain.config.devices import runs_on_cpu
from posttrain.config.outside import KEY, ROLLOUT, OutsideEngine, given_for, is_count
from posttrain.config.problem import Problem
from posttrain.config.sglang import SGLANG
from posttrain.config.vllm import VLLM

OUTSIDE: dict[str, OutsideEngine] = {engine.name: engine for engine in (VLLM, SGLANG)}
ELSEWHERE = ("trtllm", "dynamo")
"""Engines that verl has, too."""


def can_generate(engine: str) -> bool:
    """Whether an engine of this name is built, and what it needs is installed."""
    return engine in ROLLOUT_ENGINES and (engine not in OUTSIDE or OUTSIDE[engine].is_installed())


def longest_row(engine: str, engine_kwargs: Mapping[str, Any], longest: int) -> int:
    """Tokens of the rows that an engine of another package is made for, in a run whose own have so many."""
    known = OUTSIDE[engine]
    return known.given(engine_kwargs).get(known.length) or longest


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
        elif engine in OUTSIDE:
            yield from _of_outside(checked, OUTSIDE[engine], given_for(engine, rollout.engine_kwargs))
        elif engine in ("native", "hf") and given:
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


def source_of(where: str) -> str:
    """Where the dict was set, without the one key that was written last."""
    return where.partition(", written `")[0]


def _problem(checked: Checked, what: str, do: str) -> Problem:
    return Problem(what, source_of(checked.where(KEY)), do, (KEY,))
