"""The reward model's worker: what it reads, what it gives, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reward_models import LOUD, other_tokenizer, write_reward_model

from posttrain.config.root import PPOConfig
from posttrain.controller.pool import LocalWorkerGroup
from posttrain.errors import UserError
from posttrain.models.embedded import byte_tokenizer
from posttrain.models.scorer import score_rows
from posttrain.protocol import DataProto
from posttrain.rollout.base import Output
from posttrain.rollout.generate import to_batch
from posttrain.workers.fsdp_workers import RewardModelWorker

CPU = torch.device("cpu")
CHATS = [
    ([{"role": "user", "content": "2 + 2 = ?"}], "4"),
    ([{"role": "user", "content": "Say something longer, please."}], "Gladly: a few words more, and then some."),
    ([{"role": "user", "content": "?"}], ""),
    ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1"}], "2"),
]


def batch(tokenizer: Any) -> DataProto:
    """The conversations as the policy's rollout leaves them; the third response is its end token alone."""
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat, _ in CHATS]
    responses = [[*tokenizer.encode(text), tokenizer.eos_token_id] for _, text in CHATS]
    data = to_batch(prompts, [Output(i, ids, [0.0] * len(ids), "stop") for i, ids in enumerate(responses)], 256)
    raw = np.empty(len(CHATS), dtype=object)
    raw[:] = [chat for chat, _ in CHATS]
    return data.union(DataProto.from_dict(non_tensors={"raw_prompt": raw}))


def worker(path: Path, **settings: Any) -> LocalWorkerGroup:
    config = PPOConfig()
    config.reward_model.model.path = str(path)
    for key, value in settings.items():
        section: Any = config.reward_model
        *outer, name = key.split("__")
        for part in outer:
            section = getattr(section, part)
        setattr(section, name, value)
    group = LocalWorkerGroup(RewardModelWorker(config, byte_tokenizer(), CPU))
    group.init_model()
    return group


def scores(group: LocalWorkerGroup, data: DataProto | None = None) -> torch.Tensor:
    return group.compute_rm_score(data or batch(byte_tokenizer())).batch["rm_scores"].sum(-1)


