"""The console may go away, be full, closed or unable to show a character: what runs goes on, and its log is whole."""

from __future__ import annotations

import errno
import io
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import until

from posttrain.errors import UserError
from posttrain.tracking import console as module
from posttrain.tracking.console import Console, as_console
from posttrain.tracking.progress import Progress, say
from posttrain.tracking.tee import tee_output
from posttrain.trainer import fsdp_sft_trainer, main_generation, main_ppo
from posttrain.trainer.run.result import GracefulStop

PROGRAM = """
import sys, time
from posttrain.tracking.console import ignore_hangup, protect_console, prepare_streams
from posttrain.tracking.progress import Progress, say
from posttrain.tracking.tee import tee_output
from pathlib import Path

folder = Path(sys.argv[1])
prepare_streams()
protect_console()
print("before the log")
with ignore_hangup(), tee_output(folder / "run.log"), Progress(50) as progress:
    say("begins")
    (folder / "begun").touch()
    while sys.argv[2] == "waits" and not (folder / "go").exists():
        time.sleep(0.01)
    for step in range(50):
        say(f"step {step}: \\u7b54\\u6848 \\U0001f600 \\ud800")
        print("to stderr", file=sys.stderr)
        progress.step("done")
opened = open(folder / "opened", "w")  # whatever number it gets, the console must not be written into it
print("after the log", flush=True)
opened.close()
(folder / "end").touch()
"""


def start(folder: Path, *, waits: bool = False, **how) -> subprocess.Popen:
    command = [sys.executable, "-c", PROGRAM, str(folder), "waits" if waits else "runs"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **how.pop("env", {})}
    return subprocess.Popen(command, env=environment, **how)


