"""Everything printed is seen on the console and in the log; the bar stays out of the log."""

from __future__ import annotations

import io
import sys

import pytest

from posttrain.tracking.progress import Progress, say, tee_output


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_S0_143_prints_of_user_code_reach_console_and_log(tmp_path, capsys):
    log = tmp_path / "logs" / "run.log"
    with tee_output(log):
        print("from a reward", 42)
        print("warning", file=sys.stderr)
        say("a note")
        assert log.read_text() == "from a reward 42\nwarning\na note\n"  # at once, not at the end
    print("after")
    captured = capsys.readouterr()
    assert captured.out == "from a reward 42\na note\nafter\n" and captured.err == "warning\n"
    assert log.read_text() == "from a reward 42\nwarning\na note\n"


def test_resumed_run_adds_to_the_log_and_streams_are_put_back(tmp_path):
    before = sys.stdout
    for text in ("one", "two"):
        with pytest.raises(RuntimeError), tee_output(tmp_path / "run.log"):
            print(text)
            raise RuntimeError
    assert sys.stdout is before and (tmp_path / "run.log").read_text() == "one\ntwo\n"


def test_plain_lines_without_a_terminal(capsys):
    with Progress(10, done=3, stream=io.StringIO()) as progress:
        progress.step("reward 0.5", ["lower the rate"])
    assert capsys.readouterr().out == "step 4/10: reward 0.5\n  ! lower the rate\n"


def test_bar_on_a_terminal_stays_out_of_the_log(tmp_path, monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    with tee_output(tmp_path / "run.log"), Progress(2) as progress:
        progress.step("reward 0.5", reward=0.5)
        print("two", "words")
        progress.step("reward 0.6")
    assert (tmp_path / "run.log").read_text() == "step 1/2: reward 0.5\ntwo words\nstep 2/2: reward 0.6\n"
    shown = screen.getvalue()
    assert "two words\n" in shown and "2/2" in shown and "reward 0.500" in shown


def test_say_without_a_tee_moves_the_bar(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    with Progress(2, stream=screen):
        say("a note")
    assert "\ra note\n" in screen.getvalue().replace(" ", "").replace("anote", "a note")


def test_text_without_a_line_end_is_not_lost_under_a_bar(tmp_path, monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    with tee_output(tmp_path / "run.log"), Progress(1):
        print("half", end="")
    assert screen.getvalue().endswith("half") and (tmp_path / "run.log").read_text() == "half"


def test_same_advice_with_other_numbers_is_repeated_every_tenth_step_only(capsys):
    with Progress(30, stream=io.StringIO()) as progress:
        for step in range(21):
            progress.step("line", [f"{step}% of the groups", *(["news"] if step == 4 else [])])
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if "!" in line] == [
        "  ! 0% of the groups",
        "  ! news",
        "  ! 10% of the groups",
        "  ! 20% of the groups",
    ]