def plain(folder: Path, rows: list[list[int]]) -> torch.Tensor:
    """transformers' own padded forward pass."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    pad, width = model.config.pad_token_id, max(map(len, rows))
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).logits.squeeze(-1)


def test_with_the_policys_tokenizer_its_ids_are_scored_as_they_are(rm_same):
    data = batch(byte_tokenizer())
    rows = [
        ids[mask.bool()].tolist()
        for ids, mask in zip(data.batch["input_ids"], data.batch["attention_mask"], strict=True)
    ]
    group = worker(rm_same)
    assert not group.worker.conversations.renders and "token ids" in group.notes()[0]
    torch.testing.assert_close(scores(group), plain(rm_same, rows), rtol=0, atol=1e-5)
    assert scores(group).std() > 0.1


def test_another_tokenizer_reads_the_conversation_in_its_own_template(rm_other):
    texts = [
        "".join(f"[{m['role'].upper()}] {m['content']}\n" for m in [*chat, {"role": "assistant", "content": answer}])
        for chat, answer in CHATS
    ]
    rows = [other_tokenizer()(text, add_special_tokens=False)["input_ids"] for text in texts]
    group = worker(rm_other)
    assert group.worker.conversations.renders and "own chat template" in group.notes()[0]
    torch.testing.assert_close(scores(group), plain(rm_other, rows), rtol=0, atol=1e-5)


def test_no_more_rows_per_pass_than_set_and_the_same_scores(rm_same, monkeypatch):
    from posttrain.models import scorer

    settings = (
        {},
        {"micro_batch_size_per_gpu": 1},
        {"forward_max_token_len_per_gpu": 60},
        {"micro_batch_size_per_gpu": 2},
    )
    groups = [worker(rm_same, **chosen) for chosen in settings]  # the proof of each makes passes of its own
    passes: list[int] = []
    whole = scorer.packed_scores
    monkeypatch.setattr(scorer, "packed_scores", lambda model, rows: passes.append(len(rows)) or whole(model, rows))
    together, one, few, two = map(scores, groups)
    assert passes[0] == 4 and passes[1:5] == [1] * 4 and passes[-2:] == [2, 2] and 1 < len(passes[5:-2]) < 4
    for other in (one, few, two):
        torch.testing.assert_close(other, together, rtol=0, atol=1e-5)


def test_the_score_lies_on_the_last_token_of_each_response(rm_same):
    data = batch(byte_tokenizer())
    out = worker(rm_same).compute_rm_score(data)
    last = data.batch["response_mask"].sum(-1) - 1
    assert out.batch["rm_scores"].ne(0).nonzero()[:, 1].tolist() == last.tolist()
    assert list(out.non_tensor_batch["rm_error"]) == [None] * 4 and not any(out.non_tensor_batch["rm_truncated"])


def test_a_named_input_tokenizer_renders_anew_and_decodes_with_it(rm_same, tmp_path):
    byte_tokenizer().save_pretrained(tmp_path / "same")
    other_tokenizer().save_pretrained(tmp_path / "other")
    rendered = worker(rm_same, model__input_tokenizer=str(tmp_path / "same"))
    wrong = worker(rm_same, model__input_tokenizer=str(tmp_path / "other"))
    assert rendered.worker.conversations.renders
    # The byte tokenizer's template ends a turn as the policy does, so nothing changes where there is text.
    torch.testing.assert_close(scores(rendered)[[0, 1, 3]], scores(worker(rm_same))[[0, 1, 3]], rtol=0, atol=1e-5)
    assert (scores(wrong) - scores(rendered))[[0, 1, 3]].abs().min() > 1e-3


def test_long_conversations_are_cut_where_told_and_counted(rm_same):
    data = batch(byte_tokenizer())
    rows = [
        ids[mask.bool()].tolist()
        for ids, mask in zip(data.batch["input_ids"], data.batch["attention_mask"], strict=True)
    ]
    for side, cut in (("left", [row[-12:] for row in rows]), ("right", [row[:12] for row in rows])):
        out = worker(rm_same, max_length=12, truncation=side).compute_rm_score(data)
        assert list(out.non_tensor_batch["rm_truncated"]) == [len(row) > 12 for row in rows] != [False] * 4
        torch.testing.assert_close(out.batch["rm_scores"].sum(-1), plain(rm_same, cut), rtol=0, atol=1e-5)
    with pytest.raises(UserError, match=r"takes 12 \(reward_model.max_length"):
        worker(rm_same, max_length=12, truncation="error").compute_rm_score(data)


def test_the_models_own_length_is_the_limit_when_none_is_set(tmp_path):
    short = write_reward_model(tmp_path / "short", max_position_embeddings=20)
    for limit in (None, 400):
        group = worker(short, max_length=limit)
        assert group.worker.longest == 20 and any(
            group.compute_rm_score(batch(byte_tokenizer())).non_tensor_batch["rm_truncated"]
        )


def test_a_score_that_is_no_number_is_a_recorded_failure(rm_same):
    group = worker(rm_same)
    with torch.no_grad():
        group.worker.module.score.weight.fill_(float("nan"))
    out = group.compute_rm_score(batch(byte_tokenizer()))
    assert list(out.non_tensor_batch["rm_error"]) == ["the reward model gave nan"] * 4
    assert not out.batch["rm_scores"].any()


def test_a_conversation_that_the_template_refuses_costs_its_own_row_only(tmp_path):
    tokenizer = other_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + LOUD
    )
    group = worker(write_reward_model(tmp_path / "strict", tokenizer=tokenizer))
    errors = list(group.compute_rm_score(batch(byte_tokenizer())).non_tensor_batch["rm_error"])
    assert errors[:3] == [None] * 3 and "no system" in errors[3]
    group.check_prompt(CHATS[0][0])
    with pytest.raises(UserError, match=r"no system\n.*roles system, user"):
        group.check_prompt(CHATS[3][0])


def test_without_a_template_the_setting_is_named(tmp_path):
    tokenizer = other_tokenizer()
    tokenizer.chat_template = None
    folder = write_reward_model(tmp_path / "bare", tokenizer=tokenizer)
    with pytest.raises(UserError, match=r"no chat template.*reward_model.model.tokenizer_path"):
        worker(folder)
    other_tokenizer().save_pretrained(tmp_path / "with")
    assert worker(folder, model__tokenizer_path=str(tmp_path / "with")).worker.conversations.renders


def test_wrong_folders_are_refused_with_their_setting(tiny_model, tmp_path):
    three = write_reward_model(tmp_path / "three", labels=3)
    with pytest.raises(UserError, match=r"reward_model.model.path=.*3 labels"):
        worker(three)
    with pytest.raises(UserError, match=r"reward_model.model.path=.*not a reward model.*value head"):
        worker(tiny_model)


def test_a_tokenizer_that_does_not_belong_to_the_model_is_a_failure_of_every_row(tmp_path):
    folder = write_reward_model(tmp_path / "small", vocab_size=90, pad_token_id=0)
    errors = worker(folder).compute_rm_score(batch(byte_tokenizer())).non_tensor_batch["rm_error"]
    assert all("not among the 90" in error for error in errors)


@pytest.mark.parametrize("name", ["v_head.summary", "value_head", "v_head", "score"])
@pytest.mark.parametrize("own_file", [False, True])
def test_a_value_head_beside_a_causal_lm_scores_the_last_hidden_state(tiny_model, tmp_path, name, own_file):
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "valued"
    shutil.copytree(tiny_model, folder)
    generator = torch.Generator().manual_seed(1)
    head = {f"{name}.weight": torch.randn(1, 32, generator=generator), f"{name}.bias": torch.tensor([0.25])}
    if own_file:
        save_file(head, folder / "value_head.safetensors", metadata={"format": "pt"})
    else:
        save_file(
            {**load_file(folder / "model.safetensors"), **head}, folder / "model.safetensors", metadata={"format": "pt"}
        )
    data = batch(byte_tokenizer())
    rows = [
        ids[mask.bool()].tolist()
        for ids, mask in zip(data.batch["input_ids"], data.batch["attention_mask"], strict=True)
    ]
    decoder = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="eager").eval().model
    with torch.no_grad():
        last = torch.stack([decoder(torch.tensor([row])).last_hidden_state[0, -1] for row in rows])
    expected = last @ head[f"{name}.weight"][0] + 0.25
    torch.testing.assert_close(scores(worker(folder)), expected, rtol=0, atol=1e-5)


def test_a_value_head_is_found_in_a_sharded_folder(tiny_model, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "sharded"
    shutil.copytree(tiny_model, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {
        "model-00001-of-00002.safetensors": weights,
        "model-00002-of-00002.safetensors": {"v_head.weight": torch.ones(1, 32)},
    }
    for name, tensors in parts.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    places = {key: name for name, tensors in parts.items() for key in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    module = worker(folder).worker.module
    assert module.score.weight.eq(1).all() and module.score.bias is None
    assert score_rows(module, [[1, 2, 3]]).isfinite().all()


def test_offloading_brings_the_weights_for_the_pass_and_takes_them_away_again(rm_same):
    group = worker(rm_same, fsdp_config__param_offload=True)
    moves: list[str] = []
    plain_to = group.worker.module.to
    group.worker.module.to = lambda device: moves.append(str(device)) or plain_to(device)
    group.worker.device = torch.device("cpu:0")
    kept = scores(group)
    assert moves == ["cpu:0", "cpu"] and torch.equal(kept, scores(worker(rm_same)))


def test_a_tokenizer_beside_the_model_and_another_type_are_taken_as_set(rm_same, tmp_path):
    other_tokenizer().save_pretrained(tmp_path)
    group = worker(rm_same, model__tokenizer_path=str(tmp_path), model__dtype="float64")
    assert next(group.worker.module.parameters()).dtype == torch.float64
    assert group.worker.conversations.renders  # the folder's own is the policy's, which would be passed as it is


def test_code_of_a_reward_model_runs_only_if_it_is_trusted(rm_same, monkeypatch):
    from posttrain.workers import reward_model as module

    told: list[bool] = []

    def load(*_: Any, **named: Any) -> Any:
        told.append(named["trust_remote_code"])
        raise InterruptedError

    monkeypatch.setattr(module, "load_scorer", load)
    for trusted in (True, False):
        with pytest.raises(InterruptedError):
            worker(rm_same, model__trust_remote_code=trusted)
    assert told == [True, False]
