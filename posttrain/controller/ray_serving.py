"""What the other machines of a run do than the first: they join its Ray, and leave when the run has ended."""

from __future__ import annotations

import time
from collections.abc import Callable

from posttrain.controller.ray_address import connection_error, no_ray, shown_by_a_node
from posttrain.controller.ray_node import RayNode
from posttrain.errors import UserError

HEAD_S = 300.0  # for the head, which the first machine starts when it has read its data
EVERY_S = 0.5
SILENCES = 3  # times in a row that nothing is found before it is believed


class RunNeverCame(UserError):
    """The Ray that this machine has joined ended before the run used it."""


def serve(address: str, tell: Callable[[str], None], token: str = "") -> None:
    """Have this machine serve the run of the Ray at `address` until it has ended."""
    _wait_for_head(address, tell)
    node = RayNode([f"--address={address}"], shown_by_a_node(token))
    try:
        tell(f"This machine has joined the Ray at {address}. It serves machine 0's run until that ends.")
        _serve_until_end(node, address)
    finally:
        node.close()
    tell("The run has left this machine.")


def _wait_for_head(address: str, tell: Callable[[str], None]) -> None:
    until, told = time.monotonic() + HEAD_S, False
    while (error_there := connection_error(address)) is not None:
        if time.monotonic() > until:
            raise no_ray(address, error_there)
        if not told:
            tell(f"Waiting {HEAD_S:.0f} s for a Ray to answer at {address} ({error_there}).")
        told = True
        time.sleep(EVERY_S)


def _serve_until_end(node: RayNode, address: str) -> None:
    """Until ranks were at work here and are gone, or the head is."""
    worked, idle, silent = False, 0, 0
    while idle < SILENCES and silent < SILENCES and not node.ended():
        time.sleep(EVERY_S)
        at_work = node.ranks() > 0
        worked = worked or at_work
        idle = idle + 1 if worked and not at_work else 0
        silent = silent + 1 if connection_error(address) is not None else 0
    if not worked:
        raise RunNeverCame(
            f"The Ray at {address} is gone, and no worker was started on this machine: see what the command of machine "
            "0 (trainer.node_rank=0) says."
        )
