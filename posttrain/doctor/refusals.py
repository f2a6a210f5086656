"""What a run refuses of its settings and its model before it trains, asked without starting it.

The checks are the run's own. What depends on the machine (files, packages, devices) is no part of it: a plan may be for
another one.
"""

from __future__ import annotations

from typing import Any

from posttrain.algorithms import get_adv_estimator
from posttrain.config import PPOConfig
from posttrain.config.environment import check_on_any_machine
from posttrain.config.megatron import NAME as MEGATRON
from posttrain.config.megatron import megatron_settings
from posttrain.config.parallel import workers_of
from posttrain.config.problem import ConfigError
from posttrain.config.resolved import Resolved
from posttrain.engine.ranks import check_heads
from posttrain.models import cut
from posttrain.models.decoder import can_decode_fast
from posttrain.models.loading import check_positions, positions_of
from posttrain.planning.batch_sizes import check_group_size
from posttrain.planning.memory_plan import Device, ModelCounter
from posttrain.planning.supervised import ROLE
from posttrain.rollout.engines import check_engine_name
from posttrain.rollout.native.build import check_can_cut


def refuse_what_the_run_refuses(resolved: Resolved, device: Device, counter: ModelCounter) -> None:
    """Raises the run's own error."""
    config = resolved.config
    if not isinstance(config, PPOConfig):
        size, packed = config.fsdp.ulysses_sequence_parallel_size, config.model.use_remove_padding
        counter(config, device, ROLE, _check_heads, size, packed)
        return
    if problems := check_on_any_machine(resolved):
        raise ConfigError(problems)
    check_engine_name(config.actor_rollout_ref.rollout.name)
    counter(config, device, "actor", _Refusals(config))
    estimator = get_adv_estimator(config.algorithm.adv_estimator)
    if estimator.needs_critic:
        size, packed = config.critic.ulysses_sequence_parallel_size, config.critic.model.use_remove_padding
        counter(config, device, "critic", _check_heads, size, packed)
    if estimator.compares_group:
        check_group_size(config, resolved.explicit)


def _check_heads(module: Any, size: int, packed: bool) -> None:
    check_heads(module.config, size, packed=packed)


class _Refusals:
    """Of the actor's model, by the settings of its engines."""

    def __init__(self, config: PPOConfig) -> None:
        self.config = config

    def __call__(self, module: Any) -> None:
        actor, rollout, data = (
            self.config.actor_rollout_ref.actor,
            self.config.actor_rollout_ref.rollout,
            self.config.data,
        )
        if actor.strategy == MEGATRON:
            from posttrain.engine.megatron.places import Sizes, check_sizes
            from posttrain.engine.megatron.shapes import check_model

            sizes = Sizes.of(megatron_settings(actor.megatron_config))
            check_model(module.config, sizes)
            check_sizes(sizes, workers_of(self.config))
        else:
            packed = self.config.actor_rollout_ref.model.use_remove_padding
            check_heads(module.config, actor.ulysses_sequence_parallel_size, packed=packed)
        if rollout.name == "native" and rollout.tensor_model_parallel_size > 1:
            check_can_cut(module, can_decode_fast(module), rollout.tensor_model_parallel_size)
            cut.check_heads(module.config.get_text_config(), rollout.tensor_model_parallel_size)
        check_positions(positions_of(module), data.max_prompt_length + data.max_response_length)
