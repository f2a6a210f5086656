"""Rewards of a batch: the manager that a configuration names, and calling it."""

from __future__ import annotations

import functools
from typing import Any

import torch

from posttrain.algorithms.common import read_setting as setting
from verl.utils.reward_score import default_compute_score


def get_custom_reward_fn(config: Any) -> Any:
    """The function of custom_reward_function.path and .name (below `reward` too), with its reward_kwargs; or None."""
    section = setting(setting(config, "reward", None), "custom_reward_function", None)
    section = section if setting(section, "path", None) else setting(config, "custom_reward_function", None)
    path = setting(section, "path", None)
    if path is None:
        return None
    from verl.utils.import_utils import load_extern_object

    function = load_extern_object(path, setting(section, "name", "compute_score"))
    further = dict(setting(section, "reward_kwargs", {}) or {})
    return functools.partial(function, **further) if further else function


def resolve_reward_manager_cls(config: Any) -> Any:
    """The class that the configuration names: registered under a name, or in a file (source: importlib)."""
    section = setting(setting(config, "reward", None), "reward_manager", None) or setting(
        config, "reward_manager", None
    )
    name = setting(setting(config, "reward_model", None), "reward_manager", None)
    if section is not None and not isinstance(section, str):
        name = setting(section, "name", name)
        if setting(section, "source", "register") == "importlib":
            from verl.utils.import_utils import load_extern_object

            return load_extern_object(setting(section, "module", {}).get("path"), name)
    from verl.workers.reward_manager import get_reward_manager_cls

    return get_reward_manager_cls(section if isinstance(section, str) else name or "naive")


def load_reward_manager(config: Any, tokenizer: Any, num_examine: int = 0, **reward_kwargs: Any) -> Any:
    """The reward manager of a configuration, with its score function and tokenizer."""
    score = get_custom_reward_fn(config) or default_compute_score
    key = setting(setting(config, "data", None), "reward_fn_key", "data_source")
    return resolve_reward_manager_cls(config)(
        tokenizer=tokenizer, num_examine=num_examine, compute_score=score, reward_fn_key=key, **reward_kwargs
    )


def compute_reward(data: Any, reward_fn: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """(rewards of the tokens, what else the manager measured, by name)."""
    try:
        result = reward_fn(data, return_dict=True)
    except TypeError as error:
        if "return_dict" not in str(error):
            raise
        return reward_fn(data), {}
    if isinstance(result, dict):
        return result["reward_tensor"], result.get("reward_extra_info", {})
    return result, {}


def compute_reward_async(data: Any, config: Any = None, tokenizer: Any = None, reward_fn: Any = None) -> Any:
    """As `compute_reward`, at once: `compute_reward_async.remote(...)` is what `ray.get` takes, too."""
    if reward_fn is None:
        further = setting(setting(config, "reward_model", None), "reward_kwargs", {}) or {}
        reward_fn = load_reward_manager(config, tokenizer, **further)
    return compute_reward(data, reward_fn)


def _remote(*args: Any, **kwargs: Any) -> Any:
    import ray

    from verl.single_controller.ray.base import ensure_ray

    ensure_ray(1)
    return ray.remote(compute_reward_async.plain).remote(*args, **kwargs)  # pyright: ignore


compute_reward_async.plain = compute_reward_async  # pyright: ignore
compute_reward_async.remote = _remote  # pyright: ignore


def extract_reward(batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """The scores that a batch has already, and what was measured beside them."""
    extra = {name: batch.non_tensor_batch[name] for name in batch.meta_info.get("reward_extra_keys", [])}
    return batch.batch["rm_scores"], extra
