"""The first process of a job: locks itself in, forks the program, and reports to the caller.

It stays between the program and the caller. The program has no descriptor that leads out of the sandbox, and cannot
signal or read this process. The order matters: the tests are read only after the program was forked.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
import tempfile
from typing import Any

from posttrain.sandbox import kernel, wire
from posttrain.sandbox.judge import judge
from posttrain.sandbox.kernel import install_filter
from posttrain.sandbox.program import answer_calls, run_argv, run_source
from posttrain.sandbox.supervise import Ended, Program
from posttrain.sandbox.usage import address_space

_NAMESPACES = kernel.NEWUSER | kernel.NEWNS | kernel.NEWIPC
_MB = 1 << 20
BOX, WORK, TMP = "/box", "/box/work", "/box/tmp"


def main(channel: int, limits: dict[str, Any], proc: int, *, isolated: bool) -> None:
    """Run one job, from the fork to the last message."""
    os.setsid()  # detaches from the terminal; the whole job is one session
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the first process of a namespace ignores it otherwise
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    try:
        folder = _lock_down(channel, limits, proc, isolated)
    except OSError as error:
        wire.send(channel, {"refused": getattr(error, "step", str(error)), "errno": error.errno})
        return
    request = wire.receive(channel)
    for name, content in request["files"].items():
        _write_file(name, content)
    serve = _judge_program if request["tests"] else _run_program
    serve(channel, request, limits)
    if not isolated:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


def _lock_down(channel: int, limits: dict[str, Any], proc: int, isolated: bool) -> str:
    # Applies everything that confines the job. Afterwards not even this process could undo it.
    base, folder = address_space(proc), "/"
    if isolated:
        kernel.unshare(_NAMESPACES, "namespaces of a job")
        _map_user(proc)
        _mount_box(limits["disk_mb"], limits["files"])
        work, tmp = WORK, TMP
    else:
        folder = tempfile.mkdtemp(prefix="posttrain-job-")
        work, tmp = os.path.join(folder, "work"), os.path.join(folder, "tmp")
        os.mkdir(work)
        os.mkdir(tmp)
    os.chdir(work)
    os.environ.update({"HOME": work, "TMPDIR": tmp, "PWD": work})
    tempfile.tempdir = None
    kernel.close_all_but([0, 1, 2, channel])
    _set_limits(limits, base)
    os.umask(0o077)
    if isolated:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0, "dumpable")  # the program must not trace or read this process
        kernel.drop_capabilities()
        install_filter()
    return folder


def _map_user(proc: int) -> None:
    for name, text in (("setgroups", "deny"), ("uid_map", "1000 0 1"), ("gid_map", "1000 0 1")):
        with os.fdopen(os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc), "w") as file:
            file.write(text)


def _mount_box(megabytes: int, files: int) -> None:
    # Its own empty working folder and /tmp, with this limit for both together.
    options = f"size={megabytes}m,nr_inodes={files},mode=0700"
    kernel.mount("box", BOX, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options, "mounting a tmpfs")
    os.mkdir(WORK)
    os.mkdir(TMP)


def _set_limits(limits: dict[str, Any], base: int) -> None:
    cpu = math.ceil(limits["seconds"]) + 1
    for kind, value in (
        (resource.RLIMIT_AS, base + limits["memory_mb"] * _MB),
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_NPROC, limits["processes"] + 1),
        (resource.RLIMIT_FSIZE, limits["disk_mb"] * _MB),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 64),
    ):
        ceiling = resource.getrlimit(kind)[1]
        value = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
        resource.setrlimit(kind, (value, value))


def _run_program(channel: int, request: dict[str, Any], limits: dict[str, Any]) -> None:
    # Each standard input gets a fresh process; the deadline and the output limit are for all of them together.
    left, room = limits["seconds"], limits["output_bytes"]
    for stdin in request["stdins"]:
        ended = Program(lambda theirs: _run_once(theirs, request), stdin, left, room).wait()
        wire.send(channel, ended)
        left -= ended["seconds"]
        room -= len(ended["stdout"]) + len(ended["stderr"])
        if left <= 0 or room <= 0 or (request["until_failure"] and ended["status"] != "ok"):
            return


def _run_once(channel: int, request: dict[str, Any]) -> int:
    os.close(channel)
    return run_argv(request["argv"]) if request["argv"] else run_source(request["source"])


def _judge_program(channel: int, request: dict[str, Any], limits: dict[str, Any]) -> None:
    source = request["source"]
    program = Program(lambda theirs: answer_calls(theirs, source), "", limits["seconds"], limits["output_bytes"])
    tests = wire.receive(channel)
    try:
        loaded = program.receive()
        error = _load_error(loaded)
        wire.send(channel, {"loaded": error})
        if not error:
            for outcome in judge(program, tests, loaded.get("value"), until_failure=request["until_failure"]):
                wire.send(channel, outcome)
    except (Ended, ValueError, RecursionError):  # it ended, or sent an invalid message, before it was loaded
        pass
    wire.send(channel, program.end())


def _load_error(message: Any) -> dict[str, Any] | None:
    # The program may have forged this message, so only strings of limited length are taken from it.
    error = message.get("error") if isinstance(message, dict) else "no message"
    if not error:
        return None
    if not isinstance(error, dict):
        raise ValueError("no message of a program that was loaded")
    line = error.get("line")
    text = {name: str(error.get(name))[:500] for name in ("name", "text")}
    return {**text, "line": line if isinstance(line, int) else None}


def _write_file(name: str, content: str) -> None:
    path = os.path.normpath(name)
    if os.path.isabs(path) or path.startswith(".."):
        raise ValueError(f"file {name!r} does not lie in the job's folder")
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(content)


assert "posttrain.sandbox.wire" in sys.modules  # once the root is gone, nothing can be imported
