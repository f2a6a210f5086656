"""A machine of a run over several that is not the first: it makes no run of its own, and lends itself to that one."""

from __future__ import annotations

from pathlib import Path

from posttrain.config.resolved import Resolved
from posttrain.tracking.console import hang_up_is_no_end
from posttrain.tracking.progress import say
from posttrain.trainer.run.result import RunResult

SERVED = "served"


def serve_run(resolved: Resolved) -> RunResult:
    """Join the Ray of machine 0 until its run has ended. Nothing is written here: the run is the first machine's."""
    from posttrain.controller import torchrun
    from posttrain.controller.ray_address import given_address
    from posttrain.controller.ray_serving import serve

    trainer = resolved.config.trainer
    say(f"Machine {resolved.node_rank} of {trainer.nnodes} (trainer.node_rank): machine 0 drives the run.")
    address, token = torchrun.wait_for_address() if torchrun.is_meeting() else (given_address(), "")
    assert address is not None  # checked with the settings
    with hang_up_is_no_end():
        serve(address, say, token)
    return RunResult(Path(trainer.default_local_dir), SERVED, 0)
