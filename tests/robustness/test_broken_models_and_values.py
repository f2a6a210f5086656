"""Inputs that libraries stumble over (cut files, absurd numbers, folders that vanish): words, never a traceback."""

from __future__ import annotations

import json
import math
import shutil
import struct
from pathlib import Path

import pytest
import torch

from posttrain.cache import cache_folder
from posttrain.config import ConfigError, load_config
from posttrain.config.model import ModelConfig
from posttrain.config.trainer import DataConfig
from posttrain.data.dataset import PromptDataset
from posttrain.errors import UserError
from posttrain.models.loading import ModelError, end_token_note, load_causal_lm, load_tokenizer

MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def problems(*args: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(["trainer.seed=1", *args], environment=True)
    return str(caught.value)


def header(content: object) -> bytes:
    text = json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text


FILES = {
    "weights that were cut off": ("model.safetensors", lambda data: data[: len(data) // 2], "instead of"),
    "weights cut in the header": ("model.safetensors", lambda data: data[:100], "its header alone needs"),
    "empty weights": ("model.safetensors", lambda data: b"", "has 0 bytes: it holds no weights"),
    "weights that were never fetched": ("model.safetensors", lambda data: POINTER, "git-lfs pointer"),
    "weights of another kind": ("model.safetensors", lambda data: b"\x80\x02}q\x00." * 9, "is no safetensors file"),
    "weights with a list as header": ("model.safetensors", lambda data: header([1]), "header cannot be read"),
    "weights without places": ("model.safetensors", lambda data: header({"w": {}}), "header cannot be read"),
    "a list for config.json": ("config.json", lambda data: b"[1, 2]", "config.json holds a list"),
    "nothing in config.json": ("config.json", lambda data: b"", "config.json is no JSON"),
    "brackets for config.json": ("config.json", lambda data: b"[" * 100_000, "config.json is no JSON"),
    "a number of 5,000 digits": ("config.json", lambda data: b'{"n": %s}' % (b"7" * 5000), "config.json is no JSON"),
    "a list for tokenizer.json": ("tokenizer.json", lambda data: b"[]", "tokenizer.json holds no JSON object"),
    "a tokenizer never fetched": ("tokenizer.json", lambda data: POINTER, "tokenizer.json is a git-lfs pointer"),
    "null for tokenizer_config": ("tokenizer_config.json", lambda data: b"null", "holds a NoneType"),
    "an index without its files": (
        "model.safetensors.index.json",
        lambda data: b'{"weight_map": {"w": "away.safetensors"}}',
        "names files that are not there: away.safetensors",
    ),
    "a list for an index": ("model.safetensors.index.json", lambda data: b"[]", "holds a list"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_broken_file_of_a_model_is_named_before_and_at_loading(place, name):
    file, change, words = FILES[name]
    folder = shutil.copytree(place.model, place.folder / "model")
    (folder / file).write_bytes(change((place.model / file).read_bytes() if (place.model / file).exists() else b""))
    said = problems(f"{MODEL}.path={folder}")
    assert words in said and file in said and f"{MODEL}.path" in said and "fetch or copy the model again" in said
    with pytest.raises(ModelError, match=file):  # `posttrain eval`, `generate` and others, which check no settings
        load_tokenizer(ModelConfig(path=str(folder)))


def test_a_good_model_folder_has_no_broken_files(tiny_model):
    from posttrain.models.model_files import broken_files

    assert broken_files(tiny_model) == []


def edited(place, file: str, **entries) -> ModelConfig:
    folder = shutil.copytree(place.model, place.folder / "edited")
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | entries))
    return ModelConfig(path=str(folder))


def load(config: ModelConfig) -> None:
    load_causal_lm(config, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("entries", [{"intermediate_size": 80}, {"vocab_size": 100}, {"hidden_size": 0}])
def test_settings_that_do_not_fit_the_weights_are_refused_in_words(place, entries):
    with pytest.raises(ModelError, match=r"model\.path="):
        load(edited(place, "config.json", **entries))


def test_a_tokenizer_without_its_parts_is_refused_in_words(place):
    config = edited(place, "config.json")
    (Path(str(config.path)) / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="the tokenizer could not be loaded"):
        load_tokenizer(config)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_named(place, value):
    from safetensors.torch import load_file, save_file

    config = edited(place, "config.json")
    path = Path(str(config.path)) / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"][0] = value
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"weights hold NaN or infinity \(model\.norm\.weight\)"):
        load(config)


VALUES = {
    "data.train_files=[a,b": "its bracket is never closed",
    "trainer.logger=[console": "its bracket is never closed",
    "custom_reward_function.reward_kwargs={a": "its bracket is never closed",
    "custom_reward_function.reward_kwargs.deep=[1, {": "cannot be read as YAML",
    "reward={functions: {a": "cannot be read as YAML",
    f"custom_reward_function.reward_kwargs={'{a: ' * 3000}": "expected a mapping",
    f"trainer.seed={2**70}": "must be smaller than 2**63",
    f"trainer.seed={-(2**70)}": "must be smaller than 2**63",
    f"data.seed={2**70}": "must be smaller than 2**63",
    f"trainer.seed={'7' * 5000}": "(5002 characters)",
    f"{ROLLOUT}.n={'7' * 5000}": "expected an integer",
    f"actor_rollout_ref.actor.optim.betas=[{'7' * 5000},1]": "expected a list of numbers",
    f"{ROLLOUT}.n=1e9": "must be from 1 to 10000",
    f"{ROLLOUT}.val_kwargs.n=1e9": "must be from 1 to 10000",
    "reward.num_workers=100000": "must be from 1 to 1000",
    f"{MODEL}.lora_alpha=1e400": "expected an integer",
    "actor_rollout_ref.actor.optim.lr=inf": "is not a finite number",
    "critic.optim.lr=inf": "is not a finite number",
    "actor_rollout_ref.actor.optim.weight_decay=inf": "is not a finite number",
    f"{ROLLOUT}.temperature=inf": "is not a finite number",
    "reward.failure_score=nan": "is not a finite number",
    "reward.timeout_s=1e-9": "must be 0.001 or more",
    "reward.timeout_s=inf": "must be 0.001 or more, and finite",
    "reward.sandbox.timeout_s=1e-9": "must be 0.001 or more",
}


@pytest.mark.parametrize("setting", VALUES, ids=lambda setting: setting[:50])
def test_an_absurd_value_is_refused_in_one_sentence(place, setting):
    said = problems(setting)
    assert said.startswith("1 problem") and VALUES[setting] in said and "what to do:" in said and len(said) < 1000


@pytest.mark.parametrize("setting", ["actor_rollout_ref.actor.grad_clip=inf", "tracking.samples_max_gb=inf"])
def test_a_limit_may_be_infinite(place, setting):
    assert load_config([setting]).value(setting.partition("=")[0]) == math.inf


def test_a_rank_above_every_layer_is_refused_before_memory_is_taken(place):
    from posttrain.models.lora import with_adapters

    config = ModelConfig(path=str(place.model), lora_rank=10**6)
    model = load_causal_lm(config, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(UserError, match=r"lora_rank=1000000: the widest layer .* has 64 columns; lower it"):
        with_adapters(model, config)


ROWS = {
    "data_source of a list": ('{"prompt": "a", "data_source": ["math"]}', "data_source of row 1 .* is a list"),
    "data_source of a mapping": ('{"prompt": "a", "data_source": {"a": 1}}', "data_source of row 1 .* is a dict"),
    "a number of 5,000 digits": ('{"prompt": "a", "ground_truth": %s}' % ("7" * 5000), "Line 1 .* cannot be read as"),
    "brackets without end": ('{"prompt": ' + "[" * 100_000, "Line 1 of .* cannot be read as JSON"),
}


@pytest.mark.parametrize("name", ROWS)
def test_an_odd_row_is_named(place, name):
    text, words = ROWS[name]
    tokenizer = load_tokenizer(ModelConfig(path=str(place.model)))
    with pytest.raises(UserError, match=words):
        PromptDataset(place.write("rows.jsonl", text), tokenizer, DataConfig())


@pytest.mark.parametrize("text", ["[" * 100_000, '[{"prompt": "a", "index": %s}]' % ("7" * 5000)])
def test_a_json_file_that_cannot_be_read_is_named(place, text):
    from posttrain.data.rows import load_rows

    path = place.write("rows.json", text)
    with pytest.raises(UserError, match=r"rows\.json cannot be read"):
        load_rows(path)


def test_a_data_source_that_is_a_number_is_its_name(place):
    tokenizer = load_tokenizer(ModelConfig(path=str(place.model)))
    taken = PromptDataset([{"prompt": "a", "data_source": 5}], tokenizer, DataConfig())
    assert taken.data_sources == ["5"]


def test_a_missing_end_token_is_noted():
    assert end_token_note((5,), 6) is None and end_token_note((5, 9), 6) is None
    assert end_token_note((5,), None) is None
    assert "there is no end token" in (end_token_note((), 6) or "")
    assert "[6] are not among the model's 6" in (end_token_note((6,), 6) or "")


def test_numbers_that_the_trainer_itself_lost_are_not_blamed_on_the_rollout():
    from posttrain.protocol import DataProto
    from posttrain.trainer.ppo.first_batch import MismatchError, compare_log_probs

    fields = {"response_mask": torch.ones(1, 3), "rollout_log_probs": torch.zeros(1, 3)}
    lost = torch.tensor([[0.0, math.nan, math.inf]])
    with pytest.raises(MismatchError, match=r"trainer's own log-probs of 2 of 3 tokens(?!.*rollout\.name)"):
        compare_log_probs(DataProto.from_dict(tensors=fields), lost, 1e-3)


def test_a_learning_rate_that_destroys_the_weights_is_named_after_the_update(place):
    said = place.refused(place.run, actor_rollout_ref__actor__optim__lr=1e30)
    assert "it was too large. Lower actor_rollout_ref.actor.optim.lr" in said and "engine" not in said


def test_a_run_directory_that_is_deleted_midway_is_said(place):
    from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer

    plain, run = RayPPOTrainer._update, place.folder / "out" / "test" / "run"

    def update(self, batch, step):
        if step == 2:
            shutil.rmtree(run)
        return plain(self, batch, step)

    with place.patch.context() as patch:
        patch.setattr(RayPPOTrainer, "_update", update)
        said = place.refused(place.run)
    assert str(run) in said and "was deleted or moved while the run wrote into" in said and "begins anew" in said


def test_a_cache_that_cannot_be_written_is_said(place):
    from posttrain.trainer.embedded import ensure_embedded

    place.patch.setenv("POSTTRAIN_CACHE", place.write("file", "") + "/cache")
    said = place.refused(ensure_embedded, print)
    assert "The cache folder" in said and "cannot be written" in said and "POSTTRAIN_CACHE" in said


def test_a_user_without_a_home_has_a_cache(monkeypatch):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("POSTTRAIN_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert cache_folder().name.startswith("posttrain-")


@pytest.mark.parametrize("command", [["config", "trainer.seed=1"], ["reward", "try", "--data", "x"], ["version"]])
def test_a_working_folder_that_is_gone_is_said(place, command):
    from posttrain import cli

    gone = place.folder / "gone"
    gone.mkdir()
    place.patch.chdir(gone)
    gone.rmdir()
    assert cli.main(command) == 2
    assert place.capture.readouterr().err == (
        "The working folder was deleted. Change to one that exists (cd), and start again.\n"
    )
    with pytest.raises(UserError, match="working folder was deleted"):
        load_config(["trainer.seed=1"])
