"""Workers with a train engine: how the engine of each role is made from the configuration, and what all of them have in
common: facts, checkpoints, exported folders, and notes on adapters.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from posttrain.config.model import ADAPTER_CONFIG, ModelConfig
from posttrain.config.root import FSDPConfig, OptimConfig, PPOConfig
from posttrain.controller.group import register, to_all, to_first
from posttrain.engine.base import EngineSettings, TrainEngine
from posttrain.engine.facts import EngineFacts
from posttrain.engine.ranks import this_rank
from posttrain.engine.registry import build_train_engine, layout_of, loading_device
from posttrain.engine.settings import RL
from posttrain.models.adapter_files import fingerprint
from posttrain.models.adapter_targets import AdapterShape, large_note, stacked_note
from posttrain.models.decodable import check_exact
from posttrain.models.forward import ValueModel
from posttrain.models.loading import ModelError, load_causal_lm, resolve_dtype
from posttrain.models.lora import add_adapters, with_adapters
from posttrain.models.routing import check_routes
from posttrain.rollout.engine_kwargs import OUTSIDE
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
    return config.actor_rollout_ref.rollout.engine_size


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


class EngineWorker:
    """A role with a train engine; `adapters` is what a checkpoint says of LoRA adapters and their base."""

    config: Any
    engine: TrainEngine
    adapters: dict[str, Any] | None

    @register(to_first)
    def engine_facts(self) -> EngineFacts:
        """About the role's model."""
        return self.engine.facts()

    @register(to_first)
    def lora_state(self) -> dict[str, Any] | None:
        """The adapters' settings and the identity of their base, for the checkpoint; None where all is trained."""
        return self.adapters

    @register(to_all)
    def save(self, folder: Path) -> None:
        """Write this role's part of a checkpoint."""
        self.engine.save(folder)

    @register(to_all)
    def begin_save(self, folder: Path) -> str | None:
        """Copy this role's part of a checkpoint and write it, in the background; or write it at once, and say why."""
        return self.engine.begin_save(folder)

    @register(to_all)
    def load(self, folder: Path) -> None:
        """Resume from what `save` wrote."""
        self.engine.load(folder)


class ExportingWorker(EngineWorker):
    """One whose model is what the run is for."""

    tokenizer: Any

    @register(to_all)
    def export_hf(self, folder: Path) -> None:
        """A Hugging Face folder with tokenizer and chat template: the model, or under LoRA what `trainer.export_lora`
        says."""
        adapter = self.adapters["adapter"] if self.adapters else None
        self.engine.export_hf(folder, adapter, merged=self.config.trainer.export_lora == "merged")
        self.engine.take_save_wait()  # the driver times this call: it is part of a save
        if this_rank() == 0:  # the engine gathers weights on all ranks; small files are written once
            self.tokenizer.save_pretrained(folder)


def lora_state(facts: EngineFacts, model: ModelConfig, path: str | None = None) -> dict[str, Any] | None:
    """The policy's adapter settings and the identity of the base, as plain JSON; None for a model without adapters."""
    if facts.adapters is None:
        return None
    base = path or str(model.path)
    dtype = str(facts.dtype).removeprefix("torch.")
    shape = {"adapter": facts.adapters | {"base_model_name_or_path": base}} if facts.adapters else {}
    return shape | {
        "base": {
            "path": base,
            # The path alone is not enough: a folder can be replaced, and adapters beside other weights give nonsense.
            "fingerprint": fingerprint(base),
            "dtype": dtype,
            "quantization": model.quantization,
            "override_config": model.override_config,
            "tokenizer_path": model.tokenizer_path,
        },
    }


def expert_notes(facts: EngineFacts, shape: AdapterShape, section: str) -> list[str]:
    """About experts that lie in one tensor: whether they have adapters, and how large these are."""
    about = stacked_note(facts.stacked, shape, f"{section}.target_modules", facts.adapted_experts)
    return [note for note in (about, large_note(facts.adapters_share, f"{section}.lora_rank")) if note]


def adapter_notes(facts: EngineFacts, model: ModelConfig) -> list[str]:
    """What a user of adapters should know about them: another base than theirs, weights that get none."""
    notes = expert_notes(facts, model, "model")
    if model.quantization is not None and facts.stacked:
        notes.append(
            f"model.quantization={model.quantization} holds linear modules in 4 bits; {facts.stacked} keep model.dtype."
        )
    if model.lora_adapter_path is not None:
        made_for = json.loads((Path(model.lora_adapter_path) / ADAPTER_CONFIG).read_bytes()).get(
            "base_model_name_or_path"
        )
        if made_for and not _same_place(made_for, str(model.path)):
            notes.append(
                f"The adapter in {model.lora_adapter_path} was made beside {made_for}; here its base is {model.path}."
            )
    return notes


def policy_notes(model: ModelConfig, engine: str, *, has_reference: bool) -> list[str]:
    """What the adapters of a policy mean for its reference and its rollout."""
    notes = []
    if model.lora_adapter_path is not None and has_reference:
        notes.append("The reference is the base without the adapter that the run starts from: KL does not begin at 0.")
    if model.quantization is not None:
        held = f"The base is held in 4 bits (model.quantization={model.quantization})"
        if (outside := OUTSIDE.get(engine.partition(" ")[0])) is not None:
            notes.append(f"{held}; {outside.title} has it unpacked, with the adapters folded in.")
        else:
            notes.append(
                f"{held}, which the fused decoder does not read: the rollout goes through the model's own layers "
                f"({engine})."
            )
    return notes


def _same_place(one: str, other: str) -> bool:
    return one == other or (Path(one).is_dir() and Path(other).is_dir() and Path(one).samefile(other))
