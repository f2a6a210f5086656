"""Connects to rollout servers, and compares their model with the trainer's before anything is generated."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import torch

from posttrain.config.rollout import RolloutConfig
from posttrain.models.forward import without_adapters
from posttrain.models.lora import has_adapters
from posttrain.rollout.outside import Weights, weights_of
from posttrain.rollout.server.engine import ServerEngine
from posttrain.rollout.server.link import KEY_VARIABLE, Link, ServerError
from posttrain.rollout.server.wire import Shapes, shapes_of, tied_names
from posttrain.rollout.vllm.adapters import base_and_adapters

URL = "actor_rollout_ref.rollout.server.url"


def connect_servers(
    module: torch.nn.Module,
    config: RolloutConfig,
    *,
    decode: Callable[[list[int]], str] | None,
    longest: int | None = None,
) -> tuple[ServerEngine, str]:
    """Connect to all servers and load the model's weights; returns (engine, its name). The servers must have the same
    model, and accept sequences of `longest` tokens."""
    if not config.server.url:
        raise ServerError(f"actor_rollout_ref.rollout.name=server needs the addresses of servers: set {URL}")
    key = os.environ.get(KEY_VARIABLE, "")
    links = [Link(url, key, config.server.timeout_s) for url in config.server.url]
    descriptions = [link.call("open", {"run": f"{socket.gethostname()}, process {os.getpid()}"}) for link in links]
    for link, one in zip(links, descriptions, strict=True):
        link.session = one["session"]
    takes_adapters = has_adapters(module) and all(one["takes_adapters"] for one in descriptions)
    weights = dict(base_and_adapters(module) if takes_adapters else weights_of(module))
    base_weights = {name: weight for name, weight in weights.items() if ".lora_" not in name}
    for link, one in zip(links, descriptions, strict=True):
        if problem := _first_difference(shapes_of(base_weights.items()), one["weights"]):
            raise ServerError(
                f"The rollout server {link.url} has another model ({one['model']}): {problem}.\n"
                "  to do:  start it with the model and the dtype of this run, or correct "
                f"{URL}"
            )
        if longest is not None and one["longest"] < longest:
            raise ServerError(
                f"The rollout server {link.url} takes sequences of {one['longest']} tokens, and those of this run may "
                f"have {longest}.\n  to do:  start it with --max-model-len {longest}, or shorten the data's lengths"
            )
    engine = ServerEngine(
        links,
        dtype=next(without_adapters(module).parameters()).dtype,
        decode=decode,
        takes_adapters=takes_adapters,
        tied=_tied_on_both_sides(base_weights, [set(one["tied"]) for one in descriptions]),
    )
    engine.load_weights(weights.items(), 0)
    at = ", ".join(f"{link.url}: {one['engine']}" for link, one in zip(links, descriptions, strict=True))
    return engine, f"server ({at}; {'adapters' if takes_adapters else 'weights'} pushed at every sync)"


def _tied_on_both_sides(base_weights: Mapping[str, torch.Tensor], theirs: list[set[str]]) -> set[str]:
    """Names that need not be sent. A weight that is tied only in the servers would be loaded twice, into one place."""
    ours, tied = set(tied_names(base_weights.items())), theirs[0]
    if any(one != tied for one in theirs) or tied - ours:
        raise ServerError(
            f"rollout servers tie {', '.join(sorted(set().union(*theirs)))} to another weight, and in this model it is "
            "untied (an adapter on the head does that).\n  to do:  leave the head out of model.target_modules"
        )
    return tied


def _first_difference(ours: Shapes, theirs: Shapes) -> str | None:
    """The first difference between two models; None if there is none."""
    for name, (dtype, shape) in ours.items():
        if name not in theirs:
            return f"it has no weight {name}"
        if theirs[name][1] != shape:
            return f"{name} has the shape {theirs[name][1]} there and {shape} here"
        if theirs[name][0] != dtype:
            return f"{name} is {theirs[name][0]} there and {dtype} here (--dtype {dtype})"
    return next((f"it has a weight {name}, and this model none" for name in theirs if name not in ours), None)


def describe(module: torch.nn.Module, *, model: str, longest: int) -> dict[str, Any]:
    """For the server, before its engine is created: the values that `connect_servers` compares."""
    weights: Weights = base_and_adapters(module) if has_adapters(module) else module.state_dict().items()
    base_weights = {name: weight for name, weight in weights if ".lora_" not in name}
    return {
        "model": model,
        "longest": longest,
        "weights": shapes_of(base_weights.items()),
        "tied": tied_names(base_weights.items()),
    }
