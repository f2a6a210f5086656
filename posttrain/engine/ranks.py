"""The processes that hold one model together: how they meet, and which of them share what.

Every rank computes passes over its own rows. Weights, gradients and optimizer state are cut over groups of `fsdp_size`
ranks (FSDP2); the groups are copies of each other (HSDP) and add their gradients up. With `sequence_size` above 1, that
many neighbouring ranks compute the same rows, each a stretch of their tokens (Ulysses).
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from posttrain.errors import UserError
from posttrain.kernels.ordered import fix_product_library
from posttrain.kernels.tensor_parallel import Team
from posttrain.models.recurrent import STATEFUL

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class RanksError(UserError):
    """Ranks that cannot be grouped as the settings say."""


def join_ranks(
    rank: int,
    world_size: int,
    address: str,
    device: torch.device,
    *,
    timeout_s: float = 1800.0,
    backend: str | None = None,
) -> None:
    """Meet the other ranks at `address` (host:port, of rank 0). Alone, nothing is started.

    Where a rank waits for another for longer than `timeout_s` seconds the wait ends with an error. `backend` is NCCL
    between GPUs; ranks that share one GPU, which NCCL does not allow, can meet by `gloo`.
    """
    if world_size == 1 or dist.is_initialized():
        return
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # Ray shows a rank one GPU, its own
    else:
        fix_product_library()
    name_interface(address.rpartition(":")[0])
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        backend or ("nccl" if device.type == "cuda" else "gloo"),
        store=_store(rank, world_size, address, timeout),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )


def _store(rank: int, world_size: int, address: str, timeout: timedelta) -> Any:
    host, _, port = address.rpartition(":")
    return meeting_store(host, int(port), world_size, timeout, hosts=rank == 0)


def meeting_store(host: str, port: int, world_size: int, timeout: timedelta, *, hosts: bool, wait: bool = True) -> Any:
    """The store that ranks meet at; one of them `hosts` it, at a free port where `port` is 0, and may `wait` for the
    others to come."""
    # By default the host would listen on all interfaces; here it listens only on the one whose address the others have.
    made: Any = getattr(dist, "TCPStore")  # noqa: B009  (public, though not marked so for type checkers)
    listening = None
    if hosts:
        server = socket.create_server((host, port))
        port, listening = server.getsockname()[1], server.detach()
    return made(
        host,
        port,
        world_size,
        is_master=hosts,
        timeout=timeout,
        wait_for_workers=wait,
        multi_tenant=True,
        master_listen_fd=listening,
    )


def leave_ranks() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@dataclass(frozen=True)
class Ranks:
    """Groups of the ranks, for one engine."""

    mesh: DeviceMesh  # (groups that are copies, ranks of a group) or only the latter
    sequence: dist.ProcessGroup | None = None  # the ranks that compute the same rows as this one

    @property
    def sequence_size(self) -> int:
        return self.sequence.size() if self.sequence else 1


def group_ranks(device: torch.device, *, fsdp_size: int = -1, sequence_size: int = 1) -> Ranks | None:
    """The groups of this process's ranks; None where it is alone. `fsdp_size` of -1 is all of them."""
    ranks = world_size()
    if ranks == 1:
        return None
    size = ranks if fsdp_size == -1 else fsdp_size
    _check_divides(ranks, size, "fsdp_config.fsdp_size")
    _check_divides(ranks, sequence_size, "ulysses_sequence_parallel_size")
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    if size == ranks:
        world = dist.group.WORLD  # `init_device_mesh` would make a second group, by NCCL, also for ranks that use gloo
        assert world is not None
        mesh = DeviceMesh.from_group(world, device.type, mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh(device.type, (ranks // size, size), mesh_dim_names=("copy", "shard"))
    return Ranks(mesh, neighbours(sequence_size))


def neighbours(size: int, among: int | None = None) -> dist.ProcessGroup | None:
    """The group of this rank and its neighbours, `size` ranks together; None for groups of one, and for ranks after the
    first `among` (by default all have a group). All ranks must call this."""
    if size == 1:
        return None
    if size == world_size():
        return dist.group.WORLD
    own = None
    for first in range(0, among or world_size(), size):
        group = dist.new_group(list(range(first, first + size)))  # every rank takes part in making every group
        if first <= this_rank() < first + size:
            assert isinstance(group, dist.ProcessGroup)
            own = group
    return own


def team_of(size: int, device: torch.device, among: int | None = None) -> Team | None:
    """The neighbouring ranks that hold one rollout model together; None where each has its own, and for ranks after the
    first `among`. All ranks must call this."""
    group = neighbours(size, among)
    return None if group is None else Team(group, device)


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' values, on the host. All ranks must call this."""
    if world_size() == 1:
        return values
    # NCCL moves nothing that lies on the host.
    total = values.cuda() if dist.get_backend() == "nccl" else values.clone()
    dist.all_reduce(total)
    return total.cpu()


def from_rank_0(number: int, device: torch.device) -> int:
    """The number that rank 0 gives. All ranks must call this."""
    if world_size() == 1:
        return number
    sent = torch.tensor(number, device=device)
    dist.broadcast(sent, src=0)
    return int(sent)


def check_heads(config: Any, size: int, *, packed: bool) -> None:
    """Rejects models whose layers cannot be divided among the ranks of a sequence."""
    setting = f"ulysses_sequence_parallel_size={size}"
    if size == 1:
        return
    settings = config.get_text_config()
    if STATEFUL & set(getattr(settings, "layer_types", None) or ()):
        raise RanksError(
            f"{setting}: layers of this model ({settings.model_type}) have recurrent states, which are computed on one "
            "rank; set it to 1"
        )
    heads = settings.num_attention_heads
    key_heads = getattr(settings, "num_key_value_heads", None) or heads
    if heads % size or key_heads % size:
        raise RanksError(
            f"{setting}: the ranks of a sequence share out its heads, but the model has {heads} heads of queries and "
            f"{key_heads} of keys, which is no multiple of it; set a size that divides both"
        )
    if not packed:
        raise RanksError(
            f"{setting}: a sequence is cut where rows are packed, but those of this model are padded; set it to 1 "
            "(or model.use_remove_padding=true, where that is what keeps them padded)"
        )


def _check_divides(ranks: int, size: int, setting: str) -> None:
    if size < 1 or ranks % size:
        fitting = ", ".join(str(count) for count in range(1, ranks + 1) if ranks % count == 0)
        raise RanksError(
            f"{setting}={size}: the run has {ranks} ranks, which is no multiple of it; set one of {fitting}"
        )


_SIOCGIFADDR = 0x8915  # Linux: the address of an interface
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def name_interface(host: str) -> None:
    """Have gloo use the interface that faces `host`, unless the user named one; and NCCL, where all ranks are on this
    machine. Between machines NCCL chooses better by itself: it knows the fast ones."""
    # By default gloo takes the interface that the machine's own name resolves to. On many systems that is the loopback
    # interface, and a rank on another machine then tries to reach itself. On others it is the network's, and ranks of
    # a single machine then listen where other machines can reach them. NCCL takes the network's, too.
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
