"""The head of a Ray that other machines join, started for a run; they hear of it by torchrun's store, or by hand."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from typing import Any

from posttrain.controller import torchrun
from posttrain.controller.ray_address import silence_of
from posttrain.controller.ray_node import RayNode
from posttrain.controller.ray_secret import OWN, users_secret
from posttrain.engine.interface import address_facing
from posttrain.errors import UserError

PORT = 6379
"""Of a head that the other machines are told of by hand."""
_OF_A_NODE = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory")
_OF_A_HEAD = ("include_dashboard", "dashboard_host", "dashboard_port")


class PortTaken(UserError):
    """Another program has the port of the head."""


class RayHead(RayNode):
    """`settings` are arguments of `ray.init`: what concerns the node is used here, and `rest` is for who connects."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        met = torchrun.is_meeting()
        host, port = (_facing(torchrun.master()), _free_port()) if met else (_facing(), PORT)
        self.address, self.token = f"{host}:{port}", OWN if met and not users_secret() else ""
        self.secret = {"RAY_AUTH_TOKEN": self.token} if self.token else {}
        if silence_of(self.address) is None:
            raise PortTaken(
                f"{self.address} is taken by another program, and Ray's head cannot be started there. End it; or start "
                "Ray yourself (ray start --head --port=PORT) and name it on all machines: RAY_HEAD_ADDRESS=HOST:PORT"
            )
        given = {"include_dashboard": False, **settings}
        options = [_option(name, given[name]) for name in (*_OF_A_NODE, *_OF_A_HEAD) if name in given]
        self.rest = {name: value for name, value in settings.items() if name not in (*_OF_A_NODE, *_OF_A_HEAD)}
        super().__init__(["--head", f"--node-ip-address={host}", f"--port={port}", *options], self.secret)

    def tell_users(self, tell: Callable[[str], None], machines: int) -> None:
        """What is to be typed on the other machines, and who else may join."""
        others = "1" if machines == 2 else f"1 to {machines - 1}"
        tell(
            f"Started Ray's head. Give the same command on the other machines, with RAY_HEAD_ADDRESS={self.address} "
            f"and trainer.node_rank={others}."
        )
        if not users_secret():
            tell(
                f"note: whoever reaches {self.address} can run programs here. To have a secret, put one file "
                "~/.ray/auth_token (`ray get-auth-token --generate` makes it) on all machines."
            )


def _option(name: str, value: Any) -> str:
    """An argument of `ray.init` as one of `ray start`."""
    text = str(value).lower() if isinstance(value, bool) else value
    if isinstance(value, Mapping):
        text = ",".join(f"{k}={v}" for k, v in value.items()) if name == "labels" else json.dumps(value)
    return f"--{name.replace('_', '-')}={text}"


def _facing(host: str = "") -> str:
    """The address under which this machine is seen from `host`; from the network, without one."""
    from ray.util import get_node_ip_address

    return (address_facing(host) if host else None) or get_node_ip_address()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
