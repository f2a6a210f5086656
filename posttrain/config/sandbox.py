"""Section `reward.sandbox`: the limits under which programs run that a model wrote."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.config.base import Section


@dataclass
class SandboxConfig(Section):
    """Limits of one program. Example: `reward.sandbox.timeout_s=2 reward.sandbox.memory_mb=256`."""

    mode: str = "kernel"
    """`kernel` isolates programs by namespaces and a filter of system calls; `unsafe` runs them with your rights."""
    timeout_s: float = 5.0
    """Seconds that a program may take for all of its tests together."""
    memory_mb: int = 512
    """Memory that a program may allocate, all of its processes together."""
    processes: int = 16
    """Processes and threads that a program may have at a time."""
    disk_mb: int = 64
    """Size of all files that a program may write; they lie in memory and are gone with it."""
    output_kb: int = 1024
    """What a program may write to its standard output and error before it is ended."""
