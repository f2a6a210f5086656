"""What a viewer answers is what lies in the run directory, also while it grows and for runs of earlier versions."""

from __future__ import annotations

import json
import re
import shutil
import time

import pyarrow.parquet as pq
import pytest
import yaml
from viewing import RESPONSES, STEPS, Client, small_run

from posttrain.tracking.rundir import DIAGNOSIS, TIMELINE, append_line
from posttrain.tracking.samples import write_samples
from posttrain.view import catalogue
from posttrain.view.answers import Answers
from posttrain.view.catalogue import TrigramIndex
from posttrain.view.runs import Metrics, Runs
from posttrain.view.samples import groups, token_texts
from posttrain.view.server import SCRIPT, static_file

NEW = ["length", "advantage", "mismatch", "seed", "data_row", "extra_info", "sampling"]


def rows_of(run, step=STEPS, kind="step"):
    return pq.read_table(run / "samples" / f"{kind}_{step}.parquet").to_pylist()


def test_names_with_a_star_mean_all_that_begin_so_and_columns_grow_with_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "val/a": 0.123456789, "other": 1}\n')
    metrics = Metrics(path)
    assert metrics.columns(["val/*"])["values"] == {"val/a": [0.1234568]}
    with path.open("a") as file:
        file.write('{"step": 2, "val/b": 2.0}\n')
    assert metrics.columns(["val/*", "other"])["values"] == {
        "val/a": [0.1234568, None],
        "other": [1, None],
        "val/b": [None, 2.0],
    }
    assert metrics.columns(["val/*"], after=1, identity=metrics.columns([])["identity"])["values"]["val/b"] == [2.0]


def test_the_page_is_one_script_that_asks_for_no_other(client):
    """Twenty modules would be asked for one after the other, each when the one before it was read."""
    page, script = static_file("index.html").decode(), static_file(SCRIPT).decode()
    assert page.count("<script") == 2 and f"/static/{SCRIPT}" in page
    assert not re.search(r"^(import|export) ", script, re.M) and "function overviewPage(" in script


def test_whoever_opens_samples_has_all_of_them_read_a_moment_later(made):
    answers = Answers(Runs([str(made)]))
    run = next(iter(answers.runs.folders()))
    answers.answer("steps", {"run": run, "learn": "1"})
    answers.answer("steps", {"run": run, "learn": "1"})  # as the page does again and again
    assert answers._pending == {run} and not answers._catalogues  # what the page asks first comes first
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(answers._catalogues) < 2:
        time.sleep(0.02)
    assert {kind for _, kind in answers._catalogues} == {"step", "val"} and not answers._pending


def test_work_in_the_background_gives_way_to_answers_and_not_to_those_that_wait_for_it(monkeypatch):
    naps: list[float] = []
    clock = iter(range(100))
    monkeypatch.setattr(catalogue.time, "sleep", naps.append)
    monkeypatch.setattr(catalogue.time, "monotonic", lambda: 0.1 * next(clock))
    catalogue.yield_to_answers()
    assert naps == []
    with catalogue.answering():
        catalogue.yield_to_answers()
        assert 0 < len(naps) < 10  # half a second at most
        with catalogue.while_waiting():
            before = len(naps)
            catalogue.yield_to_answers()
            assert len(naps) == before
    assert catalogue._asked == 0


def test_metrics_come_as_columns_and_then_only_what_is_new(client):
    whole = client.ask("metrics", run="synthetic", names="reward_mean,kl_loss,nothing")
    assert whole["steps"] == list(range(STEPS + 1)) and set(whole["values"]) == {"reward_mean", "kl_loss"}
    assert whole["values"]["reward_mean"][0] is None and "val/sums/mean@1" in whole["names"]
    later = client.ask("metrics", run="synthetic", names="reward_mean", after=5, identity=whole["identity"])
    assert later["first"] == 5 and later["values"]["reward_mean"] == whole["values"]["reward_mean"][5:]
    assert client.ask("metrics", run="synthetic", names="reward_mean", after=5, identity="other")["first"] == 0


