"""The entry of PPO, GRPO and the others: `python -m posttrain.trainer.main_ppo key=value ...`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from posttrain.config.parallel import one_process
from posttrain.doctor import dry_run
from posttrain.interrupts import one_interrupt
from posttrain.tracking.console import exit_status as status_of_work
from posttrain.tracking.console import prepare_streams, protect_console
from posttrain.tracking.terminal_text import print_text
from posttrain.tracking.waiting import waiting

HELP = """usage: python -m posttrain.trainer.main_ppo key=value ... [--config-path DIR --config-name NAME] [--cfg job]
                                             [--quiet | --json]

Trains with the settings below, each followed by where its value comes from. `posttrain explain KEY` says more.
"""


def main(config: Any = None) -> Any:
    """Compose `ppo_trainer` from `config/` with the command line (unless a configuration is given), and train."""
    if config is not None:
        return run_ppo(config)
    from posttrain.tracking.console import split_output_mode

    args, mode = split_output_mode(sys.argv[1:])
    config = _from_command_line(args)
    return None if config is None else run_command(config, mode, greeting(config))


def _from_command_line(args: list[str]) -> Any:
    from posttrain.config import load_config

    shows = any(arg.startswith("--cfg") or arg in ("-c", "-h", "--help") for arg in args)
    resolved = load_config(args, environment=not shows)
    if resolved.show == "help":
        print(HELP)
        print_text(resolved.describe())
        return None
    if resolved.show is not None:
        print(resolved.to_yaml(), end="")
        return None
    protect_console()
    return resolved


def greeting(resolved: Any) -> str:
    return f"Configuration: {resolved.main_file} and the command line"


def run_command(resolved: Any, mode: str, first: str = "") -> Any:
    """A training that has this process's console: it speaks as `mode` says, and libraries speak into its log."""
    from posttrain.tracking.console import command_console

    with command_console(mode) as console:
        if first:
            print(first)
        result = run_ppo(resolved)
        console.end(result)
        return result


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
        from posttrain.trainer.run.preflight import check_inputs

        check_inputs(resolved, check_prompt)
        if one_process(resolved.config):
            print("One worker: Ray is not needed, the run works in this process.")
        with waiting():
            from posttrain.trainer.ppo.runner import run_training

        return run_training(resolved)


def as_resolved(config: Any) -> Any:
    """A checked configuration from whatever a caller has."""
    from posttrain.config import PPOConfig, Resolved, load_config

    if isinstance(config, Resolved):
        return config
    if isinstance(config, PPOConfig):
        config = config.to_dict()
    return load_config(config, environment=True)


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
