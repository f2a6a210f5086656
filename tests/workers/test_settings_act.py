"""Settings of the actor, its rollout, reference and critic: each is seen to act, on workers made from the settings."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from textbook import ACTOR, MODEL, ROLLOUT, actor, batch, critic

from posttrain.config.rollout import RolloutConfig
from posttrain.controller.pool import LocalWorkerGroup
from posttrain.protocol import DataProto
from posttrain.rollout.base import Request, Sampling
from posttrain.rollout.engines import build_engine
from posttrain.rollout.generate import generate
from posttrain.rollout.native.build import cache_limit, step_limit
from posttrain.workers import roles

KEYS = {
    "actor": {"micro": f"{ACTOR}.ppo_micro_batch_size_per_gpu", "budget": f"{ACTOR}.ppo_max_token_len_per_gpu"},
    "critic": {"micro": "critic.ppo_micro_batch_size_per_gpu", "budget": "critic.ppo_max_token_len_per_gpu"},
}
PADDING = {"actor": f"{MODEL}.use_remove_padding", "critic": "critic.model.use_remove_padding"}
RECOMPUTE = {"actor": f"{MODEL}.enable_gradient_checkpointing", "critic": "critic.model.enable_gradient_checkpointing"}


@pytest.fixture
def passes(monkeypatch):
    """The shape of the token ids of every forward pass of a train engine."""
    from posttrain.models import forward

    seen: list[tuple[int, ...]] = []
    plain = forward.hidden_states
    monkeypatch.setattr(
        forward, "hidden_states", lambda m, ids, *rest: seen.append(tuple(ids.shape)) or plain(m, ids, *rest)
    )
    return seen


def worker(role: str, model, settings: dict[str, Any]) -> LocalWorkerGroup:
    return {"actor": actor, "critic": critic}[role](model, settings, **({"reference": True} if role == "actor" else {}))


def calls(role: str, group: LocalWorkerGroup) -> list[Any]:
    """Every call of the role that goes through its train engine."""
    if role == "critic":
        return [group.compute_values, group.update_critic]
    return [group.compute_log_prob, group.compute_ref_log_prob, group.update_actor]


@pytest.mark.parametrize("role", KEYS)
def test_at_most_so_many_rows_per_pass_and_padding_only_where_asked(tiny_model, passes, role):
    settings = {KEYS[role]["micro"]: 3, PADDING[role]: False, f"{ACTOR}.ppo_mini_batch_size": 8}
    group, data = worker(role, tiny_model, settings), batch()
    real = int(data.batch["attention_mask"].sum())
    for call in calls(role, group):
        passes.clear()
        call(data)
        assert sorted(rows for rows, _ in passes) == [1, 3, 3, 3, 3, 3], call  # 16 rows, each with its padding
        assert sum(rows * width for rows, width in passes) > real, call


@pytest.mark.parametrize("role", KEYS)
def test_at_most_so_many_tokens_per_packed_pass(tiny_model, passes, role):
    group, data = worker(role, tiny_model, {KEYS[role]["budget"]: 60, f"{ACTOR}.ppo_mini_batch_size": 8}), batch()
    real, rows = int(data.batch["attention_mask"].sum()), len(data)
    for call in calls(role, group):
        passes.clear()
        call(data)
        assert all(many == 1 and tokens <= 60 for many, tokens in passes) and len(passes) > 2, call
        assert sum(tokens for _, tokens in passes) <= real - rows, call  # no padding, and no last tokens


@pytest.mark.parametrize("role", KEYS)
def test_gradient_checkpointing_computes_layers_again_and_changes_no_number(tiny_model, role):
    found = {}
    for on in (False, True):
        group = worker(role, tiny_model, {RECOMPUTE[role]: on, f"{ACTOR}.ppo_mini_batch_size": 8})
        engine, seen = group.worker.engine, []
        block = next(part for name, part in engine.module.named_modules() if name.endswith("layers.0.self_attn"))
        block.register_forward_pre_hook(lambda *_, seen=seen: seen.append(1))
        metrics = calls(role, group)[-1](batch())
        found[on] = (len(seen), metrics[f"{role}/grad_norm"])
    assert found[False][0] == 1 and found[True][0] == 2
    assert found[True][1] == pytest.approx(found[False][1], rel=1e-12)


def test_the_critic_recomputes_where_the_actor_does_unless_told_otherwise(tiny_model):
    key = RECOMPUTE["actor"]
    layers = {}
    for settings in ({key: True}, {key: True, RECOMPUTE["critic"]: False}):
        group, seen = critic(tiny_model, {**settings, f"{ACTOR}.ppo_mini_batch_size": 8}), []
        block = group.worker.engine.module.base_model.layers[0].self_attn
        block.register_forward_pre_hook(lambda *_, seen=seen: seen.append(1))
        group.update_critic(batch())
        layers[len(settings)] = len(seen)
    assert layers == {1: 2, 2: 1}


def test_the_actors_rows_are_shuffled_anew_in_every_pass_if_asked(tiny_model, monkeypatch):
    def order(**settings: Any) -> list[list[int]]:
        group, data = actor(tiny_model, {f"{ACTOR}.{key}": value for key, value in settings.items()}), batch()
        data.non_tensor_batch["row"] = np.arange(len(data)).astype(object)
        seen: list[list[int]] = []
        engine = group.worker.engine
        plain = engine.update
        monkeypatch.setattr(
            engine,
            "update",
            lambda mini, *a, **k: seen.append(list(mini.non_tensor_batch["row"])) or plain(mini, *a, **k),
        )
        group.update_actor(data)
        return seen

    plain = [list(range(8)), list(range(8, 16))]
    assert order(ppo_epochs=2) == plain * 2
    mixed = order(ppo_epochs=2, shuffle=True)
    assert mixed == order(ppo_epochs=2, shuffle=True) and mixed[:2] != mixed[2:] != plain != mixed[:2]
    assert sorted(mixed[0] + mixed[1]) == sorted(mixed[2] + mixed[3]) == list(range(16))


# -- rollout ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lively(tmp_path_factory: pytest.TempPathFactory) -> LocalWorkerGroup:
    """A worker whose untrained model writes something else for every prompt; its settings are read at every call."""
    from posttrain.models.embedded import write_model

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = write_model(tmp_path_factory.mktemp("models") / "lively", **shape, initializer_range=0.5, seed=3)
    settings = {f"{ROLLOUT}.temperature": 1.0, f"{MODEL}.dtype": "float32", "data.max_response_length": 6}
    return actor(folder, settings)


@pytest.fixture
def write(lively, monkeypatch):
    """`write(top_k=1, val_kwargs__n=2, validate=True)`: responses (lists of ids) to 12 prompts with these settings."""
    rollout = lively.worker.config.actor_rollout_ref.rollout

    def responses(*, validate: bool = False, greedy: bool = False, **settings: Any) -> list[list[int]]:
        ids, seeds = np.empty(12, dtype=object), np.arange(12).astype(object)
        ids[:] = [[256, 40 + row, 50 + 2 * row, 61] for row in range(12)]
        prompts = DataProto.from_dict(
            non_tensors={"raw_prompt_ids": ids, "seed": seeds}, meta_info={"validate": validate, "greedy": greedy}
        )
        with monkeypatch.context() as patch:
            for key, value in settings.items():
                section, name = (rollout.val_kwargs, key[5:]) if key.startswith("val__") else (rollout, key)
                patch.setattr(section, name, value)
            made = lively.generate_sequences(prompts).batch
        return [row[mask.bool()].tolist() for row, mask in zip(made["responses"], made["response_mask"], strict=True)]

    return responses


def test_each_sampling_setting_of_a_run_acts_on_its_responses(lively, write):
    likeliest, sampled = write(greedy=True), write()
    assert likeliest != sampled
    for one in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}, {"temperature": 0}):
        assert write(**one) == likeliest, one
    assert write(repetition_penalty=5.0, top_k=1) != likeliest
    texts = [[lively.worker.tokenizer.decode([token]) for token in ids] for ids in likeliest]
    row, at = next((row, at) for row, own in enumerate(texts) for at in range(1, 5) if own[at].isascii())
    assert write(top_k=1, stop=[texts[row][at]])[row] == likeliest[row][: texts[row].index(texts[row][at]) + 1]


def test_responses_end_at_the_end_token_unless_told_to_go_on_and_at_the_limit(lively, write, monkeypatch):
    assert max(map(len, write())) == 6
    monkeypatch.setattr(lively.worker.rollout, "end_ids", tuple(range(130)))
    assert min(map(len, write())) < 6 and set(map(len, write(ignore_eos=True))) == {6}
    monkeypatch.setattr(lively.worker.config.data, "max_response_length", 3)
    assert max(map(len, write(ignore_eos=True))) == 3


def test_validation_samples_by_its_own_settings(write):
    likeliest, sampled = write(greedy=True), write()
    assert write(validate=True) == likeliest
    assert write(validate=True, val__do_sample=True) == sampled
    for one in ({"val__top_k": 1}, {"val__top_p": 1e-6}, {"val__temperature": 1e-4}):
        assert write(validate=True, val__do_sample=True, **one) == likeliest, one
    assert write(validate=True, val__do_sample=True, top_k=1, top_p=1e-6, min_p=1.0, temperature=1e-4) == sampled


@pytest.mark.parametrize("name", ["native", "hf"])
def test_no_more_responses_are_decoded_and_no_more_tokens_computed_at_a_time_than_set(lively, name):
    worker = lively.worker
    config = RolloutConfig(name=name, max_num_seqs=2, max_num_batched_tokens=64, kv_cache_gb=0.01)
    engine, _ = build_engine(config, copy.deepcopy(worker.engine.module), worker.tokenizer)
    tried = engine.prompt_tokens if name == "native" else 0  # when it was made
    for row in range(5):
        engine.submit(Request(row, [40 + row] * 100, Sampling(max_tokens=30, greedy=True), seed=row))
    engine.step()
    if name == "native":
        assert 0 < engine.prompt_tokens - tried <= 64 and engine.pool.limit == 0.01 * 2**30 // (2 * 2 * 2 * 8 * 4 * 32)
    decoded = 0
    while engine.has_work():
        running = len(engine.slots.active) if name == "native" else len(engine.rows)
        decoded = max(decoded, running)
        if name == "native":
            prompts, responses = engine.prompt_tokens, engine.response_tokens
        engine.step()
        # Rows that decode take part in the budget of a step that computes prompts.
        if name == "native" and engine.prompt_tokens > prompts:
            assert engine.prompt_tokens - prompts + engine.response_tokens - responses <= 64
    assert decoded == 2


def test_a_gpu_computes_more_tokens_in_a_step_where_nothing_is_set():
    assert (step_limit(RolloutConfig(), "cuda"), step_limit(RolloutConfig(), "cpu")) == (16384, 8192)
    assert {step_limit(RolloutConfig(max_num_batched_tokens=100), kind) for kind in ("cuda", "cpu")} == {100}


def test_the_cache_may_take_the_share_of_the_device_that_is_set():
    assert cache_limit(RolloutConfig(gpu_memory_utilization=0.5), "cuda", 1000) == 500
    assert cache_limit(RolloutConfig(), "cuda", 1000) == cache_limit(RolloutConfig(), "cpu", 1000) == 300
    assert cache_limit(RolloutConfig(gpu_memory_utilization=0.5), "cpu", 1000) == 300
    assert cache_limit(RolloutConfig(gpu_memory_utilization=0.5, kv_cache_gb=2.0), "cuda", 1000) == 2 * 2**30


def test_4_bits_are_asked_for_where_adapters_are_trained_beside_them(tiny_model, monkeypatch):
    """Without the library that holds them: what the loading of actor and critic is told."""
    told: list[Any] = []

    def load(*_: Any, **named: Any) -> Any:
        told.append(named["quantization"])
        raise InterruptedError

    monkeypatch.setattr(roles, "load_causal_lm", load)
    for make, rank in (
        (actor, f"{MODEL}.lora_rank"),
        (critic, "critic.model.lora_rank"),
        (critic, f"{MODEL}.lora_rank"),
    ):
        with pytest.raises(InterruptedError):
            make(tiny_model, {f"{MODEL}.quantization": "nf4", rank: 2})
    assert told == ["nf4", "nf4", None]


def test_the_critics_adapters_have_rank_scale_and_place_of_their_own(tiny_model):
    shape = {
        "lora_rank": 3,
        "lora_alpha": 12,
        "target_modules": ["q_proj", "up_proj"],
        "exclude_modules": ".*layers.1.*",
    }
    module = critic(tiny_model, {f"critic.model.{name}": value for name, value in shape.items()}).worker.engine.module
    adapters = {name: weight for name, weight in module.named_parameters() if ".lora_A." in name}
    places = [name.split("layers.")[1].split(".lora_A")[0] for name in adapters]
    assert sorted(places) == ["0.mlp.up_proj", "0.self_attn.q_proj"]
    assert {weight.shape[0] for weight in adapters.values()} == {3}
    assert module.base_model.layers[0].mlp.up_proj.scaling["default"] == 4.0


def test_weights_and_moments_come_for_their_stage_leave_again_and_no_number_changes(tiny_model):
    """Here host and device are one: what is seen is that each is brought and taken away at its time."""
    away = {
        f"{ACTOR}.fsdp_config.param_offload": True,
        f"{ACTOR}.fsdp_config.optimizer_offload": True,
        "actor_rollout_ref.ref.fsdp_config.param_offload": True,
    }
    groups = {kind: actor(tiny_model, away if kind else {}, reference=True) for kind in (False, True)}
    moves: dict[bool, list[str]] = {False: [], True: []}
    for kind, group in groups.items():
        worker, seen = group.worker, moves[kind]
        for name, engine in (("weights", worker.engine), ("reference", worker.reference.engine)):
            _watch(engine.module, "to", name, seen)
        _watch(worker.engine.optimizer, "move", "moments", seen)
        for call in ("compute_log_prob", "compute_ref_log_prob", "update_actor"):
            seen.append(call)
            getattr(group, call)(batch())
    log_prob = ["compute_log_prob", "weights", "weights", "moments"]  # brought, and both taken away
    reference = ["compute_ref_log_prob", "reference", "reference"]
    assert moves[True] == [*log_prob, *reference, "update_actor", "weights", "moments", "weights", "moments"]
    assert moves[False] == ["compute_log_prob", "compute_ref_log_prob", "update_actor"]
    plain, moved = (list(group.worker.engine.module.parameters()) for group in groups.values())
    assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))


@pytest.mark.parametrize("moved", ["actor", "ref"])
def test_offloading_the_reference_and_the_actor_are_separate_settings(tiny_model, moved):
    """The documents keep the actor's weights on their device and move the reference's."""
    keys = {"actor": f"{ACTOR}.fsdp_config.param_offload", "ref": "actor_rollout_ref.ref.fsdp_config.param_offload"}
    group = actor(tiny_model, {key: role == moved for role, key in keys.items()}, reference=True)
    seen: list[str] = []
    _watch(group.worker.engine.module, "to", "actor", seen)
    _watch(group.worker.reference.engine.module, "to", "ref", seen)
    for call in ("compute_log_prob", "compute_ref_log_prob", "update_actor"):
        getattr(group, call)(batch())
    assert set(seen) == {moved}


def test_an_engine_that_reads_the_actors_weights_holds_nothing_where_they_were(tiny_model, monkeypatch):
    """Here a move is a copy: what lay at the old place must be free once the weights have left it."""
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, device: self._apply(torch.clone))
    group = actor(tiny_model, {f"{ACTOR}.fsdp_config.param_offload": True})
    worker, plain = group.worker, actor(tiny_model, {}).worker
    prompts = [[5, 6, 7], [9]]
    assert worker.rollout.engine.decoder.is_released, "of the weights that the engine was tried with"
    found = []
    for one in (worker, plain):
        one.rollout.wake()
        found.append([x.token_ids for x in generate(one.rollout.engine, prompts, [Sampling(max_tokens=4)] * 2, [0, 1])])
        held = [
            weakref.ref(x)
            for x in (one.rollout.engine.decoder.embedding, one.rollout.engine.decoder.layers[0].qkv.weight)
        ]
        one.rollout.sleep()
        assert all((x() is None) == (one is worker) for x in held)
        one.sync_weights(1)
        assert one.rollout.engine.decoder.is_released == (one is worker)
    assert found[0] == found[1]


def _watch(thing: Any, method: str, name: str, seen: list[str]) -> None:
    plain = getattr(thing, method)
    setattr(thing, method, lambda device: seen.append(name) or plain(device))
