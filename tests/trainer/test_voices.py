"""Who speaks on the console of a command that trains: posttrain; with --quiet its result alone, with --json one object
per step; never a library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runs import settings

from posttrain.errors import UserError
from posttrain.tracking.console import QUIET, split_output_mode
from posttrain.trainer.run.process import keep_machine_logs, keep_worker_logs

NOISE = (
    "a warning of VOICE",
    "a logger of VOICE",
    "descriptor 1 of VOICE",
    "descriptor 2 of VOICE",
    "program of VOICE",
)
NOISY = """
import logging, os, subprocess, sys, warnings
warnings.warn("a warning of VOICE")
logging.getLogger("some.package").error("a logger of VOICE")
logging.StreamHandler().handle(logging.LogRecord("x", 40, "", 0, "a logger of VOICE", None, None))
os.write(1, b"descriptor 1 of VOICE\\n")
os.write(2, b"descriptor 2 of VOICE\\n")
subprocess.run([sys.executable, "-S", "-c", "print('program of VOICE')"])
sys.stderr.write("\\r 50% |#####     | of VOICE")
print("my own print of VOICE")
"""
PROGRAM = """
import os, sys
from posttrain import cli
for voice in ("json", "quiet", "normal"):
    os.write(1, f"<{voice}>\\n".encode()), os.write(2, f"<{voice}>\\n".encode())
    flags = [] if voice == "normal" else [f"--{voice}"]
    status = cli.main(["train", *sys.argv[1:], *flags, f"trainer.experiment_name={voice}",
                       f"actor_rollout_ref.model.external_lib=noisy_{voice}"])
    assert status == 0, status
os.write(1, b"<wrong>\\n"), os.write(2, b"<wrong>\\n")
assert cli.main(["train", *sys.argv[1:], "--quiet", "actor_rollout_ref.model.external_lib=absent"]) == 2
"""


@pytest.fixture(scope="module")
def spoken(tiny_model, sums, tmp_path_factory, forked) -> dict[str, dict[str, str]]:
    """Voice -> what it said on `out` and `err`, and its files in `logs/`; all in one process."""
    folder = tmp_path_factory.mktemp("voices")
    for voice in ("json", "quiet", "normal"):
        (folder / f"noisy_{voice}.py").write_text(NOISY.replace("\\\\", "\\").replace("VOICE", voice))
    given = settings(tiny_model, sums, folder / "out")
    del given["trainer.experiment_name"]
    args = [f"{key}={value}" for key, value in given.items()]
    args.append("custom_reward_function.path=" + str(Path(__file__).parent / "light_rewards.py"))
    args.append("custom_reward_function.name=even_share")
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}{os.pathsep}{folder}"}
    command = [forked.python, "-c", PROGRAM.replace("\\\\", "\\"), *args]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, dict[str, str]] = {}
    for stream, text in (("out", ran.stdout), ("err", ran.stderr)):
        for part in text.split("<")[1:]:
            voice, _, said = part.partition(">\n")
            found.setdefault(voice, {})[stream] = said
    for voice in ("json", "quiet", "normal"):
        logs = folder / "out" / "test" / voice / "logs"
        found[voice] |= {path.name: path.read_text() for path in logs.iterdir()}
        found[voice]["metrics"] = (logs.parent / "metrics.jsonl").read_text()
    return found


@pytest.mark.slow
def test_json_is_one_object_per_step_on_stdout_and_nothing_else(spoken):
    lines = [json.loads(line) for line in spoken["json"]["out"].splitlines()]
    stored = [json.loads(line) for line in spoken["json"]["metrics"].splitlines()]
    assert [line["step"] for line in lines] == [1, 2] and spoken["json"]["err"] == ""
    for line, kept in zip(lines, stored, strict=True):
        assert {**line, "advice": 0, "time": 0} == {**kept, "advice": 0, "time": 0}
    assert "step 2/2: reward" in spoken["json"]["run.log"]


def test_quiet_is_the_last_result_and_errors(spoken):
    assert spoken["quiet"]["err"] == ""
    assert spoken["quiet"]["out"].startswith("finished at step 2, reward_mean 0.")
    assert spoken["quiet"]["out"].count("\n") == 1 and "step 1/2: reward" in spoken["quiet"]["run.log"]
    assert spoken["wrong"]["out"] == "" and "absent" in spoken["wrong"]["err"]


def test_the_console_is_posttrains_and_the_users_own_prints(spoken):
    out = spoken["normal"]["out"].splitlines()
    assert any(line.startswith("step 2/2: reward") for line in out) and "my own print of normal" in out
    assert spoken["normal"]["err"] == "" and not [line for line in out if "%" in line and "#" in line]


@pytest.mark.parametrize("voice", ["json", "quiet", "normal"])
def test_what_libraries_say_is_in_a_log_of_its_own(spoken, voice):
    said = spoken[voice]
    for noise in NOISE:
        noise = noise.replace("VOICE", voice)
        assert noise in said["libraries.log"], noise
        assert noise not in said["out"] and noise not in said["err"]
    assert said["libraries.log"].count("a logger of") == 2  # the last resort's, and a handler's of its own
    assert f"my own print of {voice}" in said["run.log"]


def test_two_voices_at_once_are_refused():
    assert split_output_mode(["a=1", "--quiet"]) == (["a=1"], QUIET)
    with pytest.raises(UserError, match="exclude each other"):
        split_output_mode(["--json", "--quiet"])


def test_what_ranks_printed_outlives_rays_folder(tmp_path):
    logs = tmp_path / "ray" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker-1.out").write_text(":job_id:01\n:actor_name:RankHost\n[Gloo] Rank 0 is connected\n")
    (logs / "worker-1.err").write_text(":job_id:01\n:actor_name:RankHost\n")
    (logs / "raylet.out").write_text("of no interest")
    watch, far = SimpleNamespace(kept={"worker-4.out"}), str(tmp_path / "far" / "worker-9.out")
    printed = [("Rank 1 (on 10.0.0.2)", [far], ["from another machine"]), ("Rank 2", ["worker-4.out"], ["kept before"])]
    cluster = SimpleNamespace(folder=str(tmp_path / "ray"))
    workers = SimpleNamespace(cluster=cluster, watch=watch, printed=lambda: printed)
    keep_worker_logs(workers, tmp_path)  # pyright: ignore
    assert (tmp_path / "workers.log").read_text().splitlines() == [
        *("--- Rank 1 (on 10.0.0.2)", "from another machine"),
        *("--- worker-1.out", "[Gloo] Rank 0 is connected"),
    ]


PRINTED = r"""
import os
from posttrain.machines.host import MachineHost
print(":job_id:01\nof the host", flush=True)
os.system("echo of a worker >&2")
lines = MachineHost(".", {}).printed()
os.write(3, "\n".join(lines).encode())
"""


def test_what_workers_of_other_machines_printed_into_rays_files_is_in_the_runs_log(tmp_path):
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        theirs, ours = os.pipe()
        command = f"exec 3>&{ours}; exec {sys.executable} -c '{PRINTED}'"
        subprocess.run(["bash", "-c", command], stdout=out, stderr=err, pass_fds=[ours], check=True)
        os.close(ours)
        lines = os.read(theirs, 4096).decode().splitlines()
        os.close(theirs)
    machines: Any = SimpleNamespace(printed=lambda: [("10.0.0.2", lines), ("10.0.0.3", [])])
    keep_machine_logs(machines, tmp_path)
    expected = ["--- Rewards, tools and agents on 10.0.0.2", "of the host", "of a worker"]
    assert (tmp_path / "workers.log").read_text().splitlines() == expected
