"""Ray for one run: started by itself, or found running; what was started here is gone with the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ray

from posttrain.controller import torchrun
from posttrain.controller.ray_address import given_address, no_ray, silence_of
from posttrain.controller.ray_head import RayHead
from posttrain.controller.ray_processes import Watched
from posttrain.controller.ray_secret import OWN
from posttrain.controller.ray_settings import as_arguments, refused_by_ray

_QUIET = {"log_to_driver": False, "configure_logging": False}


class RayCluster:
    """`start` connects this process; `stop` leaves, and ends what `start` has started. With several machines, and no
    address of a Ray that runs, it starts the head that the others join."""

    def __init__(
        self,
        ranks: int,
        settings: Mapping[str, Any] | None = None,
        machines: int = 1,
        tell: Callable[[str], None] = print,
    ) -> None:
        self.ranks, self.machines, self.tell, self.address = ranks, machines, tell, given_address()
        self.settings = as_arguments(settings or {})
        """For `ray.init`, where they come before our own."""
        self._started: Watched | RayHead | None = None
        self._connected = False
        self.was_there = False
        """Whether this process had a Ray before: it is used, and left as it is."""
        self.folder = ""
        """Of the Ray that was started here."""

    @property
    def is_head(self) -> bool:
        """Whether the head was started here, so that the other machines are only coming now."""
        return isinstance(self._started, RayHead)

    def start(self) -> None:
        if ray.is_initialized():  # inside an actor, or in a program that has connected itself
            self.was_there = True
        elif self.address:
            self._join(self.address)
        elif self.machines > 1:
            self._start_head()
        else:
            self._start_here()

    def _start_here(self) -> None:
        """A Ray that nobody but this process can reach."""
        self._started = watched = Watched()
        self._connected, self.folder = True, watched.folder
        ours = {**_QUIET, "num_cpus": self.ranks, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        with watched.environment({"RAY_AUTH_TOKEN": OWN}), refused_by_ray(self.settings):
            ray.init(address="local", _temp_dir=self.folder, **{**ours, **self.settings})

    def _start_head(self) -> None:
        """A Ray that other machines can join: told of by torchrun's store, or by hand."""
        self._started = head = RayHead(self.settings)
        self.folder = head.folder
        with head.environment(head.secret), refused_by_ray(head.rest):
            ray.init(address="auto", _temp_dir=self.folder, **{**_QUIET, **head.rest})
        self._connected, self.address = True, head.address
        if torchrun.is_meeting():
            torchrun.tell_address(head.address, head.token)
        else:
            head.tell_users(self.tell, self.machines)

    def _join(self, address: str) -> None:
        """Connect to a Ray that runs. Where nobody answers it would try for two minutes, and then end the process."""
        if (silence := silence_of(address)) is not None:
            raise no_ray(address, silence)
        try:
            with refused_by_ray(self.settings):
                ray.init(address=address, **{**_QUIET, **self.settings})
        except ConnectionError as error:
            raise no_ray(address, error) from error
        self._connected = True
        if torchrun.is_meeting():
            torchrun.tell_address(address, "")

    def words(self) -> str:
        if self.was_there:
            return "which this process is connected to"
        return f"at {self.address}" if self.address else "started for this run"

    def stop(self) -> None:
        if self._connected:
            self._connected = False
            ray.shutdown()
        if self._started is not None:
            self._started.close()
            self._started = None
