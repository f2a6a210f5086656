"""Attacks on the sandbox, every one of them stopped; and proof that they would have worked outside."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import pytest
from attacks import ATTACKS, MACHINE_CALLS, SKIP_OUTSIDE

ROOT = Path(__file__).resolve().parents[2]
ENDLESS = ("timeout", "output")


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """Things of the host that attacks are after; values for the braces in their code."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "secret").write_text("secret")
    servers = []
    for family, address in (
        (socket.AF_INET, ("127.0.0.1", 0)),
        (socket.AF_UNIX, str(folder / "socket")),
        (socket.AF_UNIX, f"\0posttrain-test-{os.getpid()}"),
    ):
        server = socket.socket(family)
        server.bind(address)
        server.listen(32)
        servers.append(server)
    os.environ["SECRET_TOKEN"] = "secret"
    yield {
        "secret": str(folder / "secret"),
        "unix": str(folder / "socket"),
        "port": str(servers[0].getsockname()[1]),
        "pid": str(os.getpid()),
        "checkout": str(ROOT),
        "hostname": socket.gethostname(),
        "site": sysconfig.get_paths()["purelib"],
        "folder": folder,
    }
    del os.environ["SECRET_TOKEN"]
    for server in servers:
        server.close()


def filled(code, host):
    for name, value in host.items():
        code = code.replace("{" + name + "}", str(value))
    return code


def processes_below(pid):
    """All processes that a process started, and those that these started, by the host's /proc."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return children + [below for child in children for below in processes_below(child)]


def is_free_root():
    """Whether these tests run as a root who is not held by a container, so that attacks work outside."""
    fields = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    can_administrate = int(fields["CapEff"], 16) & 1 << 21
    return os.geteuid() == 0 and bool(can_administrate) and fields.get("Seccomp") == "0"


def bare(code, folder):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30).stdout


@pytest.mark.parametrize("name", ATTACKS)
def test_attack(name, box, hasty, host, tmp_path):
    attack = ATTACKS[name]
    code = filled(attack.code, host)
    sandbox = hasty if "timeout" in attack.ends else box
    result = sandbox.run(code)
    assert "EFFECT" not in result.stdout
    assert result.status in attack.ends, result
    assert len(result.stdout) + len(result.stderr) <= sandbox.config.output_kb << 10
    assert result.seconds < sandbox.config.timeout_s + 1
    assert_unharmed(sandbox)
    if attack.outside == "always" or (attack.outside == "root" and is_free_root()):
        assert "EFFECT" in bare(code, tmp_path), "this attack proves nothing: it does not work outside either"


def assert_unharmed(sandbox):
    """The next job is served by the same processes, finds nothing, and nothing else is left running."""
    (process,) = sandbox._idle
    launcher = process._process.pid
    assert len(processes_below(launcher)) == 1  # the template
    found = sandbox.run("import os, json\nprint(os.listdir('.'), os.listdir(os.environ['TMPDIR']), json.dumps([1]))")
    assert (found.status, found.stdout) == ("ok", "[] [] [1]\n")
    assert sandbox._idle == [process] and process._process.pid == launcher and process._process.poll() is None


CALL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
result = libc.syscall({number}, {arguments})
print("passed" if result >= 0 else ctypes.get_errno())
"""
REFUSED, ABSENT = "1\n", "38\n"  # EPERM, ENOSYS


def call(name):
    x86, arm, arguments = MACHINE_CALLS[name]
    number = {"x86_64": x86, "aarch64": arm}[platform.machine()]
    return CALL.format(number=number, arguments=", ".join([arguments or "0", *["0"] * 5]))


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """What the calls answer without a sandbox, where these tests run as a free root and the call does no harm."""
    names = [name for name in MACHINE_CALLS if name not in SKIP_OUTSIDE] if is_free_root() else []
    answers = bare("".join(map(call, names)), tmp_path_factory.mktemp("outside")).splitlines(keepends=True)
    return dict(zip(names, answers, strict=True))


@pytest.mark.parametrize("name", MACHINE_CALLS)
def test_attack_by_system_call(name, box, outside):
    expected = ABSENT if name == "clone3" else REFUSED
    assert box.run(call(name)).stdout == expected
    assert outside.get(name) != expected, "this attack proves nothing: the call is refused outside too"


def test_a_fork_into_a_namespace_is_refused_though_forks_are_allowed(box):
    number = {"x86_64": 56, "aarch64": 220}[platform.machine()]
    assert box.run("import os\nif os.fork(): os.wait(); print('parent')").stdout == "parent\n"
    code = CALL.format(number=number, arguments=f"{0x10000000 | 17}, 0, 0, 0, 0")
    assert box.run(code).stdout == REFUSED


LEAKS = {
    "file in /tmp": (
        "import os; open(os.environ['TMPDIR'] + '/left', 'w').write('x')",
        "import os; open(os.environ['TMPDIR'] + '/left')",
    ),
    "file in the working folder": ("open('left.py', 'w').write('x')", "import left"),
    "shared memory": ("open('/dev/shm/left', 'w').write('x')", "open('/dev/shm/left')"),
    "module state": ("import json\njson.left = 1", "import json\njson.left"),
    "builtins": ("import builtins\nbuiltins.left = 1", "left"),
    "imported module": ("import colorsys, sys\nsys.left = 1", "import sys\nsys.left"),
    "environment": ("import os\nos.environ['LEFT'] = '1'", "import os\nos.environ['LEFT']"),
    "random state": ("import random\nrandom.seed(7)", "import random\nassert random.random() != 0.8444218515250481"),
    "working folder": ("import os\nos.chdir('/')", "import os\nassert os.getcwd() == '/'"),
    "signal handler": (
        "import signal\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)",
        "import signal\nassert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN",
    ),
    "process": (
        "import os, time\nif os.fork() == 0: time.sleep(60)",
        "import os\nfor pid in range(3, 200): \n    try: os.kill(pid, 0); break\n    except ProcessLookupError: pass\n"
        "else: raise SystemExit(1)",
    ),
}


@pytest.mark.parametrize("name", LEAKS)
def test_nothing_of_a_job_is_left_for_the_next(name, box):
    leave, find = LEAKS[name]
    assert box.run(leave).status == "ok"
    assert box.run(find).status == "error"


def test_jobs_at_the_same_time_do_not_see_each_other(box):
    results = {}
    meet = (
        "import time, os\nplace = os.environ['TMPDIR']\nopen(place + '/here', 'w').write('x')\ntime.sleep(0.3)\n"
        "print(os.listdir(place), os.getppid())"
    )

    def job(number):
        results[number] = box.run(meet).stdout

    threads = [threading.Thread(target=job, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: "['here'] 1\n", 1: "['here'] 1\n"}
    box._idle.pop().kill()  # the tests above count on one process
