"""The base of workers: a rank among others, told by its environment."""

from __future__ import annotations

import os
import socket
from typing import Any

from verl.single_controller.base.decorator import Dispatch, Execute, register


class Worker:
    """One rank of a group. A subclass marks its methods with `register`."""

    fused_worker_attr_name = "fused_worker_dict"

    @property
    def rank(self) -> int:
        return int(os.environ.get("RANK", "0"))

    @property
    def world_size(self) -> int:
        return int(os.environ.get("WORLD_SIZE", "1"))

    def get_master_addr_port(self) -> tuple[str | None, str | None]:
        """Where the first rank can be found, for torch.distributed."""
        return os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")

    def get_available_master_addr_port(self) -> tuple[str, str]:
        """This machine and a free port."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return socket.gethostbyname(socket.gethostname()), str(probe.getsockname()[1])

    def get_cuda_visible_devices(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "not set")

    @property
    def _mesh_places(self) -> dict[str, tuple[int, bool]]:
        """Mesh -> (data-parallel rank, whether this rank's answers are collected)."""
        return self.__dict__.setdefault("_places_in_meshes", {})

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        assert mesh_name not in self._mesh_places, f"mesh_name {mesh_name} has been registered"
        self._mesh_places[mesh_name] = (dp_rank, is_collect)

    def _query_dispatch_info(self, mesh_name: str) -> int:
        assert mesh_name in self._mesh_places, f"{mesh_name} is not registered in {type(self).__name__}"
        return self._mesh_places[mesh_name][0]

    def _query_collect_info(self, mesh_name: str) -> bool:
        assert mesh_name in self._mesh_places, f"{mesh_name} is not registered in {type(self).__name__}"
        return self._mesh_places[mesh_name][1]

    def get_dispatch_collect(self) -> dict[str, dict[str, Any]]:
        """What `set_dispatch_collect` of another worker takes."""
        ranks, collects = ({name: place[at] for name, place in self._mesh_places.items()} for at in (0, 1))
        return {"dispatch_dp_rank": ranks, "collect_dp_rank": collects}

    def set_dispatch_collect(
        self, mesh_name: str, dispatch_dp_rank: dict[str, int], collect_dp_rank: dict[str, bool]
    ) -> None:
        """Take over the place of a worker with one mesh, under `mesh_name`."""
        (rank,), (is_collect,) = dispatch_dp_rank.values(), collect_dp_rank.values()
        self._register_dispatch_collect_info(mesh_name, rank, is_collect)

    @register(dispatch_mode=Dispatch["DP_COMPUTE_PROTO_WITH_FUNC"])
    def execute_with_func_generator(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch["ALL_TO_ALL"], execute_mode=Execute["RANK_ZERO"])
    def execute_func_rank_zero(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)
