"""`python3 -m verl.experimental.one_step_off_policy.main_ppo key=value ...`: posttrain's training with
`trainer.one_step_off=True`, on `rollout.nnodes` x `rollout.n_gpus_per_node` workers that only generate."""

import sys
from collections.abc import Callable
from typing import Any

from posttrain.interrupts import one_interrupt
from posttrain.trainer import main_ppo as ours
from verl.trainer import main_ppo

OWN = "one_step_off_ppo_trainer", "one_step_off_ppo_megatron_trainer"
"""verl's files of settings for this program. What they add to verl's usual ones is the layout."""


def without_own_files(args: list[str], files: tuple[str, ...]) -> list[str]:
    """A command's arguments without those that name these files of settings of verl's."""
    named = {f"--config-name={name}{end}" for name in files for end in ("", ".yaml")}
    own = [arg for arg in args if arg.replace("'", "") in named]
    return [arg for arg in args if arg not in own and not (own and arg.startswith("--config-path="))]


def entry(settings: Callable[[list[str]], list[str]]) -> Callable[..., Any]:
    """The `main` of a program; `settings` gives the arguments for posttrain."""

    def main(config: Any = None) -> Any:
        """Train with the command line's settings, or with a configuration."""
        if config is None:
            sys.argv[1:] = settings(sys.argv[1:])
        return main_ppo.main(config)

    return main


def settings(args: list[str]) -> list[str]:
    """The command's arguments for posttrain."""
    return ["trainer.one_step_off=True", *without_own_files(args, OWN)]


main = entry(settings)


if __name__ == "__main__":
    with one_interrupt():
        sys.exit(ours.cli(main))
