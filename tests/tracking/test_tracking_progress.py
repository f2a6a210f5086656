"""Everything printed is seen on the console and in the log; the live row stays out of the log and tears nothing."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from contextlib import nullcontext

import pytest

from posttrain import pulse
from posttrain.tracking import progress as module
from posttrain.tracking.console import plain
from posttrain.tracking.progress import Moment, Progress, progress_row, say
from posttrain.tracking.tee import tee_output


class Terminal(io.StringIO):
    """A stream onto a screen; two of them, as stdout and stderr are, may share one."""

    def __init__(self, shared: list[str] | None = None) -> None:
        super().__init__()
        self.shared = [] if shared is None else shared

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.shared.append(text)
        return len(text)

    def getvalue(self) -> str:
        return "".join(self.shared)


def rows_of(written: str, width: int = 80) -> list[str]:
    """What a terminal of that width shows at the end: carriage returns, line ends and erasing are followed."""
    screen, row, column = [""], 0, 0
    for piece in re.findall(r"\x1b\[[\d;]*[A-Za-z]|.", written, re.S):
        if piece == "\r":
            column = 0
        elif piece == "\n":
            row, column = row + 1, 0
            screen += [""] * (row + 1 - len(screen))
        elif piece == "\x1b[K":
            screen[row] = screen[row][:column]
        elif not piece.startswith("\x1b"):
            if column == width:
                row, column = row + 1, 0
                screen += [""] * (row + 1 - len(screen))
            screen[row] = screen[row][:column].ljust(column) + piece + screen[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in screen if line.strip()]


def test_prints_of_user_code_reach_console_and_log(tmp_path, capsys):
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
    monkeypatch.setattr(sys, "stderr", Terminal(screen.shared))
    with tee_output(tmp_path / "run.log"), Progress(2) as progress:
        progress.step("reward 0.5", reward=0.5)
        print("two", "words")
        progress.step("reward 0.6")
    assert (tmp_path / "run.log").read_text() == "step 1/2: reward 0.5\ntwo words\nstep 2/2: reward 0.6\n"
    shown = screen.getvalue()
    assert "two words\n" in shown and "2/2" in shown and "reward 0.500" in shown
    assert rows_of(shown) == ["step 1/2: reward 0.5", "two words", "step 2/2: reward 0.6"]


def test_say_without_a_tee_moves_the_bar(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    with Progress(2, stream=screen):
        say("a note")
    assert rows_of(screen.getvalue()) == ["a note"]


def test_text_without_a_line_end_is_not_lost_under_a_bar(tmp_path, monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", Terminal(screen.shared))
    with tee_output(tmp_path / "run.log"), Progress(1):
        print("half", end="")
    assert screen.getvalue().endswith("half") and (tmp_path / "run.log").read_text() == "half"


def test_long_notes_are_broken_between_words_on_a_terminal_and_whole_in_the_log(tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    note = "note: This run loads no reference, as nothing asks for it (actor_rollout_ref.actor.use_kl_loss=True would)."
    with tee_output(tmp_path / "run.log"):
        say(note)
    rows = rows_of(plain(terminal.getvalue()))
    assert len(rows) == 2 and max(map(len, rows)) <= 80
    assert " ".join(row.strip() for row in rows) == note and rows[1].startswith("  ")
    assert (tmp_path / "run.log").read_text() == note + "\n"


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


def test_nothing_printed_under_a_tee_is_torn_by_the_row(tmp_path, monkeypatch):
    """The row is on the stream below the tee: it must be gone whenever a whole line is written, by whomever."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", Terminal(screen.shared))
    monkeypatch.setenv("NO_COLOR", "1")
    with tee_output(tmp_path / "run.log"), Progress(30) as progress:
        for step in range(30):
            progress.step(f"reward {step / 30:.3f}", reward=step / 30)
            if step == 7:
                print("from a reward")
                print("a warning", file=sys.stderr)
    expected = [f"step {step + 1}/30: reward {step / 30:.3f}" for step in range(30)]
    expected[8:8] = ["from a reward", "a warning"]
    assert rows_of(screen.getvalue()) == expected == (tmp_path / "run.log").read_text().splitlines()


def test_the_row_fits_the_terminal_and_keeps_what_matters_most(monkeypatch):
    monkeypatch.setattr(pulse.time, "monotonic", lambda: 100.0)
    work = pulse.Work("responses", 1000, done=640, tokens=123_456, tokens_each=200, started=40.0)
    moment = Moment(12, 200, 11, "step", "reward 0.459", "gen", 60.0, 75.0, 12_000.0, work)
    for width in range(20, 200):
        assert len(progress_row(moment, width)) <= width
        assert plain(progress_row(moment, width, colour=True)) == progress_row(moment, width)
    wide = progress_row(moment, 140)
    for part in ("step 12/200 ━", "6%", "reward 0.459", "rollout 640/1,000 responses", "123,456 tokens", "2,058 tok/s"):
        assert part in wide, part
    assert "0:34 left" in wide and wide.endswith("run 3:20:00 left")
    assert "rollout 640/1,000, 2,058 tok/s, 0:34 left" in progress_row(moment, 79)
    quick = Moment(12, 200, 11, "step", "reward 0.459", "gen", 0.1, 0.2, 40.0, None)
    assert "rollout" not in progress_row(quick, 140)  # it would only flicker


