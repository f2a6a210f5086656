"""verl's ResourcePoolManager as numbers of workers: each role is on the workers that train, or on its own."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from posttrain.config.resolved import Resolved
from posttrain.config.schema import lookup, nest
from posttrain.config.trainer import ROLES, workers_of
from posttrain.errors import UserError
from posttrain.trainer.run.entry import as_resolved
from verl.single_controller.ray import ResourcePoolManager
from verl.trainer.ppo.utils import Role

_TRAIN = (Role.ActorRolloutRef, Role.ActorRollout, Role.Actor)
_ROLES = {
    Role.Rollout: "rollout",
    Role.RewardModel: "reward_model",
    Role.Critic: "critic",
    Role.RefPolicy: "reference",
}


def resolve_with_pools(config: Any, manager: Any) -> Resolved:
    """The checked settings, with the workers of the manager's pools where the settings name none. UserError where the
    two disagree, or where posttrain has no such pools."""
    resolved = as_resolved(config)
    if manager is None:
        return resolved
    differing = _differing(resolved, manager)
    if differing and isinstance(config, Mapping) and not differing.keys() & set(resolved.explicit):
        resolved = as_resolved(nest(differing, copy.deepcopy(dict(config))))
        differing = _differing(resolved, manager)
    if differing:
        raise _error("asks for other workers than the settings", " ".join(f"{k}={v}" for k, v in differing.items()))
    return resolved


def _differing(resolved: Resolved, manager: Any) -> dict[str, int]:
    """Settings that the pools ask for and the configuration does not have."""
    config, pools, mapping = resolved.config, *_parts(manager)
    train = next((mapping[role] for role in _TRAIN if role in mapping), None)
    if train is None:
        raise _error("names no pool for Role.ActorRollout", "name one in `mapping`")
    if strange := [role for role in mapping if role not in (*_TRAIN, *_ROLES)]:
        raise _error(f"has a pool for {strange[0]!r}, a role that runs do not have", "take it out of `mapping`")
    if missing := [name for name in mapping.values() if name not in pools]:
        raise _error(f"puts a role in the pool {missing[0]!r}, which is none", f"choose one of {', '.join(pools)}")
    sizes = pools[train]
    if len(set(sizes)) != 1:
        raise _error(f"gives machines different numbers of processes ({train}: {sizes})", "give each as many")
    wanted = {}
    if sum(sizes) != workers_of(config):
        wanted |= {"trainer.nnodes": len(sizes), "trainer.n_gpus_per_node": sizes[0]}
    owners = dict[str, Any]()
    for role, pool in mapping.items():
        own = ROLES.get(_ROLES.get(role, ""))
        if own is None or not own.is_used(config):
            continue
        if pool != train and (other := owners.setdefault(pool, role)) is not role:
            raise _error(
                f"puts {other!r} and {role!r} together in {pool}, apart from the policy",
                "put them in the policy's pool, or in one each",
            )
        wanted[own.key] = 0 if pool == train else sum(pools[pool])
    return {key: value for key, value in wanted.items() if lookup(config, key) != value}


def _parts(manager: Any) -> tuple[dict[str, list[int]], dict[Any, str]]:
    try:
        pools = {str(name): [int(size) for size in sizes] for name, sizes in manager.resource_pool_spec.items()}
        mapping = dict(manager.mapping)
    except (AttributeError, TypeError, ValueError):
        raise _error(f"is {manager!r}", "give a ResourcePoolManager(resource_pool_spec, mapping)") from None
    for name in ("create_resource_pool", "get_resource_pool"):
        if getattr(type(manager), name, None) is not getattr(ResourcePoolManager, name):
            raise _error(
                f"is a {type(manager).__name__} with a `{name}` of its own, which nothing calls",
                "give a ResourcePoolManager; posttrain places its pools itself (docs/workers_in_operation.md)",
            )
    return pools, mapping


def _error(problem: str, way: str) -> UserError:
    return UserError(
        f"the resource pool manager {problem}\n  set in: RayPPOTrainer(resource_pool_manager=...)\n  to do:  {way}"
    )
