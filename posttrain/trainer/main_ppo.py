"""The entry of PPO, GRPO and the others: `python -m posttrain.trainer.main_ppo key=value ...`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from posttrain.config.trainer import one_process
from posttrain.doctor import dry_run
from posttrain.interrupts import one_interrupt
from posttrain.tracking.console import exit_status as status_of_work
from posttrain.tracking.console import prepare_streams, split_output_mode
from posttrain.tracking.progress import waiting
from posttrain.trainer.run.entry import as_resolved, greeting, read_command_line, run_with_console

HELP = """usage: python -m posttrain.trainer.main_ppo key=value ... [--config-path DIR --config-name NAME] [--cfg job]
                                             [--quiet | --json]

Trains with the settings below, each followed by where its value comes from. `posttrain explain KEY` says more.
"""


def main(config: Any = None) -> Any:
    """Compose `ppo_trainer` from `config/` with the command line (unless a configuration is given), and train."""
    if config is not None:
        return run_ppo(config)
    args, mode = split_output_mode(sys.argv[1:])
    config = read_command_line(args, HELP)
    return None if config is None else run_command(config, mode, greeting(config))


def run_command(resolved: Any, mode: str, first: str = "") -> Any:
    return run_with_console(resolved, mode, run_ppo, first)


def run_ppo(config: Any, task_runner_class: Any = None) -> Any:
    """Run one training. The runner works in this process: rewards, signals and the console are its own. With one
    worker Ray is not needed; several live in processes that Ray starts.

    `config` is what `load_config` gave, a PPOConfig, or a nested mapping of settings.
    """
    runner = (task_runner_class or TaskRunner)()
    return runner.run(config)


class TaskRunner:
    """Builds and runs the trainer; a subclass given to `run_ppo` can do something else with the configuration."""

    def run(self, config: Any) -> Any:
        from posttrain.trainer.constants_ppo import apply_environment

        apply_environment()
        resolved = as_resolved(config)
        if resolved.dry_run:
            return dry_run(resolved)
        from posttrain.data.fields import check_prompt
        from posttrain.trainer.run.entry import check_inputs

        check_inputs(resolved, check_prompt)
        if one_process(resolved.config):
            print("One worker: Ray is not needed, the run works in this process.")
        with waiting():
            from posttrain.trainer.ppo.runner import run_training

        return run_training(resolved)


def cli(entry: Callable[[], Any] = main) -> int:
    """An entry with errors meant for users printed as they are."""
    prepare_streams()
    return status_of_work(lambda: exit_status(entry()))


def exit_status(result: Any) -> int:
    """The process's status for what a runner gave; a custom runner may give anything."""
    return getattr(result, "exit_status", 0)


if __name__ == "__main__":
    with one_interrupt():
        sys.exit(cli())