def test_loops_of_one_unit_count_into_the_outermost():
    with pulse.work("rows", 8):
        for _ in range(2):
            with pulse.work("rows", 4) as inner, pulse.work("scores", 3) as hidden:
                inner.advance(4, tokens=40)
                hidden.advance(3)
        assert pulse.now() is inner and (inner.done, inner.total, inner.tokens) == (8, 8, 80)
    assert pulse.now() is None
    with pytest.raises(ValueError), pulse.work("rows", 1):
        raise ValueError
    assert pulse.now() is None


def test_responses_that_run_longer_than_before_are_not_said_to_be_done_at_once(monkeypatch):
    monkeypatch.setattr(pulse, "_usual", {"responses": 10.0})
    with pulse.work("responses", 10, most_tokens=100) as work:
        work.advance(items=2, tokens=20, running_tokens=8 * 60)
        assert 0.6 < work.share < 0.7  # 8 that have 60 tokens may grow to 90
        work.advance(items=0, running_tokens=8 * 100)
        assert work.share == 0.99


def test_the_row_moves_inside_a_step(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr("posttrain.tracking.progress.SHORT_STEP", 0.0)
    with Progress(3, stream=screen) as progress, progress.stage("update_actor"), pulse.work("rows", 64) as work:
        for done in (16, 32):
            work.advance(16, tokens=1000)
            deadline = time.monotonic() + 20
            while f"update {done}/64 rows, {done // 16},000 tokens" not in plain(screen.getvalue()):
                assert time.monotonic() < deadline
                time.sleep(0.01)
    assert rows_of(screen.getvalue()) == []  # nothing stays behind


def test_a_long_stage_says_how_far_it_is_where_there_is_no_terminal(monkeypatch, capsys):
    monkeypatch.setattr(module, "LOG_EVERY", 0.0)
    with Progress(3, stream=io.StringIO()) as progress, progress.stage("gen"), pulse.work("responses", 8) as work:
        work.advance(2, tokens=300, running_tokens=700)
        progress._log_if_long()
    assert re.match(r"  \.\.\. step 1/3: rollout 2/8 responses, 1,000 tokens, [\d,]+ tok/s", capsys.readouterr().out)


def test_colour_is_for_terminals_and_NO_COLOR_takes_it_away(tmp_path, monkeypatch):
    shown = {}
    for name in ("colour", "NO_COLOR", "dumb"):
        monkeypatch.setenv("TERM", "dumb" if name == "dumb" else "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        if name == "NO_COLOR":
            monkeypatch.setenv("NO_COLOR", "1")
        screen = Terminal()
        monkeypatch.setattr(sys, "stdout", screen)
        with tee_output(tmp_path / f"{name}.log"):
            say("step 3/4: reward 0.5 (-0.1), 3 s")
            say("  ! lower the rate")
        shown[name] = screen.getvalue()
        assert (tmp_path / f"{name}.log").read_text() == "step 3/4: reward 0.5 (-0.1), 3 s\n  ! lower the rate\n"
    assert "\x1b[33m  ! lower the rate" in shown["colour"] and "\x1b[31m(-0.1)" in shown["colour"]
    assert "\x1b" not in shown["NO_COLOR"] + shown["dumb"]


def test_there_is_no_row_where_another_program_reads_the_lines(monkeypatch):
    read, write = os.pipe()
    with os.fdopen(read), os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with Progress(2, stream=Terminal()) as progress:
            assert not progress.has_bar  # `| tee log` shows them on the same terminal, and would be torn


def test_bars_of_others_stay_out_of_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with tee_output(tmp_path / "run.log"):
        for share in (10, 50, 100):
            sys.stderr.write(f"\rtokenizing {share}%")
        sys.stderr.write("\n")
        print("\x1b[31mred\x1b[0m")
    assert (tmp_path / "run.log").read_text() == "\nred\n"


def test_bars_of_others_are_shown_only_on_a_terminal_without_a_row(tmp_path, monkeypatch):
    def draw() -> None:
        for share in (50, 100):
            sys.stderr.write(f"\rtokenizing {share}%")
        sys.stderr.write("\n")

    for stream, has_row, shown in ((io.StringIO(), False, ""), (Terminal(), True, ""), (Terminal(), False, "100%\n")):
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        with tee_output(tmp_path / "run.log"), Progress(2) if has_row else nullcontext():
            before = stream.getvalue()
            draw()
            added = stream.getvalue()[len(before) :]
        assert ("tokenizing" in added) == bool(shown) and added.endswith(shown)
