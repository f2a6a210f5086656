"""Several runs side by side: what the table of runs and the page of settings are made of, and the colours of charts."""

from __future__ import annotations

import itertools
import json
import math
import re

import pytest
from viewing import STEPS, Client, small_run

from posttrain.explain import metric_text
from posttrain.view.runs import END_BYTES, read_progress
from posttrain.view.server import static_file


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    for name, more in {"a": {"seed": 1}, "b": {"seed": 2}, "c": {"seed": 1, "lr": 3e-6}}.items():
        small_run(folder, name=name, steps=3, responses=16, **more)
    client = Client(folder)
    yield client
    client.close()


def test_the_table_has_what_each_run_reached_and_when_it_was_made(several, made):
    runs = {run["name"]: run for run in several.ask("runs")}
    lines = list(map(json.loads, (several.viewer.answers.runs.folder("a") / "metrics.jsonl").read_text().splitlines()))
    found = runs["a"]["reached"]
    assert found["reward"] == {"metric": "reward_mean", "value": pytest.approx(lines[-1]["reward_mean"], rel=1e-6)}
    assert found["accuracy"]["metric"] == "right/mean" and found["throughput"]["metric"] == "perf/throughput"
    assert found["validation"] == {"metric": "val/sums/mean@1", "value": 0.2} and "loss" not in found  # of step 0
    assert found["started"] == lines[0]["time"] and found["written"] == lines[-1]["time"]


def test_of_a_long_run_only_the_ends_are_read_and_a_cut_line_counts_for_nothing(tmp_path):
    lines = [
        json.dumps({"step": step, "time": step, "reward_mean": step / 10, "pad": "x" * 1000}) for step in range(1000)
    ]
    lines[-2] = json.dumps({"step": 998, "time": 998, "val/gsm8k/mean@4": 0.5, "reward_mean": True})
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 1000, "reward_mean": 7')
    assert (tmp_path / "metrics.jsonl").stat().st_size > END_BYTES
    assert read_progress(tmp_path) == {
        "reward": {"metric": "reward_mean", "value": 99.9},
        "validation": {"metric": "val/gsm8k/mean@4", "value": 0.5},
        "started": 0,
        "written": 999,
    }
    assert read_progress(tmp_path / "nowhere") == {}


def test_runs_that_differ_in_their_seed_alone_are_one_family(several):
    family = {run["name"]: run["family"] for run in several.ask("runs")}
    assert family["a"] == family["b"] != family["c"] and None not in family.values()


def test_settings_come_with_their_defaults_those_that_differ_first(several):
    rows = several.ask("details", run="c")["settings"]
    changed = [row["changed"] for row in rows]
    assert changed == sorted(changed, reverse=True) and 5 < sum(changed) < 20 < len(rows)
    by_key = {row["key"]: row for row in rows}
    estimator, lr = by_key["algorithm.adv_estimator"], by_key["actor_rollout_ref.actor.optim.lr"]
    assert (estimator["value"], estimator["default"], estimator["changed"]) == ("grpo", "gae", True)
    assert lr["value"] == "3e-06" and lr["changed"] and lr["sentence"]
    assert not by_key["algorithm.gamma"]["changed"] and by_key["algorithm.gamma"]["default"] == "1.0"
    assert by_key["reward.server.api_key"]["value"] == "***"


def test_settings_of_a_supervised_run_are_compared_with_its_own_defaults(tmp_path):
    import yaml

    from posttrain.config.trees import COMMANDS

    config = COMMANDS["sft"].root()
    config.trainer.seed = 99
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    client = Client(tmp_path)
    rows = client.ask("details", run=tmp_path.name)["settings"]
    assert [row["key"] for row in rows if row["changed"]] == ["trainer.seed"] and len(rows) > 20
    client.close()


def test_a_run_says_by_which_command_versions_and_machine_it_was_made(several, made, tmp_path):
    (start,) = several.ask("details", run="a")["starts"]
    assert "python" in start["command"] and start["step"] == "0" and start["host"]
    assert {"python", "torch", "numpy"} <= start["versions"].keys() and int(start["hardware"]["cores"]) > 0
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "run.json").write_text(
        '{"starts": [3, {"command": ["x"], "versions": 7, "hardware": {"a": {"b": 1}}}]}'
    )
    client = Client(tmp_path)
    found = client.ask("details", run=tmp_path.name)
    assert found["settings"] == [] and found["starts"] == [{"versions": {}, "hardware": {"a.b": "1"}}]
    (tmp_path / "run.json").write_text("[")
    assert client.ask("details", run=tmp_path.name)["starts"] == []
    client.close()


def test_metrics_are_explained_as_posttrain_explain_does(client):
    names, texts = client.ask("metrics", run="synthetic")["names"], client.ask("explain", run="synthetic")
    assert {"reward_mean", "kl_loss", "timing_s/gen", "val/sums/mean@1"} <= texts.keys() <= set(names)
    assert texts["reward_mean"] == " ".join(metric_text("reward_mean").split())
    assert "time" not in texts and all("\n" not in text for text in texts.values())


def test_an_exported_file_has_settings_and_explanations(made, tmp_path):
    from posttrain.cli import main

    assert main(["view", str(made), "--export", str(tmp_path / "run.html")]) == 0
    page = (tmp_path / "run.html").read_text()
    answers = json.loads(re.search(r'id="embedded">(.*?)</script>', page, re.S)[1])["answers"]
    assert answers["details?run=synthetic"]["starts"] and answers["explain?run=synthetic"]["reward_mean"]
    assert answers["runs"][0]["reached"]["reward"] and answers["metrics?run=synthetic"]["count"] == STEPS + 1


# -- colours

SIGHTS = {  # Machado, Oliveira, Fernandes 2009, of full strength
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
}


def linear(colour):
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def contrast(one, other):
    light = [0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05 for r, g, b in map(linear, (one, other))]
    return max(light) / min(light)


def lab(colour, sight):
    seen = linear(colour)
    r, g, b = (min(1, max(0, sum(a * c for a, c in zip(row, seen, strict=True)))) for row in SIGHTS[sight])
    x = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047
    z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883
    xyz = x, 0.2126 * r + 0.7152 * g + 0.0722 * b, z
    x, y, z = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_stand_out_from_their_background_and_from_each_other_for_every_sight(theme):
    root = re.findall(r"^:root.*$", static_file("style.css").decode(), re.M)[theme]
    value = {name: f"#{text * 2 if len(text) == 3 else text}" for name, text in re.findall(r"--([\w-]+): #(\w+)", root)}
    colours = [value[f"c{i}"] for i in range(8)]
    for background in (value["back"], value["card"]):
        assert all(contrast(colour, background) >= 3 for colour in colours)  # WCAG 2.1, 1.4.11
        assert contrast(value["text"], background) >= 7 and contrast(value["soft"], background) >= 4.5
    for one, other in itertools.combinations(colours, 2):
        assert min(math.dist(lab(one, sight), lab(other, sight)) for sight in SIGHTS) > 15, (one, other)
