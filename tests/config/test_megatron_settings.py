"""Sizes by which the Megatron engine cuts a model: their names, and what of them is refused before a run starts."""

from __future__ import annotations

import json

import pytest

from posttrain.config import load_config
from posttrain.config.environment import check_environment
from posttrain.config.trees import PPO, SFT
from posttrain.engine.base import EngineLayout
from posttrain.engine.megatron.groups import ParallelSizes

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
KEY, BY_MEGATRON = f"{ACTOR}.megatron_config", f"{ACTOR}.strategy=megatron"


@pytest.mark.parametrize("name", ["tensor", "pipeline", "expert", "context"])
@pytest.mark.parametrize(
    "place", ["actor.megatron_config", f"{ACTOR}.megatron_config", f"{ACTOR}.megatron", "actor.megatron"]
)
@pytest.mark.parametrize("middle", ["", "model_"])
def test_sizes_of_training_are_written_with_and_without_model(load, name, place, middle):
    middle = "" if name == "context" else middle  # verl has no other name for it
    resolved = load(BY_MEGATRON, "trainer.n_workers=2", f"{place}.{name}_{middle}parallel_size=2")
    assert resolved.value(KEY) == {f"{name}_parallel_size": 2}
    assert resolved.value("actor_rollout_ref.rollout.tensor_model_parallel_size") == 1


OVERRIDES = f"{ACTOR}.megatron.override_transformer_config"


def test_stages_and_moments_are_set_by_the_names_of_verl(load):
    resolved = load(
        BY_MEGATRON,
        "trainer.n_workers=2",
        f"{ACTOR}.megatron.pipeline_model_parallel_size=2",
        f"{OVERRIDES}.num_layers_in_last_pipeline_stage=3",
        f"{ACTOR}.megatron.use_distributed_optimizer=False",
    )
    sizes = ParallelSizes.of(EngineLayout("megatron", own=resolved.value(KEY)))
    assert (sizes.pipeline, sizes.first_layers, sizes.last_layers, sizes.shared_moments) == (2, None, 3, False)
    assert ParallelSizes.of(EngineLayout("megatron")).shared_moments


@pytest.mark.parametrize("place", [f"{ACTOR}.megatron", OVERRIDES])
def test_tokens_and_chunks_are_cut_by_the_names_of_verl(load, place):
    virtual = f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size"
    plus = "+" if place == OVERRIDES else ""
    resolved = load(
        BY_MEGATRON,
        "trainer.n_workers=8",
        f"{ACTOR}.megatron.tensor_model_parallel_size=2",
        f"{ACTOR}.megatron.pipeline_model_parallel_size=2",
        f"{virtual}=3",
        f"{plus}{place}.context_parallel_size=2",
        f"{plus}{place}.sequence_parallel=False",
    )
    sizes = ParallelSizes.of(EngineLayout("megatron", own=resolved.value(KEY)))
    assert (sizes.context, sizes.virtual, sizes.sequence) == (2, 3, False)
    resolved = load(BY_MEGATRON, "trainer.n_workers=2", f"{KEY}.tensor_parallel_size=2", f"{virtual}=null")
    sizes = ParallelSizes.of(EngineLayout("megatron", own=resolved.value(KEY)))
    assert (sizes.context, sizes.virtual, sizes.sequence) == (1, 1, True)
    assert not ParallelSizes.of(EngineLayout("megatron")).sequence  # there is one tensor rank


@pytest.mark.parametrize(("name", "size"), [("context_parallel_size", 2), ("virtual_pipeline_model_parallel_size", 2)])
def test_the_reference_is_cut_as_the_actor_is(load, problems, name, size):
    four = [BY_MEGATRON, "trainer.n_workers=4", f"{KEY}.pipeline_parallel_size=2"]
    text = problems(*four, f"actor_rollout_ref.ref.megatron.{name}={size}")
    assert text.startswith("1 problem") and "cut as the actor is, over 1" in text
    load(*four, f"{ACTOR}.megatron.{name}={size}", f"actor_rollout_ref.ref.megatron.{name}={size}")
    load(*four, f"actor_rollout_ref.ref.megatron.{name}=null")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("moe_aux_loss_coeff=0.01", "a loss of the router"),
        ("fp8=hybrid", "TransformerEngine"),
        ("hidden_dropout=0.1", "without dropout"),
        ("moe_router_bias_update_rate=0.001", "not trained"),
        ("pipeline_model_parallel_layout=Et*3", "num_layers_in_last_pipeline_stage"),
        ("dsa_indexer_loss_coeff=0.1", "is not built"),
        ("swap_optimizer=True", "optimizer_offload=True"),
        ("no_such_key=1", "has no such setting here"),
        ("account_for_loss_in_pipeline_split=True", "num_layers_in_last_pipeline_stage"),
    ],
)
def test_overrides_that_would_change_numbers_are_rejected_one_by_one(problems, given, said):
    text = problems(BY_MEGATRON, f"+{OVERRIDES}.{given}")
    assert text.startswith("1 problem") and said in text, text


