"""Classes that score whole batches by name, chosen by `reward_model.reward_manager=NAME`."""

from typing import Any

from verl._managers_by_name import make_lookup, make_register

REWARD_MANAGER_REGISTRY: dict[str, Any] = {}
register = make_register(REWARD_MANAGER_REGISTRY, "Reward manager")
get_reward_manager_cls = make_lookup(REWARD_MANAGER_REGISTRY)
