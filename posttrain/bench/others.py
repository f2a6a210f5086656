"""How much of the machine others used while something was measured: without it a table cannot be trusted."""

from __future__ import annotations

import os
from pathlib import Path


class Others:
    """Counts from its making: `share()` is the part of all cores that processes outside that session used."""

    def __init__(self, session: int) -> None:
        self.session = session
        self.busy, self.total, self.mine = (*_machine(), _session(session))

    def share(self) -> float | None:
        """None where the system does not tell (no /proc)."""
        busy, total = _machine()
        if total <= self.total:
            return None
        mine = _session(self.session) - self.mine
        return round(max(0.0, (busy - self.busy - mine) / (total - self.total)), 3)


def _machine() -> tuple[int, int]:
    """(busy, all) ticks of the machine so far."""
    try:
        ticks = [int(part) for part in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0, 0
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _session(session: int) -> int:
    """Ticks that the processes of a session, and the children that they waited for, have used."""
    used = 0
    for name in filter(str.isdecimal, os.listdir("/proc") if os.path.isdir("/proc") else []):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[3]) == session:
            used += sum(map(int, fields[11:15]))
    return used
