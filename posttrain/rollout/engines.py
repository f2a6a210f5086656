"""Rollout engines by the name in `actor_rollout_ref.rollout.name`, built from a model or from its folder.

A maker is registered under a name and gives the engine with its name and version, or says why it cannot serve this
model. Whatever it gives is proved before it is used; `hf` serves where another engine does not.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

from posttrain.config.model import ModelConfig
from posttrain.config.rollout import RolloutConfig
from posttrain.config.trainer import ENGINE_STAGES
from posttrain.errors import UserError
from posttrain.kernels.tensor_parallel import Team
from posttrain.models.decoder import FastDecoder
from posttrain.models.forward import row_log_probs
from posttrain.models.loading import load_causal_lm, resolve_dtype
from posttrain.models.paged_decoder import PagedDecoder
from posttrain.models.proof import agree, proof_rows
from posttrain.models.shards import KEY
from posttrain.registry import Registry
from posttrain.rollout.base import RolloutEngine, Sampling
from posttrain.rollout.generate import generate
from posttrain.rollout.hf import MODES, HFEngine
from posttrain.rollout.native.build import build_native, can_run_native, use_fp8
from posttrain.rollout.server.engine import connect_servers
from posttrain.rollout.sglang.build import build_sglang
from posttrain.rollout.vllm.build import build_vllm


@dataclass(frozen=True)
class Order:
    """What an engine is made from. It decodes on `device`, where the weights are while it works (None: where they are
    now), rows of at most `longest` tokens (None: not known yet)."""

    config: RolloutConfig
    module: torch.nn.Module
    tokenizer: Any
    device: torch.device | None
    longest: int | None = None
    team: Team | None = None
    """Ranks that hold the engine together, each a part of the model, and do all steps at once."""
    exact: bool = False
    """Whether log-probs must have the bits that a training pass gives them."""

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


Made = tuple[RolloutEngine, str]
Maker = Callable[[Order], Made | str]
ENGINES: Registry[Maker] = Registry("rollout engine")
"""Name -> maker: an engine that was proved, with its name and version; or why there is none for this model."""


_BY_TEAMS: set[str] = set()  # engines that several workers can hold together
_BY_STAGES: set[str] = set()  # ... and these can hold some of its layers each
# Engines that can compute LoRA adapters beside a base of their own, and whether several workers can together.
_WITH_ADAPTERS: dict[str, bool] = {}


def register_engine(
    name: str,
    *,
    by_teams: bool = False,
    by_stages: bool = False,
    with_adapters: bool = False,
    adapters_by_teams: bool = False,
) -> Callable[[Maker], Maker]:
    """Makes an engine known under a name; one that is taken already is an error. `by_teams`: several workers can hold
    one together, and then its maker gets an order with a `team`; `by_stages`: some of its layers each, as
    `config.pipeline_model_parallel_size` says, with the ranks of the first stage first. `with_adapters`: where the
    policy has LoRA adapters, the order's module has them too, and the engine may set `takes_adapters`;
    `adapters_by_teams`: with a team, too."""
    if by_teams:
        _BY_TEAMS.add(name)
    if by_stages:
        _BY_STAGES.add(name)
    if with_adapters or adapters_by_teams:
        _WITH_ADAPTERS[name] = adapters_by_teams
    return ENGINES.register(name)


def can_take_adapters(name: str, ranks: int = 1) -> bool:
    """Whether the engine of this name, held by so many workers, wants a model with adapters, where the policy has
    them."""
    return name in _WITH_ADAPTERS and (ranks == 1 or _WITH_ADAPTERS[name])


def check_engine_name(name: str) -> None:
    """Reject an unregistered name; a user's module, which may register one, has been imported before."""
    if name not in ENGINES:
        raise UserError(
            f"actor_rollout_ref.rollout.name={name}: there is no such rollout engine; known: {', '.join(ENGINES)}. One "
            f'of your own is made known by @register_engine("{name}") in the module that '
            "actor_rollout_ref.model.external_lib names"
        )


def build_engine(
    config: RolloutConfig,
    model: torch.nn.Module | str | os.PathLike[str],
    tokenizer: Any,
    *,
    device: torch.device | None = None,
    longest: int | None = None,
    team: Team | None = None,
    exact: bool = False,
) -> Made:
    """(the engine, its name and version). `model` is the trainer's own, whose weights the engine reads wherever these
    are moved, or a folder, which is loaded onto `device`. `longest` is the most tokens of a row. With a `team` it is in
    host memory: the engine copies this rank's part of it, and the rest is gone then. `exact` is for `native` alone."""
    check_engine_name(config.name)
    if (stages := config.pipeline_model_parallel_size) > 1 and config.name not in _BY_STAGES:
        raise UserError(
            f"{ENGINE_STAGES}={stages}: the engine {config.name} cannot be cut into stages by its layers; set it to 1, "
            "or actor_rollout_ref.rollout.name=vllm"
        )
    if team is not None and config.name not in _BY_TEAMS:
        raise UserError(
            f"{KEY}={team.size}: the engine {config.name} cannot be held by several workers; set it to 1, or "
            "actor_rollout_ref.rollout.name=native"
        )
    module = model if isinstance(model, torch.nn.Module) else _loaded(model, device or torch.device("cpu"))
    order = Order(config, module, tokenizer, device, longest, team, exact)
    notes: list[str] = []
    problem = ""
    for name in dict.fromkeys((config.name, "hf")):
        made = ENGINES[name](order)
        if not (isinstance(made, str) or (isinstance(made, tuple) and len(made) == 2)):
            raise UserError(
                f"The maker of the rollout engine {name} returned {type(made).__name__}.\n"
                '  to do:  return (engine, "its name and version"), or a text that says why it cannot serve this model'
            )
        if not isinstance(made, str):
            return made[0], "; ".join([made[1], *notes])
        problem = made
        if team is not None or exact:  # another engine would hold the whole model, or have other bits
            break
        notes.append(f"{name} is not used for {_kind(module)} models: {made}")
    raise UserError(
        f"actor_rollout_ref.rollout.name={config.name}: no engine generates with this model as it computes "
        f"({_kind(module)}): {problem}"
    )


