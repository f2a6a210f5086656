"""verl with each stage's time printed as it ends, so that a run that is cut off still shows how far it came.

The trainer's process imports this before its first step, since `agent_loop_manager_class` names `Manager`, which is
verl's own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from verl.trainer.ppo.v1 import AgentLoopManagerTQ as Manager  # pyright: ignore # noqa: F401
from verl.trainer.ppo.v1 import trainer_base, trainer_sync  # pyright: ignore

timer = trainer_base.marked_timer


@contextmanager
def printed_timer(name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    began = time.perf_counter()
    with timer(name, *args, **kwargs):
        yield
    print(f"stage {name}: {time.perf_counter() - began:.3f} s", flush=True)


trainer_base.marked_timer = trainer_sync.marked_timer = printed_timer
print("stages begin", flush=True)
