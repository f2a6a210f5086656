"""`python3 -m recipe.one_step_off_policy.main_ppo key=value ...`: where the program was before it was one of verl's."""

import sys

from posttrain.interrupts import one_interrupt
from posttrain.trainer import main_ppo as ours
from verl.experimental.one_step_off_policy.main_ppo import main

__all__ = ["main"]

if __name__ == "__main__":
    with one_interrupt():
        sys.exit(ours.cli(main))
