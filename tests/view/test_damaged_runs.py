"""A damaged or hostile run is one entry with a sentence; it hangs no request, and all other runs are shown as ever."""

from __future__ import annotations

import json
import os
import shutil
import socket

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from viewing import STEPS, Client

from posttrain.cli import main
from posttrain.tracking.safe_files import DamagedFile, read_settings
from posttrain.tracking.status import load_status, read_status, run_state, write_status

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)
MERGES = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{i}: &a{i}\n  <<: [{', '.join([f'*a{i - 1}'] * 10)}]\n  k{i}: 1\n" for i in range(1, 10)
)
STATUS = {"status": "finished", "step": 3, "total_steps": 3}
ALL = "good/synthetic"


@pytest.fixture
def bad(made, tmp_path):
    """A run beside a good one, to be damaged."""
    for name in ("good", "bad"):
        shutil.copytree(made, tmp_path / "outputs" / name / "synthetic")
    return tmp_path / "outputs" / "bad" / "synthetic"


def shown(bad):
    """The entry of the damaged run; the other one is whole, and every question about either is answered."""
    client = Client(bad.parents[1])
    try:
        runs = {run["name"]: run for run in client.ask("runs")}
        assert runs[ALL]["status"] == "finished" and runs[ALL]["step"] == STEPS and runs[ALL]["problem"] is None
        assert client.ask("metrics", run=ALL, names="reward_mean")["steps"] == list(range(STEPS + 1))
        assert client.ask("config", run=ALL)["trainer.seed"] == "0"
        for run in runs:
            for name in ("config", "metrics", "diagnosis", "timeline", "steps", "failures"):
                client.ask(name, run=run)
            client.ask("find", run=run, which="best")
            client.lines("search", run=run, words="needle")
        client.ask("compare", runs="\t".join(runs))
        return runs["bad/synthetic"]
    finally:
        client.close()


def replace(path, make):
    path.unlink()
    make(path)


def a_socket(path):
    with socket.socket(socket.AF_UNIX) as one:
        here = os.getcwd()
        os.chdir(path.parent)  # addresses of sockets are short
        try:
            one.bind(path.name)
        finally:
            os.chdir(here)


def huge(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


NO_FILES = {
    "a named pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": a_socket,
    "a folder": lambda path: path.mkdir(),
    "cannot be opened": lambda path: path.symlink_to(path.name),
    "does not exist": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("name", ["config.yaml", "status.json", "metrics.jsonl"])
def test_what_is_no_file_is_named_and_not_waited_for(bad, name, kind):
    replace(bad / name, NO_FILES[kind])
    found = shown(bad)
    assert name in found["problem"] and kind in found["problem"]
    assert (found["status"] == "damaged") == (name == "status.json")


@pytest.mark.parametrize(
    "name",
    [
        "diagnosis.jsonl",
        "timeline.jsonl",
        "vocabulary.parquet",
        "samples/step_3.parquet",
        f"samples/val_{STEPS}.parquet",
    ],
)
@pytest.mark.parametrize("make", [os.mkfifo, huge, *NO_FILES.values()])
def test_other_files_that_are_none_are_passed_over(bad, name, make):
    (bad / name).unlink(missing_ok=True)
    make(bad / name)
    assert shown(bad)["status"] == "finished"


@pytest.mark.parametrize("name", ["config.yaml", "status.json", "metrics.jsonl"])
def test_files_of_a_terabyte_are_not_read(bad, name):
    replace(bad / name, huge)
    found = shown(bad)
    if name == "metrics.jsonl":
        client = Client(bad)
        assert "line of more than" in client.ask("metrics", run="synthetic")["problem"]
        client.close()
    else:
        assert name in found["problem"] and "at most" in found["problem"]


@pytest.mark.parametrize(
    "text", [BOMB, MERGES, "a: &a [*a]\n", "a: &a {b: *a}\n", "[" * 20000, "x: " + "9" * 5000, "- 1\n"]
)
def test_settings_that_would_grow_without_end_are_refused(bad, text):
    (bad / "config.yaml").write_text(text)
    found = shown(bad)
    assert found["problem"].startswith("config.yaml ") and found["family"] is None
    client = Client(bad)
    assert client.ask("config", run="synthetic") == {}
    status, _, words = client.get("/api/plan?run=synthetic", Authorization=f"Bearer {client.viewer.guard.token}")
    assert status == 404 and b"config.yaml" in words
    client.close()


def test_settings_with_aliases_are_read_like_any_other(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("base: &base {a: [1, 2], b: x}\nother: *base\nmerged: {<<: *base, b: y}\nlist: [*base, *base]\n")
    assert read_settings(path) == yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({f"key{i}": {"value": i, "list": [0.5] * 5} for i in range(1000)}))
    assert read_settings(path) == yaml.safe_load(path.read_text())
    path.write_text("")
    assert read_settings(path) == {}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\x89PNG\r\n\x00\xff",
        b"[1, 2]",
        b"null",
        b"3",
        b"[" * 100000,
        b'{"status": ["running"]}',
        *(
            json.dumps(STATUS | wrong).encode()
            for wrong in (
                {"step": "three"},
                {"step": [3]},
                {"total_steps": {}},
                {"step": float("nan")},
                {"seconds_left": float("inf")},
                {"stage": 7},
                {"time": 12},
                {"pid": "me"},
            )
        ),
    ],
)
def test_a_status_that_is_none_is_one_damaged_entry(bad, content):
    (bad / "status.json").write_bytes(content)
    found = shown(bad)
    assert found["status"] == "damaged" and found["problem"].startswith("status.json")
    assert found["reached"]["reward"]["metric"] == "reward_mean"  # what can be read is shown
    assert read_status(bad) == {} and run_state(bad) == "unknown"
    with pytest.raises(DamagedFile):
        load_status(bad)