def _loaded(folder: str | os.PathLike[str], device: torch.device) -> torch.nn.Module:
    model = ModelConfig(path=os.fspath(folder))
    return load_causal_lm(model, dtype=resolve_dtype(model.dtype, device), device=device).requires_grad_(False)


def _kind(module: Any) -> str:
    return module.config.model_type


@register_engine("native", by_teams=True, with_adapters=True)
def make_native(order: Order) -> Made | str:
    """posttrain's own."""
    if not can_run_native(order.module):
        return "it cannot answer their attention from its cache"
    given: dict[str, Any] = {"decode": order.decode, "device": order.device, "team": order.team}
    given |= {"exact": order.exact, "longest": order.longest}
    engine, name = build_native(order.module, order.config, **given)
    problem = why_wrong(engine, order.module)
    if problem is not None and isinstance(engine.decoder, PagedDecoder) and engine.decoder.captures:
        # Code of the module that waits for the device cannot be captured; token by token it may be right.
        engine, name = build_native(order.module, order.config, **given, captures=False)
        name, problem = f"{name}, steps not captured: {problem}", why_wrong(engine, order.module)
    if problem is None and isinstance(engine.decoder, FastDecoder) and order.team is not None:
        engine.decoder.drop_unsharded_weights()
    if problem is None and order.config.quantization == "fp8":  # proved first: rounding would hide an error
        name = use_fp8(engine, name)
    return problem or (engine, name)


@register_engine("hf", with_adapters=True)
def make_hf(order: Order) -> Made | str:
    """transformers, in the first of its ways that is right for this model."""
    problem = "there is no way through it"
    for mode, words in MODES.items():
        engine = HFEngine(
            order.module,
            pad_token_id=order.tokenizer.pad_token_id,
            max_num_seqs=order.config.max_num_seqs,
            decode=order.decode,
            mode=mode,
        )
        found = why_wrong(engine, order.module)
        if found is None:
            return engine, "; ".join([f"hf (transformers {version('transformers')})", *([words] if words else [])])
        problem = found
    return problem


@register_engine("vllm", by_teams=True, by_stages=True, with_adapters=True, adapters_by_teams=True)
def make_vllm(order: Order) -> Made | str:
    """vLLM, where it is installed."""
    return _made_outside(order, partial(build_vllm, team=order.team))


@register_engine("sglang")
def make_sglang(order: Order) -> Made | str:
    """SGLang, where it is installed."""
    return _made_outside(order, build_sglang)


@register_engine("server", with_adapters=True)
def make_server(order: Order) -> Made | str:
    """Engines in other processes, reached by their URLs."""
    engine, name = connect_servers(order.module, order.config, decode=order.decode, longest=order.longest)
    if (problem := why_wrong(engine, order.module)) is not None:  # no other engine is meant
        raise UserError(f"actor_rollout_ref.rollout.name=server: {name} does not generate as this model: {problem}")
    return engine, name


def _made_outside(order: Order, build: Callable[..., Any]) -> Made | str:
    """What is made room for an engine of another package with goes back if it does not serve."""
    place = next(order.module.parameters()).device
    made = build(order.module, order.config, decode=order.decode, device=order.device, longest=order.longest)
    if isinstance(made, str):
        return made
    if (problem := why_wrong(made[0], order.module)) is None:
        return made
    made[0].close()
    if next(order.module.parameters()).device != place:
        order.module.to(place)
    return problem


_PROOF_TOKENS = (1, 3, 2)  # of each response: rows end one after the other


@torch.no_grad()
def why_wrong(engine: RolloutEngine, module: torch.nn.Module) -> str | None:
    """None if short responses to two prompts, one of them twice, have the log-probs of a plain pass over them."""
    short, long = proof_rows(module.config)
    prompts = [short, long, long]
    try:
        outputs = generate(
            engine, prompts, [Sampling(max_tokens=count) for count in _PROOF_TOKENS], range(len(prompts))
        )
        engine.sleep()
        engine.wake()
        rows = [prompt + output.token_ids for prompt, output in zip(prompts, outputs, strict=True)]
        plain = zip(row_log_probs(module, rows), _PROOF_TOKENS, strict=True)
        expected = [log_probs[-count:] for log_probs, count in plain]
        found = [torch.tensor(output.log_probs, device=expected[0].device) for output in outputs]
        if not agree(torch.cat(found), torch.cat(expected), module):
            return "its log-probs are not those of the model"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model's own code may do with a cache; the engine is then thrown away
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None
