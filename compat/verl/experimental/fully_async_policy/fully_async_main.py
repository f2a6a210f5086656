"""`python3 -m verl.experimental.fully_async_policy.fully_async_main key=value ...`: posttrain's training with
`trainer.max_staleness`, on `rollout.nnodes` x `rollout.n_gpus_per_node` workers that only generate."""

import sys

from posttrain.interrupts import one_interrupt
from posttrain.trainer import main_ppo as ours
from verl.experimental.one_step_off_policy.main_ppo import entry, without_own_files

OWN = "fully_async_ppo_trainer", "fully_async_ppo_megatron_trainer"
"""verl's files of settings for this program."""
DEFAULTS = {"staleness_threshold": 0.1, "trigger_parameter_sync_step": 4, "require_batches": 1, "partial_rollout": True}
"""What those files say of `async_training`, where the command does not."""


def settings(args: list[str]) -> list[str]:
    """The command's arguments for posttrain."""
    said = {arg.lstrip("+").partition("=")[0] for arg in args}
    defaults = {f"async_training.{name}": value for name, value in DEFAULTS.items()}
    return [*(f"{key}={value}" for key, value in defaults.items() if key not in said), *without_own_files(args, OWN)]


main = entry(settings)

if __name__ == "__main__":
    with one_interrupt():
        sys.exit(ours.cli(main))
