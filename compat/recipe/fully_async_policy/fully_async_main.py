"""`python3 -m recipe.fully_async_policy.fully_async_main key=value ...`: where the program was before."""

import sys

from posttrain.interrupts import one_interrupt
from posttrain.trainer import main_ppo as ours
from verl.experimental.fully_async_policy.fully_async_main import main

__all__ = ["main"]

if __name__ == "__main__":
    with one_interrupt():
        sys.exit(ours.cli(main))
