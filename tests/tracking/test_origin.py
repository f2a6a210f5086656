"""run.json: by which command, versions and machine a run was made, without secrets, one entry per start."""

from __future__ import annotations

import json

import pytest

from posttrain.tracking.status import MOST_STARTS, ORIGIN_FILE, command, origin, read_origin, write_origin


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["python", "-m", "posttrain", "a=1", "b=x y"], "python -m posttrain a=1 'b=x y'"),
        (["x", "reward.server.api_key=abc"], "x 'reward.server.api_key=***'"),
        (["x", "+trainer.hub_token=abc", "++a.password=b=c"], "x '+trainer.hub_token=***' '++a.password=***'"),
        (["x", "--api-key=abc", "url=https://me:pw@host/x"], "x '--api-key=***' 'url=https://***@host/x'"),
        (["x", "--api-key", "abc", "--token", "--more", "api_key", "y"], "x --api-key '***' --token --more api_key y"),
        (["x", "https://host/?token=abc"], "x 'https://host/?token=***'"),
        (["x", "data.max_tokens=5", "tokenizer=t", "a="], "x data.max_tokens=5 tokenizer=t a="),
    ],
)
def test_a_command_is_kept_as_it_can_be_given_again_but_for_secrets(given, kept):
    assert command(given) == kept


def test_secrets_of_the_environment_are_taken_out_of_commands(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    assert command(["x", "a=0123456789abcdef", "0123456789abcdef"]) == "x 'a=***' '***'"


def test_every_start_adds_an_entry_and_a_broken_file_begins_anew(tmp_path):
    write_origin(tmp_path, 0)
    write_origin(tmp_path, 7)
    assert [start["step"] for start in read_origin(tmp_path)] == [0, 7]
    now = origin()
    assert now["command"] and now["versions"]["torch"] and now["hardware"]["memory_gib"] > 0
    for step in range(8, 8 + MOST_STARTS):
        write_origin(tmp_path, step)
    steps = [start["step"] for start in read_origin(tmp_path)]
    assert len(steps) == MOST_STARTS and steps[0] == 0 and steps[-1] == 7 + MOST_STARTS
    (tmp_path / ORIGIN_FILE).write_text('{"starts": [')
    assert read_origin(tmp_path) == []
    write_origin(tmp_path, 3)
    assert [start["step"] for start in json.loads((tmp_path / ORIGIN_FILE).read_text())["starts"]] == [3]
