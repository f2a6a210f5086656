"""Checkpoints of the loop: what a step leaves behind, and how a run goes on from it, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.checkpoint.rng import restore_rng
from posttrain.tracking.progress import say
from posttrain.trainer.run.bases import check_bases

if TYPE_CHECKING:
    from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer


def save(trainer: RayPPOTrainer) -> Path:
    """Write the checkpoint of the present step, with a Hugging Face folder where one is due."""
    export_hf, last = trainer.config.trainer.export_hf, trainer.step >= trainer.sizes.total_steps

    def extra(folder: Path) -> None:
        trainer.group_filter.save(folder)
        trainer.ahead.save(folder)
        if export_hf == "all" or (export_hf == "last" and last):
            trainer.actor_rollout_wg.export_hf(folder / "huggingface")

    tensors = {"actor": trainer.actor_rollout_wg.save}
    if trainer.critic_wg:
        tensors["critic"] = trainer.critic_wg.save
    state = {
        "step": trainer.step,
        "sampler": trainer.sampler.state_dict(),
        "prompts": trainer.experience.serial,
        "kl_controller": trainer.kl_controller.state_dict(),
        "old_from_rollout": trainer.old_from_rollout,
        "bad_steps": trainer.bad_steps,
        "surplus": trainer.group_filter.surplus is not None,
        "ahead": trainer.ahead.rows is not None,
        "lora": _adapters(trainer),
    }
    return trainer.recorder.save(trainer.step, tensors=tensors, state=state, export=extra)


def _adapters(trainer: RayPPOTrainer) -> dict[str, Any]:
    """By role with adapters: what a checkpoint must say of them, as it does not hold their base."""
    groups = {"actor": trainer.actor_rollout_wg, "critic": trainer.critic_wg}
    found = {role: group.lora_state() for role, group in groups.items() if group is not None}
    return {role: state for role, state in found.items() if state is not None}


def resume(trainer: RayPPOTrainer) -> None:
    """Continue from `resume_from_path`, or from the newest good checkpoint of the run directory."""
    settings, checkpoints = trainer.config.trainer, trainer.recorder.checkpoints
    given = settings.resume_from_path if settings.resume_mode == "resume_path" else None
    path = Path(given) if given else checkpoints.newest() if settings.resume_mode == "auto" else None
    if path is None:
        return
    state = checkpoints.load_state(path)
    check_bases(path, state.get("lora", {}), _adapters(trainer))
    trainer.actor_rollout_wg.load(checkpoints.role_folder(path, "actor"))
    if trainer.critic_wg:
        trainer.critic_wg.load(checkpoints.role_folder(path, "critic"))
    trainer.step, trainer.bad_steps = int(state["step"]), int(state["bad_steps"])
    trainer.old_from_rollout = bool(state["old_from_rollout"])
    trainer.sampler.load_state_dict(state["sampler"])
    trainer.experience.serial = int(state.get("prompts", trainer.step * trainer.sizes.prompts))
    trainer.kl_controller.load_state_dict(state["kl_controller"])
    if state.get("surplus"):
        trainer.group_filter.load(path)
    if state.get("ahead"):
        trainer.ahead.load(path)
    restore_rng(checkpoints.load_rng(path))
    checkpoints.set_aside_after(trainer.step)
    trainer.actor_rollout_wg.sync_weights(trainer.step)
    say(f"Resumed from {path}: {trainer.step} of {trainer.sizes.total_steps} steps are done.")
