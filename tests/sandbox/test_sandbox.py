"""What the sandbox gives its callers: outputs, limits, several inputs, other programs, both modes, and tidy ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from patience import gone
from sandbox_tools import SMALL, opened

from posttrain.config.rollout import SandboxConfig
from posttrain.sandbox import Sandbox, usage


@pytest.fixture(params=["kernel", "unsafe"], scope="module")
def either(request):
    with opened(mode=request.param, timeout_s=5.0, **SMALL) as sandbox:
        yield sandbox


def test_a_script_has_its_output_input_files_and_exit_code(either):
    code = "import sys\nprint(input() + open('data/a.txt').read())\nprint('oops', file=sys.stderr)\nsys.exit(3)"
    result = either.run(code, stdin="one ", files={"data/a.txt": "two"})
    assert (result.status, result.exit_code, result.stdout, result.stderr) == ("error", 3, "one two\n", "oops\n")
    assert 0 < result.seconds < 5 and result.memory_mb > 1


def test_a_traceback_shows_the_program_and_not_the_harness(either):
    result = either.run("def f():\n    return 1 / 0\nf()")
    assert result.stderr.splitlines()[1:3] == ['  File "program.py", line 3, in <module>', "    f()"]
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n") and "posttrain" not in result.stderr


def test_other_programs_run_too(either):
    result = either.run(argv=["sh", "-c", "cat; echo $HOME | wc -l; exit 2"], stdin="in\n")
    assert (result.stdout, result.exit_code) == ("in\n1\n", 2)
    assert either.run(argv=["no-such-program"]).exit_code == 127


def test_what_was_written_before_a_deadline_is_kept(hasty):
    result = hasty.run("import time\nprint('begun', flush=True)\ntime.sleep(99)")
    assert (result.status, result.stdout) == ("timeout", "begun\n")
    assert result.seconds == pytest.approx(0.5, abs=0.3)


def test_inputs_run_in_fresh_processes_within_one_deadline(hasty):
    counts = hasty.run_each(
        "import builtins\nbuiltins.n = getattr(builtins, 'n', 0) + 1\nprint(builtins.n, input())", ["a", "b"]
    )
    assert [result.stdout for result in counts] == ["1 a\n", "1 b\n"]
    slow = hasty.run_each("import time\ntime.sleep(float(input()))", ["0.01", "9", "0.01"])
    assert [result.status for result in slow] == ["ok", "timeout"]
    stopped = hasty.run_each("raise SystemExit(int(input()))", ["0", "1", "0"], until_failure=True)
    assert [result.status for result in stopped] == ["ok", "error"]


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ("timeout", "while True: pass"),
        ("memory", "x = [bytearray(b'a' * (1 << 20)) for _ in range(400)]"),
        ("output", "while True: print('x' * 999)"),
        ("error", "for i in range(99): open(f'{i}', 'wb').write(b'a' * (9 << 20))"),
    ],
)
def test_limits_hold_in_both_modes(either, status, code):
    config = SandboxConfig(mode=either.config.mode, timeout_s=0.7, **SMALL)
    with Sandbox(config) as sandbox:
        result = sandbox.run(code)
    assert result.status == status
    assert result.seconds < 2


def test_packages_of_the_environment_can_be_imported(box):
    assert box.run("import numpy\nprint(numpy.arange(4).sum())").stdout == "6\n"


def test_the_usual_libraries_of_processes_and_events_work(box):
    code = """
import asyncio, multiprocessing, threading, subprocess, tempfile, getpass
async def work():
    await asyncio.sleep(0.001)
    return 1
found = [asyncio.run(work())]
with multiprocessing.get_context("fork").Pool(2) as pool:
    found += pool.map(abs, [-2, -3])
thread = threading.Thread(target=found.append, args=(4,))
thread.start(); thread.join()
with tempfile.NamedTemporaryFile("w") as file:
    file.write("5"); file.flush()
    found.append(int(subprocess.run(["cat", file.name], capture_output=True).stdout))
