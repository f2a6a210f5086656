"""Settings of the supervised trainers by what they change: passes, order and columns of rows, files, what is kept."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chat_templates import CHATML, tokenizer_with
from lora_tools import started
from safetensors.torch import load_file
from sft_runs import PAIRS, PREFERENCES, metrics_of, reward_model, sft

from posttrain.checkpoint import parts
from posttrain.config.model import ModelConfig
from posttrain.config.supervised import PairDataConfig, RewardTrainerConfig, SFTConfig, SFTDataConfig
from posttrain.data.supervised import PairDataset, SFTDataset
from posttrain.models import forward, scorer
from posttrain.models.loading import load_tokenizer
from posttrain.tracking.rundir import RunDirectory, RunDirectoryError
from posttrain.trainer.supervised.loop import SupervisedTrainer
from posttrain.workers import supervised
from posttrain.workers.supervised import PairWorker, SFTWorker

ONE = {"trainer__total_training_steps": 1}
KINDS = {"sft": sft, "reward model": reward_model}


@pytest.fixture
def seen(monkeypatch):
    """Shapes of the passes of the next runs, and how often their first attention was computed."""
    found = SimpleNamespace(tokens=[], rows=[], attention=0)
    hidden, padded, fit = forward.hidden_states, scorer.own_scores, SupervisedTrainer.fit

    def count(*_: Any) -> None:
        found.attention += 1

    def watched(self: SupervisedTrainer) -> Any:
        block = next(
            m for name, m in self.task.group.worker.engine.module.named_modules() if name.endswith("layers.0.self_attn")
        )
        block.register_forward_pre_hook(count)
        found.rows.clear()  # of the proof when the model was loaded
        found.tokens.clear()
        return fit(self)

    def states(module: Any, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        found.rows.append(ids.shape[0])
        found.tokens.append(ids.numel())
        return hidden(module, ids, *rest)

    monkeypatch.setattr(forward, "hidden_states", states)
    monkeypatch.setattr(scorer, "own_scores", lambda m, rows: found.rows.append(len(rows)) or padded(m, rows))
    monkeypatch.setattr(SupervisedTrainer, "fit", watched)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_passes_hold_what_is_set_and_layers_are_computed_again_only_if_asked(tiny_model, tmp_path, seen, kind):
    make, both = KINDS[kind], 1 if kind == "sft" else 2  # a pair is two rows
    more = {"model__dtype": "float64", **ONE}
    few = {"data__micro_batch_size_per_gpu": 3, "model__use_remove_padding": False}
    make(tiny_model, tmp_path / "few", model__enable_gradient_checkpointing=True, **few, **more)
    assert sorted(seen.rows) == sorted([3 * both, 3 * both, 2 * both]) and seen.attention == 6  # 8 rows, each twice
    seen.rows, seen.tokens, seen.attention = [], [], 0
    make(tiny_model, tmp_path / "small", data__max_token_len_per_gpu=60, **more)
    assert len(seen.tokens) > 1 and max(seen.tokens) <= 60 and set(seen.rows) == {1}
    assert seen.attention == len(seen.tokens)


def test_the_order_of_rows_follows_the_seed_of_the_data_or_of_the_run(tmp_path):
    def order(seed: int, own: int | None = None, shuffle: bool = True) -> list[int]:
        config = SFTConfig()
        config.trainer.seed, config.data.seed, config.data.shuffle = seed, own, shuffle
        config.data.train_batch_size = 20
        with RunDirectory(tmp_path, "p", f"{seed}-{own}-{shuffle}") as run:
            trainer = SupervisedTrainer(config, SimpleNamespace(rows=20), run, stored_config=config)  # pyright: ignore
        return trainer.sampler.next_batch()

    assert order(1) != order(2) and order(1, 7) == order(2, 7) != order(1, 8)
    assert order(1, shuffle=False) == list(range(20))


@pytest.fixture(scope="module")
def due(tiny_model, tmp_path_factory):
    """5 steps whose checkpoints and validations come at frequencies of their own."""
    more = {
        "trainer__total_training_steps": 5,
        "trainer__save_freq": 2,
        "trainer__test_freq": 3,
        "trainer__val_before_train": False,
        "trainer__max_ckpt_to_keep": 2,
        "trainer__export_hf": "all",
    }
    return sft(tiny_model, tmp_path_factory.mktemp("due"), val_data=PAIRS[:4], **more)


def test_checkpoints_and_validations_come_when_they_are_due(due):
    lines, log = metrics_of(due.path), (due.path / "logs" / "run.log").read_text()
    assert [line["step"] for line in lines if "val/loss" in line] == [3, 5]
    assert [step for step in range(1, 6) if f"saved {due.path}/checkpoints/global_step_{step}\n" in log] == [2, 4, 5]
    assert sorted(path.name for path in due.path.glob("checkpoints/global_step_*")) == [
        "global_step_4",
        "global_step_5",
    ]
    assert (due.path / "checkpoints" / "global_step_4" / "huggingface" / "config.json").exists()


def test_the_next_step_does_not_wait_for_a_checkpoint(tiny_model, tmp_path, monkeypatch):
    threads, write = [], parts._HashingStream.write

    def watched(stream, data):
        threads.append(threading.current_thread().name)
        return write(stream, data)

    monkeypatch.setattr(parts._HashingStream, "write", watched)
    more = {"trainer__total_training_steps": 2, "trainer__save_freq": 1}
    sft(tiny_model, tmp_path / "behind", **more)
    assert list(dict.fromkeys(threads)) == ["checkpoint", "MainThread"], "of the last step nothing is copied"
    threads.clear()
    sft(tiny_model, tmp_path / "waited", trainer__async_save=False, **more)
    assert set(threads) == {"MainThread"}


def test_what_a_step_waits_for_a_save_is_time_of_the_save(tiny_model, tmp_path, monkeypatch):
    waits = [0.0, float("inf")]
    monkeypatch.setattr(parts.HostCopies, "take_waited", lambda self: waits.pop(0) if waits else 0.0)
    path = sft(tiny_model, tmp_path, trainer__total_training_steps=2, trainer__save_freq=1).path
    lines = [
        json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines() if '"timing_s/update"' in line
    ]
    assert waits == [] and [line["timing_s/update"] == 0.0 for line in lines] == [False, True]
    assert not any("waited_for_save" in name for line in lines for name in line)


def test_a_run_goes_on_from_the_checkpoint_that_is_named_and_leaves_others_alone_if_told(due, tiny_model, tmp_path):
    start = {
        "trainer__resume_mode": "resume_path",
        "trainer__resume_from_path": str(due.path / "checkpoints/global_step_4"),
    }
    branch = sft(tiny_model, tmp_path, trainer__total_training_steps=5, **start)
    assert [line["step"] for line in metrics_of(branch.path)] == [5]
    with pytest.raises(RunDirectoryError, match="holds a run already"):
        sft(tiny_model, tmp_path, trainer__resume_mode="disable")


def test_rows_come_from_the_files_that_are_named(tiny_model, tmp_path):
    for name, rows in (("train", PAIRS[:6]), ("val", PAIRS[6:9])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"data__train_files": str(tmp_path / "train.jsonl"), "data__val_files": str(tmp_path / "val.jsonl")}
    line = metrics_of(sft(tiny_model, tmp_path / "out", data=None, **files, **ONE).path)[-1]
    assert line["train/rows"] == 6
    assert line["val/trained_tokens"] == sum(len(row["response"]) + 1 for row in PAIRS[6:9])


def test_a_module_of_ones_own_is_imported_before_training(tiny_model, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\n")
    started(sft, tiny_model, tmp_path / "out", model__external_lib=str(mine))
    assert (tmp_path / "imported").exists()


def test_settings_of_the_model_reach_the_loading_of_both_kinds(tiny_model, tmp_path, monkeypatch):
    """What only a model with code of its own, or a library that is not here, could show."""
    told: list[dict[str, Any]] = []

    def load(*_: Any, **named: Any) -> Any:
        told.append(named)
        raise InterruptedError

    monkeypatch.setattr(supervised, "load_scorer", load)
    monkeypatch.setattr(supervised, "load_causal_lm", load)
    rank = {"model__lora_rank": 2, "model__quantization": "nf4", "model__allow_other_weights": True}
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: object())
    for make in (sft, reward_model):
        with pytest.raises(InterruptedError):
            make(tiny_model, tmp_path / make.__name__, model__trust_remote_code=True, **rank)
    assert [named["quantization"] for named in told] == ["nf4", "nf4"] and told[1]["trust_remote_code"] is True
    assert told[1]["allow_other_weights"] is True


def test_values_laid_over_a_reward_models_configuration_reach_it(tiny_model, tmp_path):
    module = started(reward_model, tiny_model, tmp_path, model__override_config={"rms_norm_eps": 0.5})
    assert module.config.rms_norm_eps == 0.5


LOUD = "{% if loud %}LOUD{% endif %}" + CHATML


@pytest.mark.parametrize("kind", KINDS)
def test_settings_of_the_rows_act_on_both_kinds_of_data(kind):
    tokenizer = tokenizer_with(LOUD)
    data, config, rows = {
        "sft": (SFTDataset, SFTDataConfig, PAIRS),
        "reward model": (PairDataset, PairDataConfig, PREFERENCES),
    }[kind]

    def texts(rows: Any, split: str = "train", **settings: Any) -> list[str]:
        made = data(rows, tokenizer, config(**settings), split=split)
        return [tokenizer.decode(row.ids if kind == "sft" else row.chosen) for row in made]

    plain = texts(rows)
    assert texts(rows, train_max_samples=3, val_max_samples=2) == plain[:3]
    assert texts(rows, "val", train_max_samples=3, val_max_samples=2) == plain[:2]
    assert "system\nBe odd." in texts(rows, system_prompt="Be odd.")[0] and "Be odd." not in plain[0]
    loud = texts(rows, apply_chat_template_kwargs={"loud": True})
    assert loud[0].startswith("LOUD") and not plain[0].startswith("LOUD")


def test_columns_of_pairs_are_chosen_by_keys():
    [usual] = PairDataset(PREFERENCES[:1], tokenizer_with(CHATML), PairDataConfig())
    row = {"q": PREFERENCES[0]["prompt"], "good": PREFERENCES[0]["chosen"], "bad": PREFERENCES[0]["rejected"]}
    keys = {"prompt_key": "q", "chosen_key": "good", "rejected_key": "bad"}
    [named] = PairDataset([row], tokenizer_with(CHATML), PairDataConfig(**keys))
    assert (named.chosen, named.rejected) == (usual.chosen, usual.rejected)


def test_step_lines_are_on_the_console_only_if_it_is_among_the_loggers(tiny_model, tmp_path, monkeypatch):
    from posttrain.tracking import progress

    quiet: list[bool] = []
    plain = progress.Progress.step
    monkeypatch.setattr(
        progress.Progress, "step", lambda self, *a, **k: quiet.append(k["quiet"]) or plain(self, *a, **k)
    )
    for logger in (["console"], []):
        sft(tiny_model, tmp_path / str(len(logger)), trainer__logger=logger, **ONE)
    assert quiet == [False, True]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_come_from_the_path_though_the_tokenizer_lies_elsewhere(tiny_model, tmp_path, kind):
    load_tokenizer(ModelConfig(path=str(tiny_model))).save_pretrained(tmp_path / "tokens")
    module = started(KINDS[kind], tiny_model, tmp_path / "out", model__tokenizer_path=str(tmp_path / "tokens"))
    own = load_file(tiny_model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(module.state_dict()[name], own[name])


@pytest.mark.parametrize("config, worker", [(SFTConfig, SFTWorker), (RewardTrainerConfig, PairWorker)])
def test_sizes_of_groups_of_workers_reach_the_engine(monkeypatch, config, worker):
    made, seen = config(), {}
    made.fsdp.fsdp_size, made.fsdp.ulysses_sequence_parallel_size = 2, 4
    monkeypatch.setattr(worker, "load_model", lambda self, device: None)
    monkeypatch.setattr("posttrain.engine.torch_engine.group_ranks", lambda _, **sizes: seen.update(sizes))
    with pytest.raises(AttributeError):  # there is no model to build an engine over
        worker(made, None, torch.device("cpu")).init_model()
    assert seen == {"fsdp_size": 2, "sequence_size": 4}
