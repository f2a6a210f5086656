"""Who may ask a viewer, and that it shows nothing but runs: token, host, paths, policy, secrets."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from posttrain.view.server import static_file, static_files

ROOT = Path(__file__).resolve().parents[2]


def test_without_the_token_nothing_is_answered(client):
    for path in ("/", "/static/main.js", "/api/runs", "/?token=wrong", "/?token="):
        assert client.get(path)[0] == 403
    wrong = {"Cookie": f"posttrain_view_{client.viewer.server_port}=wrong", "Authorization": "Bearer é"}
    assert client.get("/api/runs", **wrong)[0] == 403


def test_the_token_of_the_address_becomes_a_cookie_that_opens_the_page(client):
    status, headers, _ = client.get(client.viewer.address.partition(f":{client.viewer.server_port}")[2])
    assert status == 303 and headers["Location"] == "/"
    cookie, *rules = headers["Set-Cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Strict"} <= set(rules)
    assert client.get("/", Cookie=cookie)[0] == 200 and client.get("/static/main.js", Cookie=cookie)[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 403),
        ("evil.example:6180", 403),
        ("", 403),
        ("[::1", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost:9999", 200),
        ("127.0.0.1", 200),
        ("[::1]:6180", 200),
    ],
)
def test_only_names_of_this_machine_are_answered(client, host, status):
    assert client.get("/api/runs", Host=host, Authorization=f"Bearer {client.viewer.guard.token}")[0] == status


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/../../../etc/passwd",
        "/static//etc/passwd",
        "/config.yaml",
        "/api/config?run=../made",
        "/api/config?run=/etc",
        "/api/groups?run=synthetic&step=1&kind=../step",
        "/api/nothing",
    ],
)
def test_no_path_leads_out_of_the_known_files_and_runs(client, path):
    status, _, body = client.get(path, Authorization=f"Bearer {client.viewer.guard.token}")
    assert status == 404 and b"root:" not in body and b"import" not in body


@pytest.mark.parametrize(
    "path",
    [
        "/api/groups?run=synthetic&step=x",
        "/api/groups?run=synthetic",
        "/api/find?run=synthetic&which=prettiest",
        "/api/previews?run=synthetic&rows=1",
    ],
)
def test_a_question_that_makes_no_sense_is_refused_in_words(client, path):
    assert client.get(path, Authorization=f"Bearer {client.viewer.guard.token}")[0] == 400


def test_the_policy_allows_own_files_only(client):
    _, headers, _ = client.get("/", Authorization=f"Bearer {client.viewer.guard.token}")
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy and "http" not in policy and "*" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Referrer-Policy"] == "no-referrer"


def test_the_page_asks_no_other_host_and_parses_no_markup():
    for name in static_files() - {"uplot.min.js", "uplot.LICENSE"}:
        text = static_file(name).decode()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc", text
        ), name
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name
    chart = static_file("uplot.min.js").decode()
    assert "innerHTML" not in chart and "eval(" not in chart


def test_secrets_in_a_run_are_not_shown(client):
    settings = client.ask("config", run="synthetic")
    assert settings["reward.server.api_key"] == "***" and "secret" not in json.dumps(settings)


def test_secrets_that_a_settings_file_holds_are_taken_out_when_it_is_read(made, tmp_path):
    from posttrain.view.runs import settings

    (tmp_path / "config.yaml").write_text("reward: {api_key: abc, url: 'http://me:pass@host/x'}\n")
    assert settings(tmp_path)["reward.api_key"] == "***" and "pass" not in str(settings(tmp_path))


def test_static_files_are_packaged():
    assert '"view/static/*"' in (ROOT / "pyproject.toml").read_text()
    assert {"index.html", "style.css", "main.js", "uplot.min.js", "uplot.LICENSE"} <= static_files()
