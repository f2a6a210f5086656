"""Which network interface the ranks of other machines see this one by.

Left alone, gloo takes that of the machine's own name, which many systems resolve to the loopback interface: a rank on
another machine then tries to reach itself.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct

_SIOCGIFADDR = 0x8915  # Linux: the address of an interface
GLOO = "GLOO_SOCKET_IFNAME"


def name_interface(host: str) -> None:
    """Have gloo use the interface that faces `host`, unless the user named one, or all ranks are on this machine."""
    if GLOO in os.environ:
        return
    address = address_facing(host)
    if address is None or address.startswith("127."):
        return
    name = next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)
    if name is not None:
        os.environ[GLOO] = name


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