print(found, getpass.getuser())
"""
    result = box.run(code)
    assert (result.stdout, result.stderr, result.status) == ("[1, 2, 3, 4, 5] user\n", "", "ok")


def test_a_program_does_the_same_in_every_job(box):
    code = "import random\nprint(random.random(), hash('text'), sorted({'a', 'b', 'c'}, key=hash))"
    assert box.run(code).stdout == box.run(code).stdout


def test_a_sandbox_that_died_is_replaced_and_a_job_that_died_with_it_is_lost(box):
    launcher = box._idle[0]._process
    launcher.kill()
    launcher.wait()
    assert box.run("print(1)").stdout == "1\n"
    threading.Timer(0.3, box._idle[0]._process.kill).start()
    assert box.run("import time\ntime.sleep(9)").status == "lost"
    assert box.run("print(1)").stdout == "1\n"


def test_wrong_use_is_refused(box):
    with pytest.raises(ValueError, match="code or argv"):
        box.run()
    sandbox = Sandbox()
    sandbox.close()
    with pytest.raises(RuntimeError, match="closed"):
        sandbox.run("1")


OWNER = """
import os, sys, time
from posttrain.config.rollout import SandboxConfig
from posttrain.sandbox import Sandbox
sandbox = Sandbox(SandboxConfig(timeout_s=60))
sandbox.start()
print(sandbox._idle[0]._process.pid, flush=True)
sandbox.run("import time, os\\nos.fork()\\ntime.sleep(60)")
"""


def test_everything_dies_with_the_process_that_owns_it(box):
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    launcher = int(owner.stdout.readline())
    time.sleep(0.3)
    family = below(launcher)
    assert len(family) == 4  # the template, the job's first process, the program and its child
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert gone(launcher, *family)


def below(pid):
    children = [int(c) for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()]
    return children + [one for child in children for one in below(child)]


def test_an_ordinary_user_is_isolated_as_well_as_root(box):
    if os.geteuid() != 0:
        pytest.skip("these tests already run as an ordinary user")
    # The checkout may lie in a folder of root's, so import everything first and isolate afterwards.
    code = (
        "import os\nimport posttrain.sandbox.launcher as launcher\nfrom posttrain.sandbox.sandbox import python_paths\n"
        "paths = python_paths()\nos.setgroups([])\nos.setgid(1234)\nos.setuid(1234)\n"
        "from posttrain.sandbox.kernel import prctl\nprctl(4, 1, 'dumpable')\n"
        "launcher._isolate({'paths': [p for p in paths if os.access(p, os.R_OK)]})\n"
        "print(os.getuid(), open('/etc/passwd').read().strip(), os.path.exists('/home'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "0 user:x:1000:1000::/box/work:/bin/sh False\n", done.stderr


PROJECT = """
import os, sys
from posttrain.sandbox import Sandbox
look = "import os, sys\\nfor place in sys.argv[1:] or %r: print(sorted(os.listdir(place)))\\n"
look += "import subprocess\\nprint(subprocess.run([%r, '-c', 'print(1 + 1)'], capture_output=True, text=True).stdout)"
with Sandbox() as sandbox:
    result = sandbox.run(look % ([sys.prefix, sys.prefix + "/bin", sys.prefix + "/lib"], sys.executable))
print(result.stdout, result.stderr)
"""


def test_an_environment_in_the_root_of_a_project_does_not_show_the_project(box, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    for name in (".env", "tests/test_f.py", "lib/keys.py", "bin/deploy"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("secret")
    search = os.pathsep.join([str(Path(__file__).parents[2]), *(path for path in sys.path if "site-packages" in path)])
    done = subprocess.run(
        [tmp_path / "bin" / "python", "-c", PROJECT], capture_output=True, text=True, env={"PYTHONPATH": search}
    )
    library = f"python{sys.version_info.major}.{sys.version_info.minor}"
    shown = [["bin", "lib", "pyvenv.cfg"], ["python"], [library]]
    assert done.stdout.splitlines()[:4] == [*map(str, shown), "2"], done.stderr


def test_memory_in_sockets_and_pipes_is_counted_and_reported(box):
    wait = "import socket, time\nkept = [socket.socketpair() for _ in range(25)]\ntime.sleep(0.3)"
    assert box.run(wait).memory_mb > 50 * usage.socket_size() / (1 << 20) + 15  # sockets, and a Python
    proc, everything = os.open("/proc", os.O_RDONLY), []
    before = usage.measure_buffers(proc, [os.getpid()], 64)
    everything += [*socket.socketpair(), *map(os.fdopen, os.pipe(), "rw")]
    after = usage.measure_buffers(proc, [os.getpid()], 64)
    assert after - before == 2 * usage.socket_size() + 16 * os.sysconf("SC_PAGE_SIZE")
    for one in everything:
        one.close()
    os.close(proc)


SPIN = """
import os, time
def more(): return os.getpriority(os.PRIO_PROCESS, 0) - {here}
print(os.getsid(0), more())
os.setsid()
children = []
for _ in range({count}):
    children.append(os.fork())
    if children[-1] == 0: break
end = time.monotonic() + {seconds}
while time.monotonic() < end: pass
if 0 in children: os._exit(more())
nice = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
print(os.getsid(0), more(), min(nice, default=0))
"""


def test_processes_of_a_job_share_one_session_and_one_share_of_the_processors(box):
    here = os.getpriority(os.PRIO_PROCESS, 0)
    sessions = box.run(SPIN.format(here=here, count=0, seconds=0.2)).stdout.split()
    assert sessions == ["1", "0", "1", "0", "0"]  # alone it is as nice as any
    started, nice, session, own, children = map(
        int, box.run(SPIN.format(here=here, count=5, seconds=2.5)).stdout.split()
    )
    assert (started, nice, session) == (1, 0, 1)
    assert 4 <= own <= 19 and 4 <= children <= 19  # 1.25 ** 4 > 2: two of them at a time at least
