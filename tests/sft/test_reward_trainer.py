"""Runs of the reward-model trainer: what it learns, writes and resumes."""

from __future__ import annotations

import pytest
import torch
from sft_runs import PREFERENCES, metrics_of, reward_model, settings, tensors

from posttrain.models.scorer import score_rows
from posttrain.models.scorer_loading import load_scorer
from posttrain.trainer import reward_model_trainer

CPU = torch.device("cpu")


def test_the_folder_it_writes_loads_as_a_sequence_classifier_and_scores_as_the_run_did(tiny_model, tmp_path, capsys):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    more = {"trainer__total_training_steps": 30, "optim__lr": 1e-2, "trainer__export_hf": "last"}
    run = reward_model(tiny_model, tmp_path, val_data=PREFERENCES, **more)
    lines = metrics_of(run.path)
    first, last = lines[0], lines[-1]
    assert (first["val/accuracy"], first["val/margin"]) == (0.5, 0.0)  # a new head gives every answer the same score
    assert first["val/loss"] == pytest.approx(0.6931471805599453)
    assert last["val/accuracy"] > 0.7 and last["val/loss"] < 0.6 and last["val/margin"] > 0.1
    said = capsys.readouterr().out
    assert "Reward model: 30 optimizer steps on 16 pairs; 16 pairs are held out." in said
    assert "validation before: accuracy 0.500" in said and "step 30/30: loss" in said

    folder = run.path / "checkpoints" / "global_step_30" / "huggingface"
    plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert plain.config.num_labels == 1 and plain.config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(tiny_model).chat_template
    rows = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": pair["prompt"]}, {"role": "assistant", "content": pair[name]}],
            return_dict=False,
        )
        for pair in PREFERENCES
        for name in ("chosen", "rejected")
    ]
    with torch.no_grad():
        padded = tokenizer.pad({"input_ids": rows}, padding_side="right", return_tensors="pt")
        scores = plain(**padded).logits[:, 0]
    torch.testing.assert_close(score_rows(load_scorer(str(folder), CPU, torch.float32), rows), scores)
    lead = (scores[::2] - scores[1::2]).double()
    assert float(lead.mean()) == pytest.approx(last["val/margin"], rel=1e-4)
    assert float((lead > 0).double().mean()) == last["val/accuracy"]


def test_a_trained_reward_model_can_be_trained_further_and_resumes_to_the_bit(tiny_model, tmp_path, monkeypatch):
    from posttrain.trainer.supervised.tasks import PairTask

    first = reward_model(tiny_model, tmp_path / "first", trainer__export_hf="last")
    folder = first.path / "checkpoints" / "global_step_2" / "huggingface"
    more = {"trainer__total_training_steps": 4, "trainer__save_freq": 2, "loss__center_coef": 0.01}
    straight = reward_model(folder, tmp_path / "straight", val_data=PREFERENCES[:3], **more)
    assert metrics_of(straight.path)[0]["val/margin"] != 0.0
    plain, left = PairTask.train_step, [3]

    def failing(self, rows):
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("the power went")
        return plain(self, rows)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power"):
        patch.setattr(PairTask, "train_step", failing)
        reward_model(folder, tmp_path / "failed", val_data=PREFERENCES[:3], **more)
    again = reward_model(folder, tmp_path / "failed", val_data=PREFERENCES[:3], **more)
    assert metrics_of(again.path) == metrics_of(straight.path)
    ours, theirs = tensors(again.path), tensors(straight.path)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and ours.keys() == theirs.keys()


def test_results_do_not_depend_on_passes_and_packing(tiny_model, tmp_path):
    layouts = [{}, {"data__micro_batch_size_per_gpu": 1}, {"data__max_token_len_per_gpu": 30}]
    layouts += [{"model__use_remove_padding": False}]
    found = []
    for number, layout in enumerate(layouts):
        run = reward_model(tiny_model, tmp_path / str(number), val_data=PREFERENCES, model__dtype="float64", **layout)
        found.append([value for line in metrics_of(run.path) for value in line.values()])
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-7)


def test_adapters_train_beside_the_new_head(tiny_model, tmp_path):
    from transformers import AutoModelForSequenceClassification

    run = reward_model(tiny_model, tmp_path, model__lora_rank=2, trainer__export_hf="last")
    model = AutoModelForSequenceClassification.from_pretrained(
        run.path / "checkpoints" / "global_step_2" / "huggingface"
    )
    start = load_scorer(str(tiny_model), CPU, torch.float32, new_head=True)
    changed = {n for n, w in model.named_parameters() if not torch.equal(w, start.get_parameter(n))}
    assert "score.weight" in changed and any("q_proj" in name for name in changed)
    assert not any("norm" in name or "embed" in name for name in changed)


def test_the_embedded_pairs_are_right_and_wrong_sums():
    from posttrain.data.recipes.arithmetic import arithmetic_rows, pair_rows

    rows = arithmetic_rows(max_operand=20)["train"]
    pairs = pair_rows(rows)
    assert len(pairs) == len(rows)
    for pair in pairs:
        a, b = (int(part) for part in pair["prompt"].removesuffix(" = ?").split(" + "))
        assert int(pair["chosen"]) == a + b and abs(int(pair["rejected"]) - a - b) >= 10


def test_wrong_commands_are_explained(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert reward_model_trainer.main(["data.chosen_kye=a", "loss.center_coef=-1"]) == 2
    said = capsys.readouterr().err
    assert "did you mean `data.chosen_key`" in said and "loss.center_coef=-1.0` is out of range" in said
    assert reward_model_trainer.main([]) == 2
    assert "posttrain reward-model model.path=embedded" in capsys.readouterr().err


def test_missing_columns_are_named_before_the_model_is_loaded(tiny_model, tmp_path, monkeypatch):
    from posttrain.data.rows import DataError
    from posttrain.workers import supervised

    monkeypatch.setattr(supervised, "load_scorer", lambda *a, **k: pytest.fail("the model was loaded"))
    with pytest.raises(DataError, match=r"has no 'better' \(data\.chosen_key\)"):
        reward_model_trainer.run_reward_model(
            settings(tiny_model, tmp_path, data__chosen_key="better"), data=PREFERENCES
        )
