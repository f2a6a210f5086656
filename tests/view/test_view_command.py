"""`posttrain view`: which runs it finds, and the file that needs no server."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import pytest
from viewing import STEPS

from posttrain.cli import main
from posttrain.view.server import joined_modules


@pytest.fixture(scope="module")
def page(made, tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "run.html"
    assert main(["view", str(made), "--export", str(path)]) == 0
    return path.read_text()


def test_an_exported_file_holds_everything_it_needs(page):
    assert not re.search(r'<(script|link)[^>]*(src|href)="(?!data:)', page)
    data = json.loads(re.search(r'id="embedded">(.*?)</script>', page, re.S)[1])
    answers = data["answers"]
    assert answers["metrics?run=synthetic"]["steps"] == list(range(STEPS + 1))
    assert answers["steps?learn=1&run=synthetic"]["step"] == list(range(1, STEPS + 1))
    group = answers[f"groups?kind=step&run=synthetic&step={STEPS}"][0]
    key = f"kind=step&run=synthetic&sample=3&step={STEPS}&uid={group['uid']}"
    assert answers[f"response?{key}"]["texts"] and answers["config?run=synthetic"]["reward.server.api_key"] == "***"


def test_nothing_that_a_model_wrote_leaves_its_place_in_the_file(page):
    data = re.search(r'id="embedded">(.*?)</script>', page, re.S)[1]
    assert "<" not in data and "\\u003cscript>alert(" in data


def test_the_policy_of_an_exported_file_allows_its_own_scripts_alone(page):
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "connect-src" not in policy
    for code in re.findall(r'<script(?: type="module")?>(.*?)</script>', page, re.S) + re.findall(
        r"<style>(.*?)</style>", page, re.S
    ):
        assert base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() in policy


def test_the_modules_can_be_joined_into_one():
    code = joined_modules("main.js")
    names = re.findall(r"^(?:async )?(?:function\*?|class) (\w+)", code, re.M)
    for line in re.findall(r"^(?:const|let) (.*)", code, re.M):  # of `const A = 1, B = f(x);` both
        names += re.findall(r"(?:^|, )(\w+) = (?!>)", line)
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})
    assert "import " not in re.sub(r"//.*|/\*.*?\*/", "", code) and not re.search(r"^export", code, re.M)


def test_a_place_without_runs_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["view"]) == 2 and "no run" in capsys.readouterr().err
    assert main(["view", "nowhere"]) == 2 and "no run `nowhere`" in capsys.readouterr().err


def test_a_port_that_is_taken_is_said(made, capsys):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["view", str(made), "--port", str(taken.getsockname()[1])]) == 2
    assert "Give another with --port" in capsys.readouterr().err
