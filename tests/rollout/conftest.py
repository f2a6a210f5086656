"""These tests compute with two threads."""

import pytest


@pytest.fixture(autouse=True)
def _two_threads(two_threads: None) -> None:
    """What is divided among threads must be right when it is."""
