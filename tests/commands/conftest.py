"""Commands are tried on small runs, which the tests of the trainer make."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "trainer"))
