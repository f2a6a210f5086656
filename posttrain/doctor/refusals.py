"""What a run refuses of its settings and its model before it trains, asked without starting it.

The checks are the run's own. What depends on the machine (files, packages, devices) is no part of it: a plan may be for
another one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from posttrain.algorithms import get_adv_estimator
from posttrain.config import PPOConfig
from posttrain.config.environment import check_on_any_machine
from posttrain.config.parallel import workers_of
from posttrain.config.problem import ConfigError
from posttrain.config.resolved import Resolved
from posttrain.config.train_engines import RL, SUPERVISED
from posttrain.doctor.memory import Device, ModelCounter
from posttrain.doctor.supervised import ROLE
from posttrain.engine.registry import EngineLayout, engine_class, layout_of
from posttrain.models import cut
from posttrain.models.decoder import can_decode_fast
from posttrain.models.loading import check_positions, positions_of
from posttrain.rollout.engines import check_engine_name
from posttrain.rollout.native.build import _check_can_cut


def refuse_what_the_run_refuses(resolved: Resolved, device: Device, counter: ModelCounter) -> None:
    """Raises the run's own error."""
    config = resolved.config
    if not isinstance(config, PPOConfig):
        layout = layout_of(config, SUPERVISED, "model")
        counter(config, device, ROLE, partial(_check_model, config, layout, config.model.use_remove_padding))
        return
    if problems := check_on_any_machine(resolved):
        raise ConfigError(problems)
    check_engine_name(config.actor_rollout_ref.rollout.name)
    counter(config, device, "actor", _Refusals(config))
    estimator = get_adv_estimator(config.algorithm.adv_estimator)
    if estimator.needs_critic:
        layout = layout_of(config, RL, "critic")
        counter(config, device, "critic", partial(_check_model, config, layout, config.critic.model.use_remove_padding))
    if estimator.compares_group:
        from posttrain.trainer.ppo.sizes import check_group_size

        check_group_size(config, resolved.explicit)


def _check_model(config: Any, layout: EngineLayout, packed: bool, module: Any) -> None:
    engine_class(layout).check_model(module.config, layout, ranks=workers_of(config), packed=packed)


class _Refusals:
    """Of the actor's model, by the settings of its engines."""

    def __init__(self, config: PPOConfig) -> None:
        self.config = config

    def __call__(self, module: Any) -> None:
        rollout, data = self.config.actor_rollout_ref.rollout, self.config.data
        packed = self.config.actor_rollout_ref.model.use_remove_padding
        _check_model(self.config, layout_of(self.config, RL, "actor"), packed, module)
        if rollout.name == "native" and rollout.tensor_model_parallel_size > 1:
            _check_can_cut(module, can_decode_fast(module), rollout.tensor_model_parallel_size)
            cut.check_heads(module.config.get_text_config(), rollout.tensor_model_parallel_size)
        check_positions(positions_of(module), data.max_prompt_length + data.max_response_length)
