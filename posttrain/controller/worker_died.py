"""What is said of a rank whose process is gone, or never came up."""

from __future__ import annotations

import re

from posttrain.errors import UserError

_FACT = re.compile(r"^\t(\w+): (\S+)$", re.M)
_MONITORS = "low on memory"
"""In Ray's words where its own watch over memory has ended a process."""


class WorkerDied(UserError):
    """A worker's process is gone."""


_SIZES = {"": "trainer.n_workers or the sizes of the batch", "rollout": "actor_rollout_ref.rollout.kv_cache_gb"}
"""What lowers the memory of workers, of a role and of others."""


def death_of(error: Exception, role: str = "") -> WorkerDied:
    """Ray's error in words: who it was, the likely cause, what to do."""
    text = str(error)
    facts = dict(_FACT.findall(text))
    kind = "A rollout worker" if role == "rollout" else "A worker"
    who = f"{kind} (process {facts['pid']} on {facts['ip']})" if {"pid", "ip"} <= facts.keys() else kind
    if "creation task" in text:
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
        return WorkerDied(
            f"{who} could not be started: {last.strip()} All machines of a run need the same environment and code."
        )
    cause = "no error of its own ends it so; the kernel does where memory runs out (`dmesg` tells), and kill -9 does"
    if _MONITORS in text:
        cause = "Ray ended it because its machine ran low on memory"
    return WorkerDied(
        f"{who} died: {cause}. If it was memory, lower {_SIZES.get(role, _SIZES[''])}; what it "
        "printed last is in the run's logs/workers.log. The same command continues from the newest checkpoint."
    )
