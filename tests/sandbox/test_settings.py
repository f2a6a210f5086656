"""Each limit of `reward.sandbox` is the one that is set: programs that the default lets pass end at a smaller one."""

from __future__ import annotations

import pytest
from sandbox_tools import opened

PROGRAMS = {
    "timeout": "import time\ntime.sleep(1.2)",
    "memory": "x = b'a' * (200 << 20)",
    "output": "print('x' * 20_000)",
    "disk": "open('f', 'wb').write(b'a' * (8 << 20))",
    "processes": "import threading, time\n"
    "for _ in range(8): threading.Thread(target=time.sleep, args=(0.2,)).start()\nprint('started')",
}


@pytest.fixture(scope="module")
def usual():
    with opened() as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def strict():
    with opened(timeout_s=0.6, memory_mb=128, output_kb=8, disk_mb=4) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def few():
    """Processes alone are limited: threads take time and memory too, which must not be what ends the program."""
    with opened(processes=4) as sandbox:
        yield sandbox


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_limit_is_the_one_that_is_set(usual, strict, few, name):
    code = PROGRAMS[name]
    assert usual.run(code).status == "ok"
    result = (few if name == "processes" else strict).run(code)
    if name in ("timeout", "memory", "output"):
        assert result.status == name
    else:
        assert result.status in ("error", name) and "started" not in result.stdout
