"""Reward managers whose `run_single` scores one response."""

from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager
from verl.experimental.reward_loop.reward_manager.gdpo import GDPORewardManager
from verl.experimental.reward_loop.reward_manager.limited import RateLimitedRewardManager
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.experimental.reward_loop.reward_manager.registry import get_reward_manager_cls, register

__all__ = [
    "DAPORewardManager",
    "GDPORewardManager",
    "NaiveRewardManager",
    "RateLimitedRewardManager",
    "get_reward_manager_cls",
    "register",
]
