"""`python3 -m verl.trainer.main_eval key=value ...`: scores of a file of responses."""

import sys

from posttrain.trainer.main_eval import main
from posttrain.trainer.main_generation import cli

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(cli(main))
