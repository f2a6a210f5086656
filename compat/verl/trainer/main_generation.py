"""`python3 -m verl.trainer.main_generation key=value ...`: responses of a model to a file of prompts."""

import sys

from posttrain.trainer.main_generation import cli, main
from verl._missing import not_given

__all__ = ["main"]
__getattr__ = not_given(__name__)

if __name__ == "__main__":
    sys.exit(cli(main))
