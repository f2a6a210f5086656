"""Building blocks of the workers: engines for each role, made from the configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from posttrain.config.root import FSDPConfig, OptimConfig, PPOConfig
from posttrain.engine.base import EngineSettings, TrainEngine
from posttrain.engine.registry import build_train_engine, layout_of, loading_device
from posttrain.engine.settings import RL
from posttrain.models.decodable import check_exact
from posttrain.models.forward import ValueModel
from posttrain.models.loading import ModelError, load_causal_lm, resolve_dtype
from posttrain.models.lora import add_adapters, with_adapters
from posttrain.models.routing import check_routes
from posttrain.rollout.engines import can_take_adapters


def pick_device(name: str) -> torch.device:
    """The device of `trainer.device`; `auto` is CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def actor_engine(config: PPOConfig, device: torch.device, total_steps: int) -> TrainEngine:
    """The trained policy, with adapters if `model.lora_rank` asks for them."""
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    module = _language_model(config, device, quantization=model.quantization)
    if model.lora_rank > 0:
        module = with_adapters(module, model)
    if config.trainer.exact:
        check_exact(module, device)
    settings = _settings(config, device, actor, actor.optim, actor.fsdp_config, total_steps)
    replay, coefficient = actor.router_replay.mode, actor.router_aux_loss_coef
    if replay != "disabled":
        check_routes(module, f"actor_rollout_ref.actor.router_replay.mode={replay}")
    settings = replace(
        settings,
        exact=config.trainer.exact,
        fp8=actor.quantization == "fp8",
        replay_routes=replay != "disabled",
        record_routes=replay == "R2",
        balance_load=coefficient > 0,
    )
    return build_train_engine(module, settings, layout_of(config, RL, "actor"))


def reference_engine(config: PPOConfig, device: torch.device) -> TrainEngine:
    """A frozen copy of the policy as it was at the start."""
    actor, ref = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref
    # Sharded as the actor, so that both plan the same passes; only whether it is offloaded is its own setting.
    place = replace(actor.fsdp_config, param_offload=ref.fsdp_config.param_offload)
    settings = replace(_settings(config, device, actor, None, place, 1), exact=config.trainer.exact)
    return build_train_engine(_language_model(config, device), settings, layout_of(config, RL, "actor"))


def critic_engine(config: PPOConfig, device: torch.device, total_steps: int) -> TrainEngine:
    """A value model that starts from the critic's model, or from the actor's; a base that is trained has no 4 bits."""
    critic = config.critic
    # 4-bit weights have no gradient, so that a critic without adapters is loaded whole.
    held = config.actor_rollout_ref.model.quantization if critic.model.lora_rank > 0 else None
    module: torch.nn.Module = _language_model(config, device, path=critic.model.path, quantization=held, headless=True)
    if critic.model.lora_rank > 0:
        module = add_adapters(module, critic.model, role="critic.").get_base_model()  # pyright: ignore
    module = ValueModel(module)
    settings = _settings(config, device, critic, critic.optim, critic.fsdp_config, total_steps)
    checkpointing = critic.model.enable_gradient_checkpointing
    if checkpointing is None:
        checkpointing = settings.gradient_checkpointing
    settings = replace(settings, pack=critic.model.use_remove_padding, gradient_checkpointing=checkpointing)
    return build_train_engine(module, settings, layout_of(config, RL, "critic"))


def rollout_model(config: PPOConfig, device: torch.device) -> torch.nn.Module:
    """A whole model of this process's own, to decode with where the trained one is cut over ranks. Where several hold
    an engine it stays in host memory (mapped, if its file is in the model's type): they take their parts from there."""
    model, policy = _language_model(config, device), config.actor_rollout_ref.model
    beside = policy.lora_rank > 0 and can_take_adapters(config.actor_rollout_ref.rollout.name, engine_ranks(config))
    if beside and policy.quantization is None:  # a 4-bit base is not the same as this one, which is loaded whole
        model = with_adapters(model, policy)
    model.requires_grad_(False)
    return model if engine_ranks(config) > 1 else model.to(device)


def engine_ranks(config: PPOConfig) -> int:
    """Neighbouring workers that hold one rollout engine together."""
    return config.actor_rollout_ref.rollout.tensor_model_parallel_size


def check_vocabulary(size: int, tokens: int, path: str | None) -> None:
    """The critic reads the policy's token ids; a model that has none for some of them cannot."""
    if size < tokens:
        raise ModelError(
            f"critic.model.path={path}: the model knows {size} tokens, but the policy {tokens}; the "
            "critic reads the policy's tokens: give a model of the same family, or leave critic.model.path unset"
        )


def _language_model(
    config: PPOConfig,
    device: torch.device,
    *,
    path: str | None = None,
    quantization: str | None = None,
    headless: bool = False,
) -> torch.nn.Module:
    # The policy's model, or another one, which its `override_config` is not meant for; `headless` leaves out the part
    # that predicts tokens.
    model = config.actor_rollout_ref.model
    if path is not None and path != model.path:
        model = replace(model, override_config={})
    dtype = resolve_dtype(model.dtype, device)
    role = "actor_rollout_ref." if path is None else "critic."
    options: Any = {"path": path, "quantization": quantization, "headless": headless, "role": role}
    device = loading_device(layout_of(config, RL, "actor"), device)
    return load_causal_lm(model, dtype=dtype, device=device, **options)


def _settings(
    config: PPOConfig, device: torch.device, role: Any, optim: OptimConfig | None, place: FSDPConfig, total_steps: int
) -> EngineSettings:
    model = config.actor_rollout_ref.model
    return EngineSettings(
        device=device,
        optim=optim,
        total_steps=total_steps,
        grad_clip=role.grad_clip,
        token_budget=role.ppo_max_token_len_per_gpu,
        max_rows=role.ppo_micro_batch_size_per_gpu,
        pack=model.use_remove_padding,
        gradient_checkpointing=model.enable_gradient_checkpointing,
        param_offload=place.param_offload,
        optimizer_offload=place.optimizer_offload,
    )
