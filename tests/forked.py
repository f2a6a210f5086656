"""A Python that starts at once: it forks from one process that has imported what most programs of the tests import.

A fork begins where the imports ended, as a fresh interpreter would; there is no thread, lock or generator of a test in
it. `python` takes the place of `sys.executable` in a command: `python -m MODULE ...`, `-c CODE`, `FILE ...`. It is not
for what reads its environment while it is imported (HF_ENDPOINT), nor for tests of imports. The processes among which
the suite is divided are such forks themselves.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from patience import until

END_S = 20.0

# In place of python: sends its arguments, environment, folder and files, waits, and ends as the fork ended.
CLIENT = """#!{python} -SE
import array, json, os, signal, socket, sys
arguments = sys.argv[2:] if sys.argv[1:2] == ["-u"] else sys.argv[1:]
if not arguments or (arguments[0][:1] == "-" and arguments[0] not in ("-m", "-c")):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
job = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
server.sendmsg([len(job).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
server.sendall(job)
status = int(server.recv(100))
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
sys.exit(status)
"""

SERVER = """
import gc, json, os, runpy, select, signal, socket, sys

gc.disable()
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
listening.listen(100)
import hydra._internal.config_loader_impl, hydra._internal.core_plugins.file_config_source, hydra.core.plugins
import peft, posttrain.config.load, posttrain.models.fused_layer, posttrain.rollout.native.engine
import posttrain.commands.generation.command, posttrain.trainer.ppo.runner, posttrain.trainer.supervised.loop
import transformers.models.auto.tokenization_auto, transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen2.tokenization_qwen2
gc.freeze()  # forks need not walk through what was imported
gc.enable()


def job_of_a_fork():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    while True:
        if sys.stdin in select.select([listening, sys.stdin], [], [])[0]:
            os._exit(0)  # the tests have ended
        client = listening.accept()[0]
        if os.fork() == 0:
            break
        client.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    listening.close()
    head, files, _, _ = socket.recv_fds(client, 8, 3)
    body = client.makefile("rb").read(int.from_bytes(head, "big"))
    fork = os.fork()
    if fork == 0:
        client.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.setsid()
        return json.loads(body)
    for number in (0, 1, 2, *files):
        os.close(number)
    while True:
        ended, status = os.waitpid(fork, os.WNOHANG)
        if ended:
            client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            os._exit(0)
        if select.select([client], [], [], 0.02)[0]:  # whoever waited for it was killed
            os.killpg(fork, signal.SIGKILL)
            os.waitpid(fork, 0)
            os._exit(0)


arguments, environment, folder = job_of_a_fork()
sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
os.environ.clear()
os.environ.update(environment)
if "tempfile" in sys.modules:
    sys.modules["tempfile"].tempdir = None  # where it was looked up before, it was for another environment
os.chdir(folder)
rest = [path for path in sys.path if path and path not in before]
sys.path[:] = ["", *environment.get("PYTHONPATH", "").split(os.pathsep), *rest]
if arguments[0] == "-m":
    sys.argv = arguments[1:]
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
elif arguments[0] == "-c":
    sys.argv = ["-c", *arguments[2:]]
    exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
else:
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")
"""


class Forked:
    """`python` is the path of the command; the process behind it lives until `close`. With the command of another one,
    that is used, and left alone."""

    def __init__(self, python: str | None = None) -> None:
        self.server, self.python = None, python or ""
        if python is not None:
            return
        self.folder = tempfile.TemporaryDirectory()
        address, client = Path(self.folder.name, "socket"), Path(self.folder.name, "python")
        client.write_text(CLIENT.format(python=sys.executable, address=str(address)))
        client.chmod(0o755)
        self.python = str(client)
        self.server = server = subprocess.Popen([sys.executable, "-c", SERVER, str(address)], stdin=subprocess.PIPE)
        until(lambda: address.exists() or server.poll() is not None, "for the process that is forked")
        assert server.poll() is None, "the process that is forked did not start"

    def run(self, code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self.python, "-c", code], capture_output=True, text=True)

    def close(self) -> None:
        """Its input is closed; a process that a test has left behind may hold it open too, and is not waited for."""
        assert self.server is not None and self.server.stdin is not None
        self.server.stdin.close()
        try:
            self.server.wait(END_S)
        except subprocess.TimeoutExpired:
            self.server.kill()
            self.server.wait()
        self.folder.cleanup()
