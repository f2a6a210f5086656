"""A lazy module is imported by its first use, and is the real one then."""

from __future__ import annotations

import subprocess
import sys


def test_torch_is_imported_by_the_first_attribute() -> None:
    script = """
import sys
from posttrain.lazy import functional, numpy, torch
print("torch" in sys.modules, "numpy" in sys.modules)
x = torch.ones(2)
import torch as real
print(torch.Tensor is real.Tensor, isinstance(x, torch.Tensor), functional.relu is real.nn.functional.relu)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said == "False False\nTrue True True\n"