@pytest.mark.parametrize(
    "given",
    ["apply_rope_fusion=True", "moe_grouped_gemm=True", "moe_router_dtype=fp32", "moe_aux_loss_coeff=0", "fp8=null",
     "hidden_dropout=0.0", "attention_backend=auto", "recompute_granularity=full", "rope_scaling_type=yarn",
     "context_parallel_algo=ulysses_cp_algo", "moe_router_bias_update_rate=0.0"],
)  # fmt: skip
def test_overrides_that_change_no_number_are_accepted(load, given):
    assert load(BY_MEGATRON, f"+{OVERRIDES}.{given}").value(KEY) == {}


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
        ([f"{KEY}.context_parallel_size=2"], "x context_parallel_size=2 = 2 workers compute the same rows"),
        ([f"{KEY}.virtual_pipeline_parallel_size=2"], "there is one stage"),
        ([f"{KEY}.num_layers_in_first_pipeline_stage=2"], "num_layers_in_first_pipeline_stage=2` sets the layers of a"),
        ([f"{OVERRIDES}.num_layers_in_last_pipeline_stage=2"], "there is one stage"),
        ([f"{KEY}.sequence_parallel=often"], "expected true or false"),
        ([f"{ACTOR}.megatron.expert_tensor_parallel_size=2"], "an expert lies whole on one rank"),
        (["actor_rollout_ref.model.use_remove_padding=False"], "packed rows only"),
        (
            ["trainer.n_workers=2", f"{ACTOR}.ulysses_sequence_parallel_size=2"],
            "it cuts weights by tensor_parallel_size",
        ),
        (["trainer.n_workers=4", f"{ACTOR}.fsdp_config.fsdp_size=2"], "it cuts weights by tensor_parallel_size"),
        ([f"{MODEL}.lora_rank=4", f"{MODEL}.target_modules=[q_proj,lm_head]"], "adapters on the embedding or the head"),
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
        (["model.use_remove_padding=False"], "packed rows only"),
        (["trainer.n_workers=4", "fsdp.fsdp_size=2"], "it cuts weights by tensor_parallel_size"),
    ],
)
def test_supervised_training_rejects_the_same_under_its_own_keys(problems, given, said):
    text = problems("fsdp.strategy=megatron", *given, tree=SFT)
    assert text.startswith("1 problem") and said in text, text
    assert "actor_rollout_ref" not in text


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ("engine.use_distributed_optimizer=False", "use_distributed_optimizer", False),
        ("+engine.override_transformer_config.use_distributed_optimizer=False", "use_distributed_optimizer", False),
        (
            "engine.override_transformer_config.num_layers_in_first_pipeline_stage=2",
            *("num_layers_in_first_pipeline_stage", 2),
        ),
        (
            "engine.override_transformer_config.num_layers_in_last_pipeline_stage=3",
            *("num_layers_in_last_pipeline_stage", 3),
        ),
    ],
)
def test_settings_of_verls_engine_reach_supervised_training(load, given, name, value):
    sizes = ["engine=megatron", "trainer.n_workers=2", "engine.pipeline_model_parallel_size=2"]
    assert load(*sizes, given, tree=SFT).value("fsdp.megatron_config") == {"pipeline_parallel_size": 2, name: value}


@pytest.mark.parametrize(
    "given",
    ["seed=42", "grad_offload=True", "dist_ckpt_optim_fully_reshardable=True", "pad_to_length=2048",
     "entropy_from_logits_chunk_size=2048", "router_replay.mode=disabled", "forward_only=False"],
)  # fmt: skip
def test_details_of_verls_engine_that_change_no_number_are_accepted(load, given):
    assert load("engine=megatron", f"engine.{given}", tree=SFT).value("fsdp.megatron_config") == {}
    for role in ("actor", "ref"):
        assert load(BY_MEGATRON, f"actor_rollout_ref.{role}.megatron.{given}").value(KEY) == {}


