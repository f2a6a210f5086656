"""One job, one share of the processors, however many processes it runs.

The kernel divides processors among what runs, so that a job of 16 spinning processes would leave a neighbour a
seventeenth. Two things bring its share back to about that of one process: all of a job stays in one session, which is
what the kernel groups by where it does (autogroup), and where it does not, what runs at the same time is made nicer.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os

from posttrain.sandbox.usage import read_proc, threads

_STEP = math.log(1.25)  # of a process's weight, from one nice level to the next
_NICEST = 19


def share(proc: int, processes: list[int]) -> None:
    """Make the threads that run side by side so nice that together they weigh as one; their children inherit it."""
    tasks = [(process, thread) for process in processes for thread in threads(proc, str(process))]
    if len(tasks) < 2:
        return
    looks = [read_proc(proc, f"{process}/task/{thread}/stat").rpartition(b")")[2].split() for process, thread in tasks]
    running = sum(fields[:1] == [b"R"] for fields in looks)
    if running < 2:
        return
    level = min(_NICEST, math.ceil(math.log(running) / _STEP))
    for (process, thread), fields in zip(tasks, looks, strict=True):
        if fields and int(fields[16]) < level:
            # It may have ended, and its number be free, or be somebody's whose we are not: then nothing happens.
            with contextlib.suppress(OSError, IndexError):
                os.setpriority(os.PRIO_PROCESS, _numbers(proc, f"{process}/task/{thread}")[_depth(proc)], level)


@functools.cache
def _depth(proc: int) -> int:
    """Our place among the process namespaces: the host's numbers are not ours."""
    return len(_numbers(proc, "self")) - 1


def _numbers(proc: int, name: str) -> list[int]:
    """The numbers of a thread in all namespaces that it is in, the host's first; none when it has ended."""
    lines = read_proc(proc, f"{name}/status").splitlines()
    return [int(number) for line in lines if line.startswith(b"NSpid:") for number in line.split()[1:]]
