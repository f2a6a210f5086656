"""`posttrain push`: the files that arrive at a hub, the model card, and the answers to mistakes."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from posttrain import cli
from posttrain.checkpoint import CheckpointManager
from posttrain.commands.push import main, write_card

STEP = 4


class Hub(ThreadingHTTPServer):
    """Takes what huggingface_hub sends: a repository is made, files are asked about, and one commit holds them all."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.asked: list[str] = []
        self.made: dict = {}
        self.files: dict[str, bytes] = {}
        self.refuses = False
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = self._chunks()
        self.server.asked.append(self.path)
        if self.server.refuses:
            self._send({"error": "no right to write"}, 403)
        elif self.path.endswith("/repos/create"):
            self.server.made = json.loads(body)
            self._send({"url": f"{self.server.address}/me/sums", "name": "me/sums", "id": "me/sums"})
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            self._send({"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            found = {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.server.address}/me/sums/commit/0"}
            self._send(found)
        else:
            self._send({})

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self._send({"sha": "0" * 40, "id": "me/sums", "siblings": []})

    def _chunks(self) -> bytes:
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        return found

    def _send(self, answer: dict, status: int = 200) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """Of a run of four steps that went from 0.5 to 0.9."""
    run = tmp_path / "outputs" / "project" / "first"
    model = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}"}

    def write(folder: Path) -> None:
        (folder / "huggingface").mkdir(parents=True)
        for name, text in model.items():
            (folder / "huggingface" / name).write_bytes(text)

    manager = CheckpointManager(run / "checkpoints")
    manager.save(STEP, tensors={}, state={}, rng={}, extra=write)
    settings = {
        "algorithm": {"adv_estimator": "grpo"},
        "actor_rollout_ref": {"model": {"path": "someone/base-model"}, "actor": {"optim": {"lr": 1e-6}}},
        "data": {"train_files": "/home/me/private/rows.parquet"},
        "trainer": {"seed": 1},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    lines = [{"step": step, "val/sums/mean@1": 0.5 + 0.1 * step, "reward_mean": 0.2 * step} for step in range(STEP + 3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    start = {"command": "/opt/env/bin/python -m posttrain train trainer.seed=1", "versions": {"torch": "2.13.0"}}
    (run / "run.json").write_text(json.dumps({"starts": [start]}))
    return manager.path_of(STEP)


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Hub:
    """The one that huggingface_hub talks to, signed in."""
    import huggingface_hub.constants as constants

    found = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", found.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield found
    found.shutdown()


def push(checkpoint: Path, *more: str) -> int:
    return cli.main(["push", str(checkpoint), "me/sums", *more])


def test_the_hub_gets_the_model_its_card_its_curve_and_its_settings(checkpoint, hub, capsys):
    assert push(checkpoint, "--private") == 0
    assert f"published: {hub.address}/me/sums" in capsys.readouterr().out
    assert hub.made["name"] == "sums" and hub.made["organization"] == "me"
    assert hub.made.get("visibility") == "private" or hub.made.get("private") is True
    assert hub.files["model.safetensors"] == b"weights" and hub.files["config.json"] == b"{}"
    assert set(hub.files) >= {"README.md", "curve.svg", "posttrain_config.yaml", "tokenizer.json"}


def test_what_the_hub_rejects_is_said_with_its_reason(checkpoint, hub, capsys):
    hub.refuses = True
    assert push(checkpoint) == 2
    said = capsys.readouterr().err
    assert "The hub did not take me/sums" in said and "403" in said and "Traceback" not in said and hub.files == {}


def test_without_a_token_nothing_is_sent(checkpoint, hub, capsys, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    assert push(checkpoint) == 2
    assert "hf auth login" in capsys.readouterr().err and hub.asked == []


def test_the_card_has_curve_results_command_and_settings_but_no_private_paths(checkpoint, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    text = write_card(folder, "me/sums", checkpoint.parents[1], STEP).read_text()
    front = yaml.safe_load(text.split("---")[1])
    assert front["base_model"] == "someone/base-model" and set(front["tags"]) >= {"posttrain", "grpo"}
    assert "trained with GRPO for 4 steps" in text
    assert "| `val/sums/mean@1` | 0.5 (step 0) | 0.9 (step 4) |" in text  # later steps are not this checkpoint's
    assert "python -m posttrain train trainer.seed=1" in text and "/opt/env" not in text
    assert "| `actor_rollout_ref.actor.optim.lr` | 1e-06 |" in text and "torch 2.13.0" in text
    assert "rows.parquet" in text and "/home/me" not in text
    assert "<svg" in (folder / "curve.svg").read_text()


def test_a_checkpoint_without_its_run_is_published_with_a_shorter_card(checkpoint, tmp_path):
    for name in ("config.yaml", "metrics.jsonl", "run.json"):
        (checkpoint.parents[1] / name).unlink()
    folder = tmp_path / "alone"
    assert main([str(checkpoint), "me/sums", "--folder", str(folder)]) == 0
    assert "# sums" in (folder / "README.md").read_text() and (folder / "model.safetensors").is_file()
    assert not (folder / "curve.svg").exists()


@pytest.mark.parametrize(
    ("place", "repo", "words"),
    [("global_step_4", "sums", "give OWNER/NAME"), ("nowhere", "me/sums", "is not a checkpoint")],
)
def test_mistakes_are_answered_before_torch_is_imported(checkpoint, place, repo, words):
    script = (
        "import sys; from posttrain.cli import main; code = main(sys.argv[1:]); "
        "sys.exit(7 if 'torch' in sys.modules else code)"
    )
    command = [sys.executable, "-c", script, "push", str(checkpoint.parent / place), repo]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2 and words in ran.stderr