def test_given_routes_are_rejected_by_what_computes_the_routers(problems):
    text = problems(BY_MEGATRON, f"{ACTOR}.megatron.router_replay.mode=R2")
    assert text.startswith("1 problem") and "routers of this engine take no given routes" in text
    said = problems("engine=megatron", "engine.no_such_setting=3", tree=SFT)
    assert "`fsdp` and `megatron` have no such setting" in said


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
    monkeypatch.setattr("posttrain.engine.megatron.entry.is_installed", lambda: False)
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


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ({"sliding_window": 64, "use_sliding_window": True}, "sliding windows of 64 tokens"),
        ({"hidden_act": "gelu"}, "gelu"),
    ],
)
def test_parts_that_the_engine_does_not_build_are_refused_from_the_config_with_the_key_to_set(tmp_path, shape, said):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "num_hidden_layers": 2, **shape}))
    for keys, tree in (
        ([BY_MEGATRON, f"{MODEL}.path={tmp_path}"], PPO),
        (["fsdp.strategy=megatron", f"model.path={tmp_path}"], SFT),
    ):
        found = check_environment(load_config(keys, tree=tree), tmp_path)
        (told,) = [problem for problem in found if said in problem.what]
        assert told.do == f"set {'fsdp' if tree is SFT else ACTOR}.strategy=fsdp2"


def test_sizes_that_do_not_fit_the_embedded_model_are_refused_before_it_is_made(tmp_path):
    given = [BY_MEGATRON, "trainer.n_workers=2", f"{KEY}.expert_parallel_size=2", f"{MODEL}.path=embedded"]
    (said,) = [p for p in check_environment(load_config(given), tmp_path) if "expert_parallel" in p.what]
    assert "is dense, it has no experts" in said.what and "set 1" in said.do


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (
            ["context_parallel_size=3"],
            "context_parallel_size=3: ranks that share the tokens of a pass divide its heads",
        ),
        (["tensor_parallel_size=3"], "tensor_parallel_size=3: the model has 4 heads of queries"),
        (["pipeline_parallel_size=3", "virtual_pipeline_parallel_size=2"], "do not fill 3 stages with 2 chunks"),
        (["pipeline_parallel_size=3"], None),
    ],
)
def test_sizes_that_do_not_fit_the_model_are_refused_from_its_config_alone(tmp_path, sizes, said):
    shape = {"model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "hidden_size": 32, "intermediate_size": 66}))
    given = [f"{KEY}.{size}" for size in sizes]
    path = f"actor_rollout_ref.model.path={tmp_path}"
    found = check_environment(load_config([BY_MEGATRON, "trainer.n_workers=3", path, *given]), tmp_path)
    told = [problem.what for problem in found if "parallel_size" in problem.what]
    assert [said in one for one in told] == [True] if said else told == []


def test_an_engine_that_cannot_be_cut_over_workers_is_named_from_the_models_config_alone(tmp_path):
    """The printed command of a large mixture names no rollout engine, and the default one cannot split it."""
    for kind in ("deepseek_v3", "qwen3"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps({"model_type": kind}))
    size = "actor_rollout_ref.rollout.tensor_model_parallel_size"

    def told(kind: str, *given: str) -> list[str]:
        resolved = load_config([f"actor_rollout_ref.model.path={kind}", "trainer.n_workers=2", *given])
        return [f"{p.what} {p.do}" for p in check_environment(resolved, tmp_path) if "cannot be cut over" in p.what]

    (said,) = told("deepseek_v3", f"{size}=2")
    assert said.startswith(f"{size}=2: models of the kind deepseek_v3") and "rollout.name=vllm, which cuts them" in said
    assert told("deepseek_v3", f"{size}=2", "actor_rollout_ref.rollout.name=vllm") == []
    assert told("deepseek_v3") == told("qwen3", f"{size}=2") == []


def test_of_a_model_on_the_hub_the_config_alone_is_fetched(tmp_path, monkeypatch):
    asked = []

    def fetch(name: str, file: str) -> str:
        asked.append((name, file))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
        return str(tmp_path / "config.json")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    monkeypatch.setattr("posttrain.models.model_files.why_not_from_hub", lambda name: None)
    resolved = load_config([BY_MEGATRON, "actor_rollout_ref.model.path=openai/gpt-oss-20b"])
    found = [problem.what for problem in check_environment(resolved, tmp_path) if "gpt_oss" in problem.what]
    assert len(found) == 1 and asked == [("openai/gpt-oss-20b", "config.json")]