def check(folder: Path, process: subprocess.Popen) -> str:
    """It ended well; the text of its log."""
    assert process.wait(60) == 0
    assert (folder / "end").exists() and (folder / "opened").read_bytes() == b""
    log = (folder / "run.log").read_text(encoding="utf-8")
    assert "step 0: 答案 😀 \\ud800" in log and "step 49" in log and log.count("to stderr") == 50
    return log


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", "2>&-", ">/dev/full 2>/dev/full", "| head -n 1 >/dev/null"])
def test_a_program_goes_on_when_its_shell_gave_it_no_good_console(tmp_path, closed):
    script = f'set -o pipefail; "$@" {closed}'
    command = ["bash", "-c", script, "bash", sys.executable, "-c", PROGRAM, str(tmp_path), "runs"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    log = check(tmp_path, process)
    if "head" not in closed:  # it may be quick enough to take all
        assert ("the run goes on without it" in log) == ("full" in closed)


@pytest.mark.parametrize("coding", ["ascii", "latin-1"])
def test_what_a_locale_cannot_show_is_escaped(tmp_path, coding):
    process = start(tmp_path, stdout=subprocess.PIPE, env={"PYTHONIOENCODING": coding, "PYTHONUTF8": "0"})
    assert process.stdout is not None
    said = process.stdout.read()
    check(tmp_path, process)
    assert rb"step 49: \u7b54\u6848 \U0001f600 \ud800" in said


def test_a_terminal_that_goes_away_does_not_take_the_run_with_it(tmp_path):
    ours, theirs = pty.openpty()
    process = start(tmp_path, waits=True, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    until(lambda: (tmp_path / "begun").exists() or process.poll() is not None, "for the program to begin")
    os.close(ours)  # the window is closed: what is written from now on is an error
    os.kill(process.pid, signal.SIGHUP)  # which a shell tells its programs
    (tmp_path / "go").touch()
    assert "the run goes on without it" in check(tmp_path, process)


HAMMERED = """
import sys, time
from posttrain import cli
from posttrain.trainer.run.result import GracefulStop

def slow(args):
    if "loop" in args:
        with GracefulStop(lambda text: print(text, flush=True)) as stop:
            print("begun", flush=True)
            for _ in range(100):  # steps, until Ctrl-C is pressed a second time
                time.sleep(0.1)
    try:
        print("begun", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        if "import" in args:
            raise ModuleNotFoundError("as libraries do") from None
        raise
    finally:  # what a run tidies up
        for _ in range(20):
            time.sleep(0.01)
        print("tidied", flush=True)

cli.VERBS["slow"] = (slow, "")
sys.exit(cli.main())
"""


@pytest.mark.parametrize("where", ["start", "import", "loop"])
def test_ctrl_c_many_times_is_one_end_without_a_traceback(where):
    command = [sys.executable, "-c", HAMMERED, "slow", where]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None and process.stdout.readline() == b"begun\n"
    until(lambda: process.send_signal(signal.SIGINT) or process.poll() is not None, "for its end", every_s=0.002)
    out, said = process.communicate()
    assert (process.returncode, said) == (130, b"interrupted\n")
    assert (b"tidied" in out) == (where != "loop") and (b"Leaving at once" in out) == (where == "loop")


def test_a_signal_in_the_midst_of_a_print_is_still_said(capfd):
    def busy(text):
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    with GracefulStop(busy) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested is signal.SIGTERM and "SIGTERM: finishing this step" in capfd.readouterr().err


def test_a_command_says_that_its_output_cannot_be_written():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = f"{sys.executable} -m posttrain.cli config trainer.seed=1 >/dev/full"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment)
    assert ended.returncode == 1
    assert ended.stderr == "The output could not be written: [Errno 28] No space left on device.\n"


def to_full_disk() -> io.TextIOWrapper:
    return open("/dev/full", "w")


def to_nobody() -> io.TextIOWrapper:
    nobody, ours = os.pipe()
    os.close(nobody)
    return os.fdopen(ours, "w")


@pytest.mark.parametrize("program", [main_ppo.cli, fsdp_sft_trainer.main, lambda: main_generation.cli(shows)])
@pytest.mark.parametrize("lost, status", [(to_full_disk, 1), (to_nobody, 141)])
def test_every_program_whose_output_is_lost_ends_without_a_traceback(program, lost, status, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program", "--cfg", "job"])
    output = lost()
    monkeypatch.setattr(sys, "stdout", output)
    assert program() == status
    words = "The output could not be written: [Errno 28] No space left on device.\n"
    assert capsys.readouterr().err == (words if status == 1 else "")


def shows(args) -> int:
    print("much " * 10000)
    return 0


def test_an_error_of_another_pipe_is_not_taken_for_that_of_the_output(capsys, monkeypatch):
    def broken() -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        module.exit_status(broken)
    monkeypatch.setattr(module, "interrupted", lambda: True)
    assert module.exit_status(broken) == 130, "whatever follows a Ctrl-C comes of it"
    monkeypatch.setattr(module, "interrupted", lambda: False)

    def wrong() -> int:
        raise UserError("give it another name")

    assert module.exit_status(wrong) == 2 and capsys.readouterr().err == "interrupted\ngive it another name\n"


class Failing(io.StringIO):
    def write(self, text):
        raise OSError(errno.EIO, "Input/output error")


def test_a_lost_stream_is_told_once_on_the_other_and_in_the_log(tmp_path, monkeypatch):
    other = io.StringIO()
    monkeypatch.setattr(sys, "stdout", Failing())
    monkeypatch.setattr(sys, "stderr", other)
    with tee_output(tmp_path / "run.log"):
        say("one")
        say("two")
    told = "The console could not be written (Input/output error); the run goes on without it."
    assert other.getvalue() == f"{told} Its log: {tmp_path / 'run.log'}\n"
    assert (tmp_path / "run.log").read_text().splitlines() == ["one", told, "two"]


def test_a_reader_that_is_slow_loses_lines_and_not_the_console():
    class Slow(io.StringIO):
        waits = True

        def write(self, text):
            if self.waits:
                raise BlockingIOError
            return super().write(text)

    stream = Slow()
    console = Console(stream)
    console.write("missed")
    stream.waits = False
    console.write("seen")
    assert stream.getvalue() == "seen" and not console.lost and as_console(console) is console


def test_a_bar_on_a_terminal_that_is_gone_is_no_error(tmp_path, monkeypatch):
    class Terminal(Failing):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    with tee_output(tmp_path / "run.log"), Progress(3) as progress:
        progress.step("fine")
    assert "step 1/3: fine" in (tmp_path / "run.log").read_text()
