"""How many GPUs this machine shows, found without importing torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def gpus_present() -> int:
    """GPUs that a CUDA or ROCm build of torch would see, as far as files and variables tell."""
    nvidia = [file for file in Path("/dev").glob("nvidia[0-9]*") if file.name[6:].isdigit()]
    count = len(nvidia)
    if count == 0 and Path("/dev/kfd").exists():
        count = len(list(Path("/dev/dri").glob("renderD*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("HIP_VISIBLE_DEVICES"))
    if visible is not None:
        named = [part for part in visible.split(",") if part.strip() not in ("", "-1", "NoDevFiles")]
        count = min(count, len(named))
    return count


def runs_on_cpu(config: Any) -> bool:
    """Whether the run will be on the CPU."""
    return config.trainer.device == "cpu" or (config.trainer.device == "auto" and gpus_present() == 0)