def test_a_status_as_runs_write_it_is_no_damage(tmp_path):
    assert load_status(tmp_path) == {}
    write_status(tmp_path, "running", 3, 10)
    assert load_status(tmp_path)["step"] == 3 and run_state(tmp_path) == "running"
    (tmp_path / "status.json").write_text(
        '{"status": "running", "pid": 99999999999999999999, "host": null, "more": [1]}'
    )
    assert load_status(tmp_path)["more"] == [1] and run_state(tmp_path) == "running"


def test_lines_of_any_kind_break_neither_charts_nor_health(bad):
    wrong = [b"\xff\xfe\n", b"[1]\n", b"{\n", b"[" * 100000 + b"\n", b'{"step": "x"}\n', b'{"step": 9, "advice": 3}\n']
    wrong += [b'{"step": 9, "stages": [1, ["gen"], ["gen", "a", 1], ["gen", NaN, 1], ["gen", 5, 1]]}\n']
    wrong += [b'{"step": 9, "advice": [[1], {"text": {}, "metric": 3}]}\n', b'{"step": 9, "a": [1], "b": {}}\n']
    for name in ("metrics.jsonl", "diagnosis.jsonl", "timeline.jsonl"):
        with (bad / name).open("ab") as file:
            file.writelines(wrong)
    shown(bad)
    client = Client(bad)
    assert client.ask("timeline", run="synthetic")["steps"][-3]["stages"] == [["gen", 5, 1]]
    assert [line["metric"] for line in client.ask("diagnosis", run="synthetic")][-2:] == [None, None]
    assert client.ask("metrics", run="synthetic", names="a,b")["values"]["a"][-1] is None
    client.close()


def test_samples_of_other_kinds_are_said_and_the_other_steps_shown(bad):
    made = pq.read_table(bad / "samples" / "step_1.parquet")
    pq.write_table(
        made.set_column(made.schema.names.index("score"), "score", [["x"] * len(made)]), bad / "samples/step_1.parquet"
    )
    (bad / "samples" / "step_2.parquet").write_bytes(b"PAR1 no parquet PAR1")
    pq.write_table(pa.table({"other": [1, 2]}), bad / "samples" / "step_3.parquet")
    os.truncate(bad / "samples" / "step_4.parquet", 100)
    shown(bad)
    client = Client(bad)
    key = {"Authorization": f"Bearer {client.viewer.guard.token}"}
    for step in (1, 2, 4):
        status, _, words = client.get(f"/api/groups?run=synthetic&step={step}", **key)
        assert status == 404 and b"cannot be read" in words, words
    client.viewer.answers.read_all("synthetic")
    found = client.ask("find", run="synthetic", which="longest")
    assert found["read"] == found["files"] == STEPS and {one["step"] for one in found["found"]} >= {5, 6}
    assert len(client.ask("groups", run="synthetic", step=5)) == 4
    client.close()


def test_names_that_are_no_text_can_be_asked_for(made, tmp_path):
    for name in ("tab\there", os.fsdecode(b"\xff\xfe"), "new\nline"):
        shutil.copytree(made, tmp_path / name)
    (tmp_path / "loop").symlink_to(".")
    (tmp_path / "self").symlink_to("self")
    client = Client(tmp_path)
    names = [run["name"] for run in client.ask("runs")]
    assert len(names) == 3 and all(client.ask("run", run=name)["step"] == STEPS for name in names)
    assert client.ask("compare", runs="\t".join(names)) == []
    client.close()


def test_a_damaged_run_is_exported_with_the_others(bad, tmp_path):
    (bad / "status.json").write_text("[")
    (bad / "config.yaml").write_text(BOMB)
    (bad / "samples" / "step_6.parquet").write_bytes(b"none")
    assert main(["view", str(bad.parents[1]), "--export", str(tmp_path / "out.html")]) == 0
    page = (tmp_path / "out.html").read_text()
    assert "status.json is not valid JSON" in page and "config.yaml is not valid YAML" in page


def test_the_terminal_lists_a_damaged_run_too(bad, capsys):
    (bad / "status.json").write_text('{"step": []}')
    with (bad / "metrics.jsonl").open("ab") as file:
        file.write(b"{broken}\n")
    assert main(["runs", str(bad.parents[1])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and "metrics.jsonl cannot be read" in next(line for line in lines if line.startswith("bad"))


def test_a_plan_runs_no_code_that_comes_with_a_model(tmp_path):
    from posttrain.view.answers import _without_model_code

    tree = {"actor_rollout_ref": {"model": {"path": "x", "trust_remote_code": True}}, "list": [1]}
    assert _without_model_code(tree) == {
        "actor_rollout_ref": {"model": {"path": "x", "trust_remote_code": False}},
        "list": [1],
    }
