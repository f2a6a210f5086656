"""verl's decorators: what they register is found by verl's functions, and trains in posttrain by its name.

verl calls an estimator with the batch's tensors, and a policy loss for a micro-batch, whose result is that part's share
of one number. posttrain calls what stands here, which hands over what verl's function expects.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from posttrain.algorithms import registry as ours
from posttrain.algorithms.common import keep_masked
from posttrain.algorithms.registry import EstimatorDeclaration, LossDeclaration
from posttrain.registry import is_same_definition, name_of

ADV_ESTIMATOR_REGISTRY: dict[str, Any] = {}
POLICY_LOSS_REGISTRY: dict[str, Any] = {}
_ADDRESS = "verl.trainer.ppo.core_algos"


def _registry(name: str) -> dict[str, Any]:
    """The registry that stands at verl's address: code written for verl may have put another dict there."""
    return getattr(sys.modules.get(_ADDRESS), name, globals()[name])


class AdvantageEstimator(str, Enum):  # noqa: UP042  (str() of a member is verl's)
    """verl's estimators."""

    GAE = "gae"
    GRPO = "grpo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    OPO = "opo"
    GRPO_PASSK = "grpo_passk"
    GPG = "gpg"
    RLOO_VECTORIZED = "rloo_vectorized"
    GRPO_VECTORIZED = "grpo_vectorized"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"
    GDPO = "gdpo"


def register_adv_est(name_or_enum: str | Enum) -> Callable[[Any], Any]:
    """Decorator: `algorithm.adv_estimator=NAME`. A name that another function has is an error."""

    def decorate(function: Any) -> Any:
        name = name_of(name_or_enum)
        registry = _registry("ADV_ESTIMATOR_REGISTRY")
        known = registry.get(name)
        if known not in (None, function) and not is_same_definition(known, function):
            raise ValueError(f"Adv estimator {name} has already been registered: {known} vs {function}")
        registry[name] = function
        ours.ADV_ESTIMATORS[name] = _trained_estimator(name, function)
        return function

    return decorate


def get_adv_estimator_fn(name_or_enum: str | Enum) -> Any:
    """The estimator, with verl's signature."""
    name = name_of(name_or_enum)
    registry = _registry("ADV_ESTIMATOR_REGISTRY")
    if name not in registry:  # verl's own words first: code may look for them
        raise ValueError(f"Unknown advantage estimator simply: {name}. Known: {', '.join(sorted(registry))}")
    return registry[name]


def register_policy_loss(name: str) -> Callable[[Any], Any]:
    """Decorator: `actor_rollout_ref.actor.policy_loss.loss_mode=NAME`. A later function takes the name over."""

    def decorate(function: Any) -> Any:
        _registry("POLICY_LOSS_REGISTRY")[name] = function
        ours.POLICY_LOSSES[name] = _trained_loss(name, function)
        return function

    return decorate


def get_policy_loss_fn(name: str) -> Any:
    """The policy loss, with verl's signature."""
    registry = _registry("POLICY_LOSS_REGISTRY")
    if name not in registry:
        raise ValueError(f"Unsupported loss mode: {name}. Supported modes are: {list(registry)}")
    return registry[name]


def known_estimator(name: str, function: Any) -> None:
    """An estimator that posttrain has under the same name: verl's functions find the one with verl's signature."""
    ADV_ESTIMATOR_REGISTRY[name] = function


def known_loss(name: str, function: Any) -> None:
    POLICY_LOSS_REGISTRY[name] = function


# -- how posttrain calls them -----------------------------------------------------------------------------------------


def _trained_estimator(name: str, function: Any) -> EstimatorDeclaration:
    """The estimator as posttrain calls it. What it needs beyond the batch is read from its parameters."""
    names = set(inspect.signature(function).parameters)

    @functools.wraps(function)
    def estimate(**offered: Any) -> tuple[torch.Tensor, torch.Tensor]:
        from verl._added import added_to
        from verl.trainer.config import AlgoConfig

        if offered.get("config") is not None:
            offered["config"] = AlgoConfig.of(offered["config"], **added_to("algorithm."))
        if names & {"batch", "non_tensor_batch", "data"}:
            offered |= _whole_batch(offered["data"])
        taken = offered if _takes_all(function) else {name: offered[name] for name in names & offered.keys()}
        advantages, returns = function(**taken)
        mask = offered["response_mask"]
        return keep_masked(advantages, mask), keep_masked(returns, mask)

    _open_signature(estimate, function)
    return EstimatorDeclaration(  # not `compares_group`: it may live with rollout.n=1
        name,
        estimate,
        needs_critic="values" in names,
        needs_greedy_baseline="reward_baselines" in names,
        needs_sum_pi_squared="sum_pi_squared" in names,
    )


def _trained_loss(name: str, function: Any) -> LossDeclaration:
    """The loss as posttrain calls it: `counts` tell the whole mini-batch, and what it gives is its part's share."""

    @functools.wraps(function)
    def lose(*, config: Any, counts: dict[str, Any], response_mask: torch.Tensor, **offered: Any) -> Any:
        from verl.workers.config import actor_view

        view = actor_view(config, batch_info(counts))
        given = {"config": view, "response_mask": response_mask, **offered}
        names = inspect.signature(function).parameters
        taken = given if _takes_all(function) else {name: value for name, value in given.items() if name in names}
        loss, metrics = _first_and_metrics(function(**taken))
        if loss.ndim == 0 and not view._counts_read:
            # It divided by its own part's count: weigh it by its share of the tokens.
            loss = loss * response_mask.sum() / max(counts["total_tokens"], 1)
        return loss, metrics

    _open_signature(lose, function, "counts", "config", "rollout_is_weights")
    return LossDeclaration(name, lose)


def batch_info(counts: dict[str, Any]) -> dict[str, Any]:
    """posttrain's counts under the names of verl's `agg_loss`."""
    return {
        "dp_size": 1,
        "batch_num_tokens": counts["total_tokens"],
        "global_batch_size": counts["total_rows"],
        "loss_scale_factor": counts["loss_scale_factor"],
    }


def _first_and_metrics(result: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """verl 0.7's losses gave (loss, clip share, KL, lower clip share); later ones (loss, metrics)."""
    if not isinstance(result, tuple):
        return result, {}
    if len(result) == 2 and isinstance(result[1], dict):
        return result
    names = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
    return result[0], {name: value for name, value in zip(names, result[1:], strict=False)}


def _whole_batch(data: Any) -> dict[str, Any]:
    from verl._rows import to_verl

    whole = to_verl(data)
    parts = data.non_tensor_batch.get("reward_parts")
    for name in {name for part in (parts if parts is not None else ()) for name in part or {}}:
        whole.non_tensor_batch.setdefault(name, _column(parts, name))
    return {"data": whole, "batch": whole.batch, "non_tensor_batch": whole.non_tensor_batch}


def _column(parts: Any, name: str) -> Any:
    from posttrain.batch.fields import object_array

    return object_array([(part or {}).get(name) for part in parts])


def _takes_all(function: Any) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def _open_signature(wrapper: Any, function: Any, *further: str) -> None:
    """Ours offers by name what a signature asks for: the function's own names, `further` ones, and everything else."""
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=p.default) for p in own]
    new = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in further if name not in {p.name for p in own}
    ]
    rest = inspect.Parameter("offered", inspect.Parameter.VAR_KEYWORD)
    wrapper.__signature__ = inspect.Signature([*own, *new, rest])
