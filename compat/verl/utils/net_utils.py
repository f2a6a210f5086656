"""Addresses and ports."""

from __future__ import annotations

import ipaddress
import random
import socket


def is_ipv4(ip_str: str) -> bool:
    try:
        ipaddress.IPv4Address(ip_str)
    except ValueError:
        return False
    return True


def is_ipv6(ip_str: str) -> bool:
    try:
        ipaddress.IPv6Address(ip_str)
    except ValueError:
        return False
    return True


is_valid_ipv6_address = is_ipv6


def get_free_port(address: str, seed: int | None = None) -> tuple[int, socket.socket]:
    """(a free port of this address, the socket that holds it until it is closed); a seed makes the choice repeatable
    as far as its ports are free."""
    held = socket.socket(socket.AF_INET6 if is_ipv6(address) else socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    chosen = random.Random(seed)
    tried = [] if seed is None else [chosen.randint(20000, 60000) for _ in range(10)]
    for port in [*tried, 0]:  # 0: the system chooses
        try:
            held.bind((address, port))
        except OSError:
            if port == 0:
                held.close()
                raise
        else:
            break
    return held.getsockname()[1], held
