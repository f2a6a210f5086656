"""These tests compute with two threads."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "trainer"))


@pytest.fixture(autouse=True)
def _two_threads(two_threads: None) -> None:
    """What is divided among threads must be right when it is."""
