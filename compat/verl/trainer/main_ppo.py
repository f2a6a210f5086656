"""`python3 -m verl.trainer.main_ppo key=value ...`: posttrain's training with verl's keys.

`run_ppo` and `TaskRunner` are those of scripts that have an entry of their own.
"""

from __future__ import annotations

import sys
from typing import Any

from posttrain.interrupts import one_interrupt
from posttrain.trainer import main_ppo as ours
from verl._missing import not_given


def __getattr__(name: str) -> Any:
    if name in ("create_rl_dataset", "create_rl_sampler"):
        from verl.trainer.ppo import utils

        return getattr(utils, name)
    return not_given(__name__)(name)


def main(config: Any = None) -> Any:
    """Train with the command line's settings, or with a configuration."""
    if config is not None:
        return run_ppo(config)
    from posttrain.tracking.console import split_output_mode
    from posttrain.trainer.run.entry import read_command_line
    from verl._added import take_added
    from verl._named_manager import NamedManager

    args, mode = split_output_mode(sys.argv[1:])
    manager, args = NamedManager.taken_from(take_added(args))
    resolved = read_command_line(args, ours.HELP)
    if resolved is None:
        return None
    if manager is None:
        return ours.run_command(resolved, mode, ours.greeting(resolved))
    print(ours.greeting(resolved))
    return manager.train(resolved)


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
