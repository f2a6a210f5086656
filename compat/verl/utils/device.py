"""The device that this process computes on: CUDA where there is one, else the CPU."""

from __future__ import annotations

from typing import Any

import torch

is_cuda_available: bool = torch.cuda.is_available()
is_npu_available = False


def get_device_name() -> str:
    """`cuda` or `cpu`."""
    return "cuda" if is_cuda_available else "cpu"


def get_torch_device() -> Any:
    """torch's module of the device: torch.cuda or torch.cpu."""
    return getattr(torch, get_device_name())


def get_device_id() -> Any:
    """The number of the current CUDA device; on a CPU `cpu`, or 0 where torch says so."""
    return get_torch_device().current_device()


def get_nccl_backend() -> str:
    """The way ranks talk: `nccl` between CUDA devices, `gloo` between CPUs."""
    return "nccl" if is_cuda_available else "gloo"


def get_resource_name() -> str:
    """Ray's name of the device."""
    return "GPU" if is_cuda_available else "CPU"


def get_visible_devices_keyword() -> str:
    return "CUDA_VISIBLE_DEVICES"


def is_device_available() -> bool:
    return is_cuda_available


def manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


def set_expandable_segments(enable: bool) -> None:
    """Lets CUDA's memory grow in place."""
    if is_cuda_available:
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{enable}")


def auto_set_device(config: Any) -> None:
    """Nothing to set: trainer.device=auto takes what is there."""
