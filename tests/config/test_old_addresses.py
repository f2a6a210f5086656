"""Addresses that modules had before they were merged with others."""

from __future__ import annotations

import importlib

import pytest

from posttrain.moved import MOVED

OFFERED = {  # what users' files may import from them
    "posttrain.config.data": ("DataConfig", "HELD_OUT"),
    "posttrain.config.reward": ("CustomRewardConfig", "RewardConfig", "RewardModelConfig", "SandboxConfig"),
    "posttrain.conversations.batch": ("begin_conversations", "join_rows", "reward_info"),
    "posttrain.other_systems.verl.algorithm": ("ALGORITHM", "ALGORITHM_RULES", "DATA", "REWARDS"),
    "posttrain.other_systems.verl.written": ("ON", "given", "is_empty", "number", "refuse"),
    "posttrain.other_systems.verl_script.report": ("ASSUMED", "Report", "TREES", "as_text", "examine"),
    "posttrain.rollout.proof": ("why_wrong",),
    "posttrain.rollout.settings": ("sampling_for", "sampling_words"),
    "posttrain.trainer.config.algorithm": ("AlgorithmConfig",),
}


@pytest.mark.parametrize("old", MOVED)
def test_a_module_is_found_at_its_old_address(old):
    module = importlib.import_module(old)
    assert module is importlib.import_module(MOVED[old])
    assert [name for name in OFFERED.get(old, ()) if not hasattr(module, name)] == []


def test_config_offers_its_names_to_a_star_import():
    space: dict[str, object] = {}
    exec("from posttrain.config import *", space)
    assert {"ConfigError", "PPOConfig", "Resolved", "check_environment", "load_config"} <= space.keys()
