"""A rollout engine of the user's own: a file of the working folder registers it, and a run decodes with it."""

from __future__ import annotations

import pytest
from runs import metrics_of, run

from posttrain.errors import UserError
from posttrain.rollout.engines import ENGINES

MY_ENGINE = """
from posttrain.rollout.engines import make_hf, register_engine


@register_engine("mine")
def make(order):
    engine, _ = make_hf(order)
    return engine, "mine 1.0"
"""
NAME = {"actor_rollout_ref__rollout__name": "mine", "trainer__total_training_steps": 1}


def test_a_run_decodes_with_the_engine_that_a_file_of_the_working_folder_registers(
    tiny_model, sums, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_engine.py").write_text(MY_ENGINE)
    ran = run(tiny_model, sums, tmp_path / "out", **NAME)
    said = capsys.readouterr().out
    assert ran.status == "finished" and "my_engine.py registers the rollout engine `mine`" in said
    assert "Rollout engine: mine 1.0" in said and list(ENGINES) == ["native", "hf", "vllm", "sglang", "server", "mine"]


def test_a_module_that_does_not_register_the_engine_ends_the_run_before_a_model_is_loaded(tiny_model, sums, tmp_path):
    empty = tmp_path / "empty.py"
    empty.write_text("")
    said = r"rollout\.name=mine: there is no such rollout engine; known: native, hf, vllm, sglang, server\."
    with pytest.raises(UserError, match=said):
        run(tiny_model, sums, tmp_path / "out", actor_rollout_ref__model__external_lib=str(empty), **NAME)


@pytest.mark.parametrize(("returned", "kind"), [("engine", "HFEngine"), ("None", "NoneType"), ("(engine,)", "tuple")])
def test_a_maker_that_returns_neither_an_engine_with_its_name_nor_a_reason_is_named(
    tiny_model, sums, tmp_path, monkeypatch, returned, kind
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_engine.py").write_text(MY_ENGINE.replace('engine, "mine 1.0"', returned))
    with pytest.raises(UserError, match=f"The maker of the rollout engine mine returned {kind}"):
        run(tiny_model, sums, tmp_path / "out", **NAME)


WRAPPED = """
from posttrain.rollout.base import WrappedEngine
from posttrain.rollout.engines import make_native, register_engine


class Counted(WrappedEngine):
    requests = 0

    def submit(self, request):
        self.requests += 1
        self.inner.submit(request)


@register_engine("counted")
def make(order):
    made = make_native(order)
    return made if isinstance(made, str) else (Counted(made[0]), f"counted {made[1]}")
"""


def test_a_wrapped_engine_gives_the_responses_of_the_inner_one(tiny_model, sums, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_engine.py").write_text(WRAPPED)
    more = {"trainer__total_training_steps": 2}
    plain = run(tiny_model, sums, tmp_path / "plain", **more)
    wrapped = run(tiny_model, sums, tmp_path / "wrapped", actor_rollout_ref__rollout__name="counted", **more)
    assert metrics_of(wrapped.path) == metrics_of(plain.path)
