"""The systems that are compared: which script runs each, in which environment, with which variables."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.bench.environments import Environment, environment
from posttrain.errors import UserError

PEERS = Path(__file__).parent / "peers"
_THREADING = ("OMP_", "KMP_", "GOMP_", "MKL_", "LD_PRELOAD", "PYTHONPATH")


@dataclass(frozen=True)
class System:
    """One row of a table. Ours name an `engine`, peers a `script`; `installs` is a peer's own environment."""

    name: str
    what: str
    engine: str | None = None
    script: str | None = None
    installs: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    preload: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def environment(self) -> Environment | None:
        return environment(self.installs) if self.installs else None

    @property
    def ours(self) -> bool:
        return self.engine is not None

    def command(self, job: Path, module: str) -> list[str]:
        """`module` is the runner of ours that this table uses."""
        if self.ours:
            return [sys.executable, "-m", f"posttrain.bench.ours.{module}", str(job)]
        python = self.environment.python if self.environment else Path(sys.executable)
        return [str(python), str(PEERS / str(self.script)), str(job)]

    def variables_for(self, threads: int) -> dict[str, str]:
        """The whole environment of the process: a peer does not inherit what is set for us."""
        mine = {k: v for k, v in os.environ.items() if self.ours or not k.startswith(_THREADING)}
        mine |= {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **self.variables}
        if self.preload and self.environment and (library := self.environment.folder / self.preload).is_file():
            mine["LD_PRELOAD"] = str(library)
        return mine


VLLM = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

SLEEPING = {"GOMP_SPINCOUNT": "0"}  # as posttrain sets for itself: threads that wait leave their core to others

ROLLOUT = (
    System("native", "posttrain's own engine", engine="native"),
    System("hf", "posttrain's reference engine on transformers", engine="hf"),
    System("generate", "transformers model.generate, one padded batch", script="run_generate.py", variables=SLEEPING),
    System("continuous-batching", "transformers continuous batching", script="run_continuous.py", variables=SLEEPING),
    System("vllm", "vLLM on CPU", script="run_vllm.py", installs="vllm", variables=VLLM, preload="lib/libiomp5.so"),
)
STEP = (
    System("native", "posttrain with its own engine", engine="native"),
    System("hf", "posttrain with the reference engine", engine="hf"),
    System("trl", "TRL's GRPOTrainer", script="run_trl.py", installs="trl", variables=SLEEPING),
)


def choose(systems: tuple[System, ...], only: str | None) -> list[System]:
    """Those named in `--only a,b`, in the table's order; all of them without it."""
    if only is None:
        return list(systems)
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = {system.name for system in systems}
    if not names or (unknown := [name for name in names if name not in known]):
        wrong = ", ".join(unknown) if names else "nothing"
        raise UserError(f"--only names {wrong}; known: {', '.join(system.name for system in systems)}")
    return [system for system in systems if system.name in names]
