"""Subclasses of RewardManagerBase by name, chosen by `reward.reward_manager.name=NAME`."""

from typing import Any

from verl._managers_by_name import make_lookup, make_register

REWARD_MANAGER: dict[str, Any] = {}
register, get_reward_manager_cls = make_register(REWARD_MANAGER, "reward manager"), make_lookup(REWARD_MANAGER)
