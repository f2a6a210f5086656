"""`python -m posttrain` is the `posttrain` command."""

import sys

from posttrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
