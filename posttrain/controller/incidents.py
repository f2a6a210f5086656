"""A worker that died, does not go on, or never started: the error, what is known of it, and what it printed last."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from posttrain.errors import UserError

_FACT = re.compile(r"^\t(\w+): (\S+)$", re.M)
_MONITORS = "low on memory"  # in Ray's words where its own watch over memory has ended a process
# In Ray's words where a whole machine is lost.
_MACHINES = re.compile(r"node (has|was|is) (died|dead|terminated)|its node|health check", re.I)
# In the words of a rank that could not talk to another.
_TALK = re.compile(r"gloo|nccl|tcpstore|broken pipe|socket|connection (closed|reset|refused|timed out|to )", re.I)
CONTINUES = "The same command continues from the newest checkpoint."


@dataclass
class Incident:
    """What was known of the workers when one of them was lost; one page of the run directory."""

    who: str
    calls: Mapping[str, str] = field(default_factory=dict)  # by worker, the last method that it was asked for
    states: Mapping[str, str] = field(default_factory=dict)  # by worker, its process in words
    stacks: Mapping[str, str] = field(default_factory=dict)  # of the workers that are left
    printed: Sequence[str] = ()  # its last lines


class WorkerDied(UserError):
    """A worker's process is gone, or does not go on."""

    what = "died"
    who = ""
    worker = ""  # the rank's name where one alone was lost: `rank 0`, `rollout 1`
    incident: Incident | None = None  # what was known at that moment
    # Whether new workers would meet the same end. Then the run is not continued by itself.
    recurs = False


class PeerLost(WorkerDied):
    """A worker could not reach another, or what that had made; who is lost is known only if Ray reports it."""

    what = "lost its connection"


class NoRoom(UserError):
    """Ray had no room for the workers of the run within the time given."""

    machines = 0  # on which the run could still train


# What lowers the memory of workers, of a role and of others.
_SIZES = {"": "trainer.n_workers or the sizes of the batch", "rollout": "actor_rollout_ref.rollout.kv_cache_gb"}


def facts_of(error: Exception) -> dict[str, str]:
    """What Ray says of an actor that is gone: `actor_id`, `pid`, `ip`, as far as it knows."""
    return dict(_FACT.findall(str(error)))


def is_about_a_peer(error: Exception) -> bool:
    """Whether a rank says that it could not reach another one. The cause may be that the other one is gone."""
    if isinstance(error, UserError):
        return isinstance(error, PeerLost)
    talks = type(error).__name__.startswith("Dist") or isinstance(error, ConnectionError)
    return talks or (isinstance(error, RuntimeError) and _TALK.search(str(error)) is not None)


def death_of(error: Exception, who: str = "", *, rollout: bool = False, printed: str = "") -> WorkerDied:
    """Ray's error in words: who it was, the likely cause, what to do. `printed` says where its output is."""
    text = str(error)
    facts = facts_of(error)
    kind = "A rollout worker" if rollout else "A worker"
    who = who or (f"{kind} (process {facts['pid']} on {facts['ip']})" if {"pid", "ip"} <= facts.keys() else kind)
    if "creation task" in text:
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
        return _recurring(
            f"{who} could not be started: {last.strip()} All machines of a run need the same environment and code."
        )
    if _MACHINES.search(text):
        return WorkerDied(
            f"{who} is lost: its machine no longer answers. It has gone down or was cut off from the network, or Ray "
            f"was ended there. {CONTINUES}"
        )
    sizes = _SIZES["rollout" if rollout else ""]
    if _MONITORS in text:
        cause = "Ray ended it because its machine ran low on memory"
        return _recurring(f"{who} died: {cause}. If it was memory, lower {sizes}.{printed} {CONTINUES}")
    cause = "no error of its own ends it so; the kernel does where memory runs out (`dmesg` tells), and kill -9 does"
    return WorkerDied(f"{who} died: {cause}. If it was memory, lower {sizes}.{printed} {CONTINUES}")


def _recurring(text: str) -> WorkerDied:
    death = WorkerDied(text)
    death.recurs = True
    return death


LOG_NAME = "workers.log"


def printed_lines(files: Sequence[str]) -> list[str]:
    """What a worker has printed to these files of Ray, without Ray's own marks."""
    lines: list[str] = []
    for file in files:
        with suppress(OSError):
            lines += Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in lines if line and not line.startswith((":job_id:", ":actor_name:"))]


def append_log(lines: Sequence[str], title: str, folder: Path) -> Path | None:
    """Adds the lines to the log in `folder`, and gives its path; None where nothing was, or could be, written."""
    if not lines:
        return None
    path = folder / LOG_NAME
    try:
        with path.open("a", encoding="utf-8") as log:
            log.write("\n".join([f"--- {title}", *lines]) + "\n")
    except OSError:
        return None
    return path