def test_a_growing_file_is_read_on_and_one_that_was_cut_is_read_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 0.5}\n{"step": 2, "a": "NaN"}\n{"step": 3, "a"')
    metrics = Metrics(path)
    first = metrics.columns(["a"])
    assert first["steps"] == [1, 2] and first["values"]["a"] == [0.5, None]
    with path.open("a") as file:
        file.write(': 1}\n{"step": 4, "b": 2}\n')
    assert metrics.columns(["b"])["steps"] == [1, 2, 3, 4]
    path.write_text('{"step": 1, "a": 7.0}\n')
    assert metrics.columns(["a"])["values"]["a"] == [7.0]
    path.unlink()
    assert metrics.columns(["a"])["steps"] == []


def test_groups_responses_and_tokens_are_those_of_the_file(client, made):
    rows = rows_of(made)
    found = client.ask("groups", run="synthetic", step=STEPS)
    assert [group["uid"] for group in found] == list(dict.fromkeys(row["uid"] for row in rows))
    third = found[2]
    own = [row for row in rows if row["uid"] == third["uid"]]
    assert third["scores"] == [row["score"] for row in own] and third["data_row"] == own[0]["data_row"]
    assert third["truncated"] == sum(row["finish_reason"] == "length" for row in own)
    group = client.ask("group", run="synthetic", step=STEPS, uid=third["uid"])
    assert [one["response"] for one in group["responses"]] == [row["response"] for row in own]
    assert group["responses"][1]["parts"] == json.loads(own[1]["reward_parts"])
    assert group["responses"][1]["seed"] == str(own[1]["seed"]) and json.loads(group["sampling"]) == {
        "temperature": 1.0
    }
    tokens = client.ask("response", run="synthetic", step=STEPS, uid=third["uid"], sample=1)
    assert (
        tokens["ids"] == own[1]["response_ids"] and "".join(tokens["texts"]) == bytes(own[1]["response_ids"]).decode()
    )
    assert tokens["numbers"]["old_log_probs"] == pytest.approx(own[1]["old_log_probs"], rel=1e-6)
    assert len(tokens["prompt_texts"]) == len(own[1]["prompt_ids"])


def test_what_all_prompts_of_a_step_begin_with_is_left_out_of_their_list(tmp_path):
    said = "<|system|>Tools: a long description that all have<|end|><|user|>"
    for name, prompts, shown in (
        ("long", [f"{said}hat<|end|>", f"{said}ham<|end|>"], ["… hat<|end|>", "… ham<|end|>"]),
        ("short", ["<|user|>1 + 2 = ?", "<|user|>1 + 3 = ?"], ["<|user|>1 + 2 = ?", "<|user|>1 + 3 = ?"]),
        ("one", [f"{said}hat<|end|>"], [f"{said}hat<|end|>"]),
    ):
        rows = len(prompts)
        batch = {"responses": [[1]] * rows, "response_mask": [[1]] * rows, "prompt": prompts, "uid": [*range(rows)]}
        write_samples(tmp_path / name / "samples", 1, batch)
        assert [group["prompt"] for group in groups(tmp_path / name, "step", 1)] == shown


def test_validations_are_shown_like_steps(client, made):
    assert client.ask("steps", run="synthetic") == {"step": list(range(1, STEPS + 1)), "val": [STEPS]}
    groups = client.ask("groups", run="synthetic", step=STEPS, kind="val")
    assert groups[0]["uid"] == rows_of(made, kind="val")[0]["uid"]


def test_filters_give_what_a_look_at_every_row_gives(client, made):
    rows = [row | {"step": step} for step in range(STEPS, 0, -1) for row in rows_of(made, step)]
    client.viewer.answers.read_all("synthetic")

    def found(which, **more):
        return [
            (one["step"], one["uid"], one["sample"])
            for one in client.ask("find", run="synthetic", which=which, **more)["found"]
        ]

    def keys(wanted):
        return [(row["step"], row["uid"], row["sample"]) for row in wanted]

    assert found("best") == keys(sorted(rows, key=lambda row: -row["score"]))
    assert found("worst") == keys(sorted(rows, key=lambda row: row["score"]))
    assert found("truncated") == keys(row for row in rows if row["finish_reason"] == "length")
    assert found("mismatch")[0] == keys([max(rows, key=lambda row: row["mismatch"])])[0]
    assert found("best", step=2) == keys(
        sorted((row for row in rows if row["step"] == 2), key=lambda row: -row["score"])
    )
    assert len(found("longest")) == STEPS * RESPONSES
    place = client.ask("find", run="synthetic", which="best")["found"][0]
    text = client.ask("previews", run="synthetic", rows=f"{place['step']}.{place['row']}")[0]
    assert text and text in " ".join(rows_of(made, place["step"])[place["row"]]["response"].split())


def test_the_same_prompt_is_found_at_every_step_that_asked_it(made, tmp_path):
    run = small_run(tmp_path, steps=3, responses=8, name="again")
    for step in (2, 3):
        shutil.copy(run / "samples" / "step_1.parquet", run / "samples" / f"step_{step}.parquet")
    client = Client(run)
    client.viewer.answers.read_all("again")
    found = client.ask("same", run="again", data_row=rows_of(run, 1)[0]["data_row"])
    assert [one["step"] for one in found["groups"]] == [1, 2, 3] and {one["n"] for one in found["groups"]} == {8}
    client.close()


def test_searches_find_every_script_newest_step_first(client):
    hits = [hit for line in client.lines("search", run="synthetic", words="NEEDLE-") for hit in line.get("hits", [])]
    assert [hit["step"] for hit in hits] == list(range(STEPS, 0, -1)) and hits[0]["text"][1] == "needle-"
    for words in ("答案是", "الجواب", "\\boxed{", "<script>", "What is 3"):
        *lines, end = client.lines("search", run="synthetic", words=words)
        assert end["found"] == sum(len(line.get("hits", [])) for line in lines) > 0, words
    assert client.lines("search", run="synthetic", words="nowhere at all")[-1]["found"] == 0
    assert client.lines("search", run="synthetic", words="  ")[-1]["found"] == 0


def test_the_index_of_letters_rules_out_only_files_that_lack_the_words(made):
    letters, paths = TrigramIndex(), sorted((made / "samples").glob("step_*.parquet"))
    letters.learn(paths, lambda: None)
    letters._thread.join()
    for path in paths:
        for row in pq.read_table(path).to_pylist()[:12]:
            for words in (row["response"][-12:], row["response"][3:20].upper(), row["prompt"], row["response"][:2]):
                assert not letters.rules_out(path, words)
    assert letters.rules_out(paths[1], "needle-4-0") and letters.rules_out(paths[0], "zzzqqq")


def test_a_run_of_an_earlier_version_is_shown_too(made, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(made, old)
    for path in (old / "samples").glob("*.parquet"):
        pq.write_table(pq.read_table(path).drop_columns(NEW), path)
    for name in ("vocabulary.parquet", "timeline.jsonl", "diagnosis.jsonl", "status.json"):
        (old / name).unlink(missing_ok=True)
    client, rows = Client(old), rows_of(made)
    client.viewer.answers.read_all("old")
    groups = client.ask("groups", run="old", step=STEPS)
    assert groups[0]["length"] == pytest.approx(sum(row["length"] for row in rows[:8]) / 8)
    group = client.ask("group", run="old", step=STEPS, uid=groups[0]["uid"])["responses"][0]
    assert group["mismatch"] == pytest.approx(rows[0]["mismatch"], rel=1e-3) and group["seed"] is None
    assert group["advantage"] == pytest.approx(rows[0]["advantage"], rel=1e-3)
    tokens = client.ask("response", run="old", step=STEPS, uid=groups[0]["uid"], sample=0)
    assert tokens["texts"][0] == f"⟨{tokens['ids'][0]}⟩"
    assert client.ask("find", run="old", which="mismatch")["count"] == STEPS * RESPONSES
    assert client.ask("diagnosis", run="old") == [] and client.ask("timeline", run="old")["steps"] == []
    client.close()


def test_characters_that_are_spread_over_tokens_stand_with_their_last_token():
    vocabulary = [bytes([byte]) for byte in range(256)]
    assert token_texts("é你".encode(), vocabulary) == ["", "é", "", "", "你"]
    assert token_texts([0xC3, 0x41], vocabulary) == ["", "\ufffdA"]
    assert token_texts([0x41, 0xC3], vocabulary) == ["A", "\ufffd"]
    assert token_texts([0xC3, 999, 0x42], vocabulary) == ["", "\ufffd⟨999⟩", "B"]


def test_health_names_the_metric_behind_each_advice_and_the_inputs_of_failures(made, tmp_path):
    run = tmp_path / "ill"
    shutil.copytree(made, run)
    append_line(
        run / DIAGNOSIS,
        {
            "step": 2,
            "advice": ["kl_loss 0.2 is above 0.1", {"text": "x", "metric": "actor/entropy", "rule": "entropy"}],
        },
    )
    table = pq.read_table(run / "samples" / "step_2.parquet")
    errors = [None] * (RESPONSES - 2) + ["ValueError: no 13\n  line 3", "ValueError: no 7\n  line 3"]
    pq.write_table(
        table.set_column(table.schema.names.index("error"), "error", [errors]), run / "samples" / "step_2.parquet"
    )
    client = Client(run)
    client.viewer.answers.read_all("ill")
    lines = client.ask("diagnosis", run="ill")
    assert [line["metric"] for line in lines if line["step"] == 2] == ["kl_loss", "actor/entropy"]
    kind = next(kind for kind in client.ask("failures", run="ill")["kinds"] if kind["error"].startswith("ValueError"))
    assert kind["count"] == 2 and kind["step"] == 2 and kind["prompt"].startswith("What is")
    assert client.ask("timeline", run="ill", last=2)["steps"][-1]["stages"][0][0] == "gen"
    spans = [["advance", 1.0, 2.0, "rollout 0"], ["take_bucket", 3.0, 0.5, "rollout 0"], ["own", 1.0, 1.0, "rank 0"]]
    append_line(run / TIMELINE, {"step": STEPS + 1, "stages": [*spans, ["advance", 1.0, 1.0]]})
    shown = client.ask("timeline", run="ill")["steps"][-1]["stages"]
    assert [span[0] for span in shown] == ["gen", "sync", "own", "advance"]  # of workers the stage, not the method
    client.close()


def test_the_memory_plan_names_the_runs_stages_or_says_why_there_is_none(client, tmp_path, tiny_model):
    from posttrain.config.root import PPOConfig
    from posttrain.view.answers import planned_memory

    config = PPOConfig()
    config.actor_rollout_ref.model.path = str(tiny_model)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    found = planned_memory(tmp_path)
    assert found["peak_gb"] == max(stage["gb"] for stage in found["stages"]) > 0
    assert "update_actor" in [name for stage in found["stages"] for name in stage["measured"]]
    status, _, words = client.get("/api/plan?run=synthetic", Authorization=f"Bearer {client.viewer.guard.token}")
    assert status == 404 and b"cannot be planned here" in words


def test_runs_are_known_by_names_that_tell_them_apart_and_compared_by_their_settings(made, tmp_path):
    other = small_run(tmp_path, seed=5, steps=1, responses=8)
    client = Client(made, other)
    names = [run["name"] for run in client.ask("runs")]
    assert len(set(names)) == 2 and all(name.endswith("made/synthetic") for name in names)
    rows = {row["key"]: row["values"] for row in client.ask("compare", runs="\t".join(names))}
    assert rows["trainer.seed"] == ["0", "5"] and "actor_rollout_ref.rollout.n" not in rows
    client.close()
