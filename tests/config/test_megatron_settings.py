"""Sizes by which the Megatron engine cuts a model: their names, and what of them is refused before a run starts."""

from __future__ import annotations

import json

import pytest

from posttrain.config import load_config
from posttrain.config.environment import check_environment
from posttrain.config.supervised_tree import SFT

ACTOR = "actor_rollout_ref.actor"
KEY, BY_MEGATRON = f"{ACTOR}.megatron_config", f"{ACTOR}.strategy=megatron"


@pytest.mark.parametrize("name", ["tensor", "pipeline", "expert"])
@pytest.mark.parametrize(
    "place", ["actor.megatron_config", f"{ACTOR}.megatron_config", f"{ACTOR}.megatron", "actor.megatron"]
)
@pytest.mark.parametrize("middle", ["", "model_"])
def test_sizes_of_training_are_written_with_and_without_model(load, name, place, middle):
    resolved = load(BY_MEGATRON, "trainer.n_workers=2", f"{place}.{name}_{middle}parallel_size=2")
    assert resolved.value(KEY) == {f"{name}_parallel_size": 2}
    assert resolved.value("actor_rollout_ref.rollout.tensor_model_parallel_size") == 1


def test_the_sizes_of_the_large_run_are_taken(load):
    sizes = {"tensor_parallel_size": 8, "pipeline_parallel_size": 4, "expert_parallel_size": 8}
    given = [f"{KEY}.{name}={size}" for name, size in sizes.items()]
    resolved = load(BY_MEGATRON, "trainer.n_gpus_per_node=8", "trainer.nnodes=4", *given)
    assert resolved.value(KEY) == sizes


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["trainer.n_workers=2", f"{KEY}.tensor_parallel_size=4"],
            "tensor_parallel_size=4 x pipeline_parallel_size=1 = 4",
        ),
        ([f"{KEY}.pipeline_parallel_size=2"], "does not divide the 1 worker(s)"),
        (
            ["trainer.n_workers=4", f"{KEY}.pipeline_parallel_size=2", f"{KEY}.expert_parallel_size=4"],
            "does not divide the 2 worker(s) of a stage (4 workers / pipeline_parallel_size=2)",
        ),
        ([f"{KEY}.tensor_parallel_size=0"], "must be 1 or more"),
        ([f"{KEY}.tensor_parallel_size=two"], "expected an integer"),
        ([f"{KEY}.tensor_size=2"], "`actor_rollout_ref.actor.megatron_config.tensor_size` is not known"),
        ([f"{ACTOR}.megatron.context_parallel_size=2"], "cut by tensor, pipeline and expert ranks alone"),
        ([f"{ACTOR}.megatron.sequence_parallel=True"], "has no such setting here"),
        ([f"{ACTOR}.megatron.use_remove_padding=False"], "rows are always packed"),
        (["actor_rollout_ref.model.lora_rank=8"], "adapters are not built for it"),
        (["actor_rollout_ref.model.use_remove_padding=False"], "packed rows only"),
        (
            ["trainer.n_workers=2", f"{ACTOR}.ulysses_sequence_parallel_size=2"],
            "it cuts weights by tensor_parallel_size",
        ),
        (["trainer.n_workers=4", f"{ACTOR}.fsdp_config.fsdp_size=2"], "it cuts weights by tensor_parallel_size"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(problems, given, said):
    text = problems(BY_MEGATRON, *given)
    assert text.startswith("1 problem") and said in text, text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["fsdp.megatron_config.tensor_parallel_size=2"], "fsdp.megatron_config: tensor_parallel_size=2 x"),
        (["fsdp.megatron_config.tensor_size=2"], "`fsdp.megatron_config.tensor_size` is not known"),
        (["model.lora_rank=8"], "`model.lora_rank` cannot be used with fsdp.strategy=megatron: adapters"),
        (["model.use_remove_padding=False"], "packed rows only"),
        (["trainer.n_workers=4", "fsdp.fsdp_size=2"], "it cuts weights by tensor_parallel_size"),
    ],
)
def test_supervised_training_rejects_the_same_under_its_own_keys(problems, given, said):
    text = problems("fsdp.strategy=megatron", *given, tree=SFT)
    assert text.startswith("1 problem") and said in text, text
    assert "actor_rollout_ref" not in text


def test_sizes_without_the_engine_that_reads_them_are_rejected_in_supervised_training(problems):
    text = problems("trainer.n_workers=2", "fsdp.megatron_config.tensor_parallel_size=2", tree=SFT)
    assert "set fsdp.strategy=megatron, or remove them" in text


def test_an_engine_that_nothing_registers_is_unknown(problems):
    assert "`fsdp.strategy=zero3` is not known; known: fsdp, fsdp2, megatron." in problems(
        "fsdp.strategy=zero3", tree=SFT
    )
    assert f"`{ACTOR}.strategy=zero3` is not known; known: fsdp, fsdp2, megatron." in problems(
        f"{ACTOR}.strategy=zero3"
    )
    resolved = load_config(["fsdp.strategy=zero3", "model.external_lib=mine"], tree=SFT)  # it may register zero3
    assert resolved.value("fsdp.strategy") == "zero3"


def test_without_the_package_the_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr("posttrain.engine.megatron.settings.is_installed", lambda: False)
    said = [
        problem for problem in check_environment(load_config([BY_MEGATRON]), tmp_path) if "megatron" in problem.what
    ]
    assert len(said) == 1 and "not installed" in said[0].what and "posttrain[megatron]" in said[0].do
    others = check_environment(load_config(["trainer.seed=1"]), tmp_path)
    assert not any("megatron" in problem.what for problem in others)


def test_a_model_that_the_engine_does_not_train_is_refused_from_its_config_alone(tmp_path):
    """There is not one weight in the folders: nothing was loaded to know it."""
    for kind in ("gpt_oss", "deepseek_v3"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps({"model_type": kind}))

    def told(*given: str) -> list[str]:
        found = check_environment(load_config([*given]), tmp_path)
        return [problem.what for problem in found if "cannot be trained with" in problem.what]

    for key in ("actor_rollout_ref.model.path", "critic.model.path"):
        (said,) = told(BY_MEGATRON, f"{key}=gpt_oss")
        assert said.startswith(f"`{key}=gpt_oss`: models of type gpt_oss") and "qwen3_moe" in said
        assert told(BY_MEGATRON, f"{key}=deepseek_v3") == told(f"{key}=gpt_oss") == []
    assert told(BY_MEGATRON, "actor_rollout_ref.model.path=embedded") == []


def test_of_a_model_on_the_hub_the_config_alone_is_fetched(tmp_path, monkeypatch):
    asked = []

    def fetch(name: str, file: str) -> str:
        asked.append((name, file))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
        return str(tmp_path / "config.json")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    for module in ("folders", "model_files"):
        monkeypatch.setattr(f"posttrain.models.{module}.why_not_from_hub", lambda name: None)
    resolved = load_config([BY_MEGATRON, "actor_rollout_ref.model.path=openai/gpt-oss-20b"])
    found = [problem.what for problem in check_environment(resolved, tmp_path) if "gpt_oss" in problem.what]
    assert len(found) == 1 and asked == [("openai/gpt-oss-20b", "config.json")]
