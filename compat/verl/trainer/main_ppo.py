"""`python3 -m verl.trainer.main_ppo key=value ...`: posttrain's training with verl's keys.

`run_ppo` and `TaskRunner` are those of scripts that have an entry of their own.
"""

from __future__ import annotations

import sys
from typing import Any

from posttrain.interrupts import one_interrupt
from posttrain.trainer import main_ppo as ours
from verl._missing import not_given

__getattr__ = not_given(__name__)


def main(config: Any = None) -> Any:
    """Train with the command line's settings, or with a configuration."""
    return run_ppo(ours._from_command_line(sys.argv[1:]) if config is None else config)


def run_ppo(config: Any, task_runner_class: Any = None) -> Any:
    """Train in this process: Ray is started by itself where there is more than one worker."""
    if config is None:  # only shown
        return None
    return ours.run_ppo(config, task_runner_class)


TaskRunner = ours.TaskRunner


def cli() -> int:
    """`main`, with errors meant for users printed as they are."""
    return ours.cli(main)


if __name__ == "__main__":
    with one_interrupt():
        sys.exit(cli())
