"""Every key that is known of verl, by program; from its trees and from public run scripts."""

from __future__ import annotations

from functools import cache
from pathlib import Path

KEYS_FILE = Path(__file__).with_name("keys.txt")


@cache
def verl_keys() -> dict[str, str]:
    """Every key known of verl -> its program: `main_ppo`, `sft_trainer` or `main_generation`."""
    keys, program = {}, ""
    for line in KEYS_FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            program = line.strip("[]")
        elif line and not line.startswith("#"):
            keys[line] = program
    return keys
