"""`python3 -m verl.trainer.main_eval key=value ...`: scores of a file of responses."""

import sys

from posttrain.trainer.main_eval import main
from posttrain.trainer.main_generation import cli
from verl._missing import not_given

__all__ = ["main"]
__getattr__ = not_given(__name__)

if __name__ == "__main__":
    sys.exit(cli(main))
