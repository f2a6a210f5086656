"""Locates a model: distinguishes and checks folders and hub ids, without torch."""

from __future__ import annotations

import os
from pathlib import Path

from posttrain.config.model import ADAPTER_CONFIG
from posttrain.errors import UserError
from posttrain.models.model_files import broken_files, why_not_from_hub


class ModelError(UserError):
    """A model or tokenizer could not be loaded; the text says what to do."""


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).exists() and not (folder / "config.json").exists()


def local_or_hub(path: str, setting: str = "model.path", holds: tuple[str, ...] = ("config.json",)) -> str:
    """Expand ~ and $VARS in a path. A missing folder is distinguished from a hub id.

    A folder must hold one of the files `holds`.
    """
    expanded = os.path.expandvars(os.path.expanduser(path))
    if Path(expanded).is_dir():
        if "config.json" in holds and is_adapter(Path(expanded)):
            raise ModelError(
                f"{setting}={path}: the folder holds a LoRA adapter, not a model; give its base as the model and this "
                "folder as model.lora_adapter_path, or name the run's checkpoint (.../global_step_N)"
            )
        if not any((Path(expanded) / name).exists() for name in holds):
            raise ModelError(f"{setting}={path}: the folder holds no config.json; give the folder of a model")
        if broken := broken_files(Path(expanded)):
            raise ModelError(f"{setting}={path}: {'; '.join(broken)}. Fetch or copy the model again.")
        return expanded
    looks_local = expanded.startswith(("/", ".", "~")) or expanded.count("/") > 1 or "\\" in expanded
    if looks_local or Path(expanded).exists():
        raise ModelError(f"{setting}={path}: no such folder; give one, or a hub id such as Qwen/Qwen2.5-0.5B")
    if (reason := why_not_from_hub(expanded)) is not None:
        raise ModelError(
            f"{setting}={path} is neither a folder here nor a model in the hub's cache, and {reason}.\n"
            f"  Give a local folder, such as /path/to/{Path(path).name} "
            "(HF_ENDPOINT names a mirror, HF_TOKEN gives access to private models)."
        )
    return expanded
