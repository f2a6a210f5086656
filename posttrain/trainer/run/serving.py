"""A run over several machines is driven by one. The command on another lends that its machine, or leaves."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec

from posttrain.config.resolved import Resolved
from posttrain.tracking.console import ignore_hangup
from posttrain.tracking.progress import say
from posttrain.tracking.rundir import RunTaken
from posttrain.trainer.run.result import RunResult

SERVED = "served"
Named = ParamSpec("Named")
Run = Callable[Concatenate[Resolved, Named], RunResult]


def driven_by_one_machine(run: Run[Named]) -> Run[Named]:
    """`run`, unless this machine is another than the first, or the same command on a machine of the same Ray was
    earlier and has the run's directory."""

    @wraps(run)
    def driven(resolved: Resolved, *arguments: Named.args, **named: Named.kwargs) -> RunResult:
        if resolved.node_rank:
            return _served(resolved)
        try:
            return run(resolved, *arguments, **named)
        except RunTaken as taken:
            if resolved.config.trainer.nnodes == 1:
                raise
            say(f"{taken} If that is the same command on another machine: it drives the run, and this one leaves.")
            return _nothing_of_its_own(resolved)

    return driven


def _served(resolved: Resolved) -> RunResult:
    """Join the Ray of machine 0 until its run has ended."""
    from posttrain.controller import torchrun
    from posttrain.controller.ray_address import given_address
    from posttrain.controller.ray_serving import serve

    say(f"Machine {resolved.node_rank} of {resolved.config.trainer.nnodes}: machine 0 drives the run.")
    shared = Path(resolved.config.trainer.default_local_dir)
    address, token = torchrun.wait_for_address(shared) if torchrun.is_meeting() else (given_address(), "")
    assert address is not None  # checked with the settings
    with ignore_hangup():
        serve(address, say, token)
    return _nothing_of_its_own(resolved)


def _nothing_of_its_own(resolved: Resolved) -> RunResult:
    return RunResult(Path(resolved.config.trainer.default_local_dir), SERVED, 0)
