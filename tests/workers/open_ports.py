"""Ports that processes listen on, and at which addresses; Linux's tables, without a program that shows them."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable
from pathlib import Path

LISTENS = "0A"


def listening(pids: Iterable[int]) -> dict[tuple[str, int], int]:
    """(address, port) -> process."""
    sockets = {}
    for pid in pids:
        try:
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                link = os.readlink(fd)
                if link.startswith("socket:["):
                    sockets[link[8:-1]] = pid
        except OSError:
            continue
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and fields[9] in sockets:
                address, _, port = fields[1].partition(":")
                found[_address(address), int(port, 16)] = sockets[fields[9]]
    return found


def _address(text: str) -> str:
    """The kernel writes words of four bytes, each in the machine's order."""
    words = [bytes.fromhex(text[place : place + 8])[::-1] for place in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def is_loopback(address: str) -> bool:
    given = ipaddress.ip_address(address)
    return (getattr(given, "ipv4_mapped", None) or given).is_loopback


def own_address() -> str | None:
    """This machine's, as others see it; None where it has none but the loopback one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))  # sends nothing
        except OSError:
            return None
        address = probe.getsockname()[0]
    return None if is_loopback(address) else address


def accepts(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=2).close()
        return True
    except OSError:
        return False


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
