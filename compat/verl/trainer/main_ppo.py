"""`python3 -m verl.trainer.main_ppo key=value ...`: posttrain's training with verl's keys.

`run_ppo` and `TaskRunner` are those of scripts that have an entry of their own.
"""

from __future__ import annotations

import sys
from typing import Any

from posttrain.errors import UserError
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
    if task_runner_class is not None:
        from verl.single_controller.ray.base import plain_class

        task_runner_class = plain_class(task_runner_class)
        _refuse_hooks(task_runner_class)
    return ours.run_ppo(config, task_runner_class)


TaskRunner = ours.TaskRunner
_HOOKS = ("add_actor_rollout_worker", "add_critic_worker", "add_reward_model_worker", "add_reward_model_resource_pool")
_HOOKS += ("add_ref_policy_worker", "add_teacher_model_resource_pool", "init_resource_pool_mgr")


def _refuse_hooks(runner: Any) -> None:
    """verl's `TaskRunner.run` calls these; posttrain's has no use for them, so that overriding one has no effect."""
    hook = next((name for name in _HOOKS if hasattr(runner, name)), None)
    if hook is not None and getattr(runner, "run", None) is TaskRunner.run:
        raise UserError(
            f"{runner.__name__}.{hook} is not called: workers and pools come from the settings (docs/pools.md).\n"
            "  set in: run_ppo(config, task_runner_class)\n"
            "  to do:  override `run` as well, and give RayPPOTrainer your workers and your pools"
        )


def cli() -> int:
    """`main`, with errors meant for users printed as they are."""
    return ours.cli(main)


if __name__ == "__main__":
    with one_interrupt():
        sys.exit(cli())
