"""The tree of a PPO-family run, `ppo_trainer`."""

from __future__ import annotations

from posttrain.config.aliases import PPO_SPELLINGS
from posttrain.config.check import check
from posttrain.config.commandline import no_arguments
from posttrain.config.derived import derive
from posttrain.config.effects import idle_settings_of_ppo
from posttrain.config.names import check_names
from posttrain.config.root import PPOConfig
from posttrain.config.tree import Tree

PPO = Tree(
    main="ppo_trainer",
    root=PPOConfig,
    model="actor_rollout_ref.model",
    spellings=PPO_SPELLINGS,
    nothing_given=no_arguments,
    derive=derive,
    check_names=check_names,
    check=check,
    idle=idle_settings_of_ppo,
)
