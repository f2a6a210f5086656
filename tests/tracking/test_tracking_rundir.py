"""The run directory: one writer, no mixing of runs, and a clean cut on resume."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from posttrain.config.values import shown
from posttrain.texts import redact
from posttrain.tracking.loggers import JsonlLogger, read_metrics
from posttrain.tracking.rundir import (
    DIAGNOSIS,
    TIMELINE,
    RunDirectory,
    RunDirectoryError,
    append_line,
    diff_config,
    read_lines,
)
from posttrain.tracking.status import command

HOLD = (
    "import sys, time\nfrom posttrain.tracking.rundir import RunDirectory\n"
    "RunDirectory(sys.argv[1], 'p', 'e').open()\nprint('held', flush=True)\ntime.sleep(60)\n"
)


def test_layout(tmp_path):
    with RunDirectory(tmp_path, "p", "e") as run:
        assert run.path == tmp_path / "p" / "e"
        assert sorted(os.listdir(run.path)) == ["checkpoints", "crash", "logs", "run.lock", "samples"]
        assert run.config.name == "config.yaml" and run.metrics.name == "metrics.jsonl"


def test_second_process_is_refused_with_the_pid_and_a_killed_one_frees_the_run(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        with pytest.raises(RunDirectoryError, match=rf"in use by process {holder.pid} on .*trainer\.experiment_name"):
            RunDirectory(tmp_path, "p", "e").open()
        RunDirectory(tmp_path, "p", "other").open().close()
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    RunDirectory(tmp_path, "p", "e").open().close()


def test_same_process_is_refused_too_and_may_come_again_after_close(tmp_path):
    for _ in range(2):
        with RunDirectory(tmp_path, "p", "e"), pytest.raises(RunDirectoryError, match="in use by this process"):
            RunDirectory(tmp_path, "p", "e").open()


def test_forked_child_that_outlives_the_run_does_not_hold_it(tmp_path):
    script = (
        "import os, sys, time\nfrom posttrain.tracking.rundir import RunDirectory\n"
        "RunDirectory(sys.argv[1], 'p', 'e').open()\n"
        "child = os.fork()\n"
        "if child == 0:\n    os.close(1)\n    time.sleep(20)\n    os._exit(0)\n"
        "print(child, flush=True)\nos._exit(1)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=False
    )
    child = int(result.stdout)
    try:
        os.kill(child, 0)  # it lives
        RunDirectory(tmp_path, "p", "e").open().close()
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("name", ["", "..", "a/b", "/"])
def test_names_that_are_no_folder_names_are_refused(tmp_path, name):
    with pytest.raises(RunDirectoryError, match=r"trainer\.experiment_name="):
        RunDirectory(tmp_path, "p", name)


def test_place_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"cannot be made.*trainer\.default_local_dir"):
        RunDirectory(tmp_path / "file", "p", "e").open()


def test_checkpoints_link_leads_to_the_newest_run(tmp_path):
    for experiment in ("one", "two"):
        with RunDirectory(tmp_path, "p", experiment) as run:
            (run.checkpoints / "global_step_1").mkdir()
            link = tmp_path / "checkpoints"
            assert not link.exists() or link.resolve() != run.checkpoints.resolve()  # not by opening alone
            run.link_as_newest()
            assert link.is_symlink() and link.resolve() == run.checkpoints.resolve()
            assert not os.path.isabs(os.readlink(link))  # the outputs folder can be moved
            assert os.listdir(link) == ["global_step_1"]


def test_real_checkpoints_folder_is_never_replaced(tmp_path):
    notes: list[str] = []
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "mine").write_text("x")
    with RunDirectory(tmp_path, "p", "e", on_note=notes.append) as run:
        run.link_as_newest()
    assert (tmp_path / "checkpoints" / "mine").read_text() == "x" and "left alone" in notes[0]


def test_truncate_after_leaves_what_a_straight_run_would_have_written(tmp_path):
    with RunDirectory(tmp_path, "p", "e") as run:
        logger = JsonlLogger(run.metrics)
        for step in range(6):
            logger.log(step, {"reward_mean": step / 3})
            if step == 3:
                straight = run.metrics.read_bytes()
            (run.samples / f"step_{step}.parquet").write_bytes(b"x")
        logger.close()
        with run.metrics.open("ab") as file:
            file.write(b'{"step": 6, "rew')  # killed while writing
        assert run.holds_run()
        run.truncate_after(3)
        assert run.metrics.read_bytes() == straight
        assert sorted(os.listdir(run.samples)) == [f"step_{step}.parquet" for step in range(4)]
        assert [line["step"] for line in read_metrics(run.metrics)] == [0, 1, 2, 3]
        run.truncate_after(-1)
        assert run.metrics.read_bytes() == b"" and os.listdir(run.samples) == [] and not run.holds_run()


def test_truncate_after_cuts_validations_timelines_and_advice_too(tmp_path):
    with RunDirectory(tmp_path, "p", "e") as run:
        for step in range(4):
            (run.samples / f"val_{step}.parquet").write_bytes(b"x")
            for name in (DIAGNOSIS, TIMELINE):
                append_line(run.path / name, {"step": step, "text": "\ud800"})
        run.truncate_after(1)
        assert sorted(os.listdir(run.samples)) == ["val_0.parquet", "val_1.parquet"]
        for name in (DIAGNOSIS, TIMELINE):
            assert [line["step"] for line in read_lines(run.path / name)] == [0, 1]


def test_holds_run_sees_checkpoints(tmp_path):
    with RunDirectory(tmp_path, "p", "e") as run:
        assert not run.holds_run()
        (run.checkpoints / "global_step_3").mkdir()
        assert run.holds_run()


OLD = {
    "trainer": {"total_epochs": 1, "resume_mode": "auto", "seed": 1},
    "data": {"files": ["a"], "kwargs": {}},
    "lr": 1e-6,
}
NEW = {
    "trainer": {"total_epochs": 9, "resume_mode": "disable", "seed": 2},
    "data": {"files": ["a", "b"]},
    "lr": 1e-6,
    "n": 5,
}


def test_changed_settings_are_listed_by_key_and_the_length_of_a_run_may_change(tmp_path):
    assert diff_config(OLD, NEW) == [("trainer.seed", 1, 2), ("data.files", ["a"], ["a", "b"]), ("n", None, 5)]
    with RunDirectory(tmp_path, "p", "e") as run:
        assert run.changed_settings(NEW) == []
        run.write_config(OLD)
        assert run.changed_settings(OLD) == []
        assert run.changed_settings(NEW) == diff_config(OLD, NEW)


def test_secrets_are_written_nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "wandb-secret-value")
    config = {"tool": {"api_key": "abc123"}, "url": "https://x?k=wandb-secret-value", "password": None, "max_tokens": 5}
    with RunDirectory(tmp_path, "p", "e") as run:
        run.write_config(config)
        text = run.config.read_text()
        assert "abc123" not in text and "wandb-secret-value" not in text
        assert run.read_config() == {
            "tool": {"api_key": "***"},
            "url": "https://x?k=***",
            "password": None,
            "max_tokens": 5,
        }
        assert run.changed_settings(config) == []


@pytest.mark.parametrize(
    "name", ["api_key", "api-key", "secret", "secret_key", "aws_secret_access_key", "passwd", "token", "credentials"]
)
def test_a_secret_is_masked_in_files_and_in_what_a_command_shows(name):
    assert redact({name: "abcdefgh", "x": "abcdefgh"}, {}) == {name: "***", "x": "abcdefgh"}
    assert redact("see abcdefgh", {name.upper(): "abcdefgh"}) == "see ***"
    assert shown(f"my.{name}", "abcdefgh") == "***" and command([f"my.{name}=abcdefgh"]) == f"'my.{name}=***'"


def test_every_default_setting_survives_redaction():
    from posttrain.config.root import PPOConfig

    config = PPOConfig().to_dict()
    assert redact(config, {}) == config


def test_lock_file_does_not_slow_a_start(tmp_path):
    began = time.monotonic()
    RunDirectory(tmp_path, "p", "e").open().close()
    assert time.monotonic() - began < 1.0
    assert re.fullmatch("", (tmp_path / "p" / "e" / "run.lock").read_text())


def test_what_a_killed_run_left_half_written_is_removed_when_it_is_opened_again(tmp_path):
    with RunDirectory(tmp_path, "p", "e") as run:
        pass
    left = [run.path / ".config.yaml.123.tmp", run.samples / ".step_7.parquet.99.tmp"]
    left.append(run.checkpoints / ".latest_checkpointed_iteration.txt.5.tmp")
    kept = [run.path / ".mine.tmp", run.path / "notes.123.tmp", run.samples / "step_6.parquet"]
    for path in (*left, *kept):
        path.write_bytes(b"x")
    with RunDirectory(tmp_path, "p", "e"):
        assert [path for path in left if path.exists()] == [] and all(path.exists() for path in kept)
