"""`python3 -m recipe.dapo.main_dapo key=value ...`: DAPO is posttrain's trainer with dynamic sampling
(`algorithm.filter_groups`) and the penalty for overlong responses (`reward_model.reward_kwargs.overlong_buffer_cfg`).

`recipe` and `recipe.dapo` are namespaces, without `__init__.py`: a folder `recipe/` of your own comes before them."""

import sys

from posttrain.interrupts import one_interrupt
from verl.trainer.main_ppo import TaskRunner, cli, main, run_ppo

__all__ = ["TaskRunner", "main", "run_ppo"]

if __name__ == "__main__":
    with one_interrupt():
        sys.exit(cli())
