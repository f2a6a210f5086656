"""The base of workers: a rank among others, told by its environment."""

from __future__ import annotations

import os
import socket
from typing import Any

from verl._missing import not_given
from verl.single_controller.base.decorator import Dispatch, Execute, register

__getattr__ = not_given(__name__)


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

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Every rank is a data-parallel one here; nothing has to be remembered."""

    @register(dispatch_mode=Dispatch["DP_COMPUTE_PROTO_WITH_FUNC"])
    def execute_with_func_generator(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch["ALL_TO_ALL"], execute_mode=Execute["RANK_ZERO"])
    def execute_func_rank_zero(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)
