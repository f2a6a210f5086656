"""Answers of commands on a narrow terminal: no word is torn, and whatever takes seconds moves."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

from posttrain import cli
from posttrain.tracking import progress as module
from posttrain.tracking.console import fold_lines, print_page, print_text
from posttrain.tracking.progress import say, waiting
from posttrain.tracking.tee import active
from posttrain.trainer import embedded
from tests.tracking.test_tracking_progress import Terminal, rows_of


def a_screen(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Called in a test: pytest puts its own streams back between a fixture and the test."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", Terminal(terminal.shared))
    return terminal


@pytest.mark.parametrize(
    "command",
    [
        ["explain", "rloo"],
        ["config", "algorithm.adv_estimator=grpo"],
        ["train", "actor_rollout_ref.rollout.name=sglang"],
        ["doctor", "algorithm.adv_estimator=grpo", "data.train_files=there_is_no_file_of_such_a_name_at_all.json"],
        ["nothing"],
    ],
    ids=lambda words: words[0],
)
def test_no_word_is_torn_on_a_terminal_of_80_columns(command, monkeypatch):
    screen = a_screen(monkeypatch)
    cli.main(command)
    shown = re.sub(r".*\r\x1b\[K", "", screen.getvalue())
    wide = [line for line in shown.split("\n") if len(line) > 80]
    assert shown.strip() and all(" " not in line.strip() for line in wide), wide


def test_what_doctor_says_of_the_embedded_model_is_folded(monkeypatch):
    """It says more where the model is made first, which no test may wait for."""
    made = embedded.ensure_embedded

    def talkative(say, **options):
        say("word " * 30)
        return made(say, **options)

    monkeypatch.setattr(embedded, "ensure_embedded", talkative)
    screen = a_screen(monkeypatch)
    cli.main(["doctor", "algorithm.adv_estimator=grpo", "data.train_files=no_such_file.json"])
    assert any(line == ("word " * 16).strip() for line in screen.getvalue().split("\n"))


def test_pages_are_broken_anew_and_formulas_and_settings_stay(monkeypatch):
    screen = a_screen(monkeypatch)
    page = "x" * 50 + " " + "y" * 50 + " the\nend.\n\n    a = b\n    c = d\n\n- one\n- two"
    print_page(page)
    first, *rest = screen.getvalue().rstrip("\n").split("\n")
    assert first == "x" * 50 and rest == ["y" * 50 + " the end.", "", "    a = b", "    c = d", "", "- one", "- two"]


def test_what_is_read_by_a_program_is_left_as_it_is(capsys):
    text = "word " * 60
    print_text(text)
    print_page(f"{text}\nmore")
    assert capsys.readouterr().out == f"{text}\n{text}\nmore\n"
    assert fold_lines("  a b c", 5) == "  a b\n    c"


def test_whatever_takes_seconds_shows_a_row_that_moves_and_leaves_nothing(monkeypatch):
    screen = a_screen(monkeypatch)
    monkeypatch.setattr(module, "COUNT_EVERY", 0.01)
    with waiting("reading"):
        deadline = time.monotonic() + 30
        while screen.getvalue().count("reading … 0 s") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        say("a note")
        assert active() is not None
    assert rows_of(screen.getvalue()) == ["a note"] and active() is None


def test_nothing_is_drawn_where_nobody_looks(capsys, monkeypatch):
    monkeypatch.setattr(module, "Every", None)  # would be called
    with waiting():
        pass
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "command",
    [["train", "preset=embedded"], ["generate", "embedded", "--prompt", "1"], ["plan", "sft"]],
    ids=lambda words: words[0],
)
def test_commands_that_read_torch_say_so(command, tmp_path):
    code = (
        "import sys, posttrain.cli\nfrom posttrain.tracking import progress as module\n"
        "def row(*args):\n    print('torch' in sys.modules, flush=True); sys.exit(7)\n"
        "module.is_terminal = lambda stream: True\nmodule.Waiting = row\nposttrain.cli.main(sys.argv[1:])"
    )
    ran = subprocess.run([sys.executable, "-c", code, *command], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 7 and ran.stdout.splitlines()[-1] == "False", ran
