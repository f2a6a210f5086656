"""verl's main files beside `ppo_trainer`: the name stands for ours with what the file sets."""

from __future__ import annotations

from pathlib import Path

from posttrain.config.commandline import CommandLine

# Name in verl -> (main file here, settings that verl's file has).
MAINS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ppo_megatron_trainer": ("ppo_trainer", ("actor_rollout_ref.actor.strategy=megatron",)),
    "sft_trainer_engine": ("sft_trainer", ()),
}


def as_ours(line: CommandLine, cwd: Path) -> list[tuple[str, str]]:
    """Let the command line name our file; gives (setting, source) for what verl's file would set.

    A file of that name in the folders that the user gives is the user's own."""
    name = (line.config_name or "").removesuffix(".yaml")
    given = [folder for folder in (line.config_path, line.config_dir) if folder]
    if name not in MAINS or any((cwd / folder / f"{name}.yaml").is_file() for folder in [".", *given]):
        return []
    line.config_name, settings = MAINS[name]
    return [(setting, f"verl's {name}") for setting in settings]
