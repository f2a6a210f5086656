"""The network interface that ranks use: the one that faces rank 0, which is the loopback one on a single machine.

By default gloo takes the interface that the machine's own name resolves to. On many systems that is the loopback
interface, and a rank on another machine then tries to reach itself. On others it is the network's, and ranks of a
single machine then listen where other machines can reach them. NCCL takes the network's, too.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct

_SIOCGIFADDR = 0x8915  # Linux: the address of an interface
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def name_interface(host: str) -> None:
    """Have gloo use the interface that faces `host`, unless the user named one; and NCCL, where all ranks are on this
    machine. Between machines NCCL chooses better by itself: it knows the fast ones."""
    address = address_facing(host)
    name = next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None) if address else None
    if name is None:
        return
    os.environ.setdefault(GLOO, name)
    if host.startswith("127."):
        os.environ.setdefault(NCCL, name)


def address_facing(host: str) -> str | None:
    """This machine's address as `host` sees it."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 1))  # sends nothing
            return probe.getsockname()[0]
    except OSError:
        return None


def _address_of(interface: str) -> str | None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            asked = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)[20:24])
    except OSError:  # it has none
        return None
