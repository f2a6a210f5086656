from __future__ import annotations

import pytest
from viewing import Client, small_run


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("view"))


@pytest.fixture(scope="session")
def client(made):
    found = Client(made)
    yield found
    found.close()
