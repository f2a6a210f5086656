"""Section `reward.sandbox`: the limits under which programs run that a model wrote."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.config.schema import Section
from posttrain.settings import ONE_OR_MORE, SECONDS, at_least, setting


@dataclass
class SandboxConfig(Section):
    """Limits of one program. Example: `reward.sandbox.timeout_s=2 reward.sandbox.memory_mb=256`."""

    mode: str = setting("kernel", choices=("kernel", "unsafe"))
    """`kernel` isolates programs by namespaces and a filter of system calls; `unsafe` runs them with your rights."""
    timeout_s: float = setting(5.0, range=SECONDS)
    """Seconds that a program may take for all of its tests together."""
    memory_mb: int = setting(512, range=at_least(16))
    """Memory that a program may allocate, all of its processes together."""
    processes: int = setting(16, range=ONE_OR_MORE)
    """Processes and threads that a program may have at a time."""
    disk_mb: int = setting(64, range=ONE_OR_MORE)
    """Size of all files that a program may write; they lie in memory and are gone with it."""
    output_kb: int = setting(1024, range=ONE_OR_MORE)
    """What a program may write to its standard output and error before it is ended."""
