"""Each wrong input as a function that meets it and gives back what its user is told, or what is recorded for them."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch

from posttrain.checkpoint import CheckpointManager
from posttrain.config import ConfigError, load_config
from posttrain.config.model import ModelConfig
from posttrain.config.rollout import CustomRewardConfig, SandboxConfig
from posttrain.config.trainer import DataConfig
from posttrain.data.dataset import PromptDataset
from posttrain.models.loading import check_positions, load_tokenizer, positions_of
from posttrain.rewards import RewardItem, RewardPool, resolve_reward, score_by_source
from posttrain.rewards.scorers import code
from posttrain.tracking.rundir import RunDirectory

BEHAVIOURS = """
import os, signal, time
def compute_score(solution_str, ground_truth):
    if solution_str == "nan": return float("nan")
    if solution_str == "hang": time.sleep(60)
    if solution_str == "raise": raise KeyError("reward_model")
    if solution_str == "killed": os.kill(os.getpid(), signal.SIGKILL)
    if solution_str == "megabytes": print("x" * (4 << 20)); print("y")
    return 1.0
"""


def settings(*args):
    def meet(place):
        with pytest.raises(ConfigError) as caught:
            load_config(list(args), environment=True)
        return str(caught.value)

    return meet


def data(name, text, **config):
    """The text of the refusal, or the notes of rows that are taken."""

    def meet(place):
        path = place.write(name, text if isinstance(text, str | bytes) else "\n".join(map(json.dumps, text)))
        tokenizer = load_tokenizer(ModelConfig(path=str(place.model)))
        return place.refused(PromptDataset, path, tokenizer, DataConfig(**config))

    return meet


def mixed_schemas(place):
    rows = [{"prompt": "a", "ground_truth": "1", "data_source": "math"}, {"prompt": [{"role": "user", "content": "b"}]}]
    rows.append({"prompt": "c", "reward_model": {"ground_truth": 3}, "index": 7})
    path = place.write("mixed.jsonl", "\n".join(map(json.dumps, rows)))
    taken = PromptDataset(path, load_tokenizer(ModelConfig(path=str(place.model))), DataConfig())
    return f"{[item['ground_truth'] for item in taken]} {taken.notes}"


def duplicate_ids(place):
    rows = [{"prompt": f"{i} + 1 = ?", "id": "same", "index": 5, "ground_truth": str(i + 1)} for i in range(8)]
    result = place.run(data__train_files=place.write("same.jsonl", "\n".join(map(json.dumps, rows))))
    import pyarrow.parquet as pq

    uids = [row["uid"] for row in pq.read_table(result.path / "samples" / "step_1.parquet").to_pylist()]
    return f"{len(set(uids))} groups of {[uids.count(uid) for uid in sorted(set(uids))]}"


def images(place):
    import pyarrow
    import pyarrow.parquet as pq

    rows = [{"prompt": "what is this?", "images": [{"bytes": b"\x89PNG", "path": None}]}]
    pq.write_table(pyarrow.Table.from_pylist(rows), place.folder / "images.parquet")
    tokenizer = load_tokenizer(ModelConfig(path=str(place.model)))
    return place.refused(PromptDataset, place.folder / "images.parquet", tokenizer, DataConfig())


def unreadable_file(place):
    path = place.write("closed.jsonl", '{"prompt": "a"}')

    def refuse(self):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    place.patch.setattr(Path, "read_bytes", refuse)  # root may read everything
    from posttrain.data.rows import load_rows

    return place.refused(load_rows, path)


def no_tokenizer(place):
    folder = place.folder / "bare"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(place.model / name, folder / name)
    return settings(f"actor_rollout_ref.model.path={folder}")(place)


def no_chat_template(place):
    tokenizer = load_tokenizer(ModelConfig(path=str(place.model)))
    tokenizer.chat_template = None
    rows = [{"prompt": [{"role": "user", "content": "b"}]}]
    plain = PromptDataset([{"prompt": "a"}], tokenizer, DataConfig())
    return " ".join([*plain.notes, place.refused(PromptDataset, rows, tokenizer, DataConfig())])


def longer_than_the_model(place):
    class Settings:
        max_position_embeddings = 64

    class Learned(torch.nn.Module):
        config = Settings()

        def __init__(self):
            super().__init__()
            self.wpe = torch.nn.Embedding(64, 2)

    return place.refused(check_positions, positions_of(Learned()), 100)


def closed_folder(place):
    return place.refused(RunDirectory("/proc/self/nowhere", "a", "b").open)


def reward(behaviour, **options):
    """What is recorded with the sample."""

    def meet(place):
        path = place.write("mine.py", BEHAVIOURS)
        printed = []
        spec = resolve_reward(CustomRewardConfig(path=path))
        options.setdefault("timeout_s", 5.0)
        with RewardPool(spec, num_workers=1, failure_score=-1.0, on_print=printed.append, **options) as pool:
            for key, text in enumerate((behaviour, "fine")):
                pool.submit(key, RewardItem("", text, ""))
            results = pool.wait_all()
        first, fine = results[0], results[1]
        assert fine.score == 1.0 and fine.error is None  # the next sample is scored
        assert sum(map(len, printed)) < 10_000
        return f"{first.score} {first.error} {printed[-1:]}"

    return meet


def missing_import(place):
    path = place.write("mine.py", "import no_such_package\ndef compute_score(response, ground_truth): return 1.0\n")
    return place.refused(resolve_reward, CustomRewardConfig(path=path))


def wrong_number_of_scores(place):
    path = place.write("mine.py", "def group(completions, ground_truths): return [1.0]\n")
    with RewardPool(resolve_reward(CustomRewardConfig(path=path)), num_workers=1, failure_score=-1.0) as pool:
        for key in range(3):
            pool.submit(key, RewardItem("", "x", "", group="g", group_size=3))
        return str([(result.score, result.error) for result in pool.wait_all().values()])


def empty_completion(place):
    return str([score_by_source(source, "", "42") for source in ("gsm8k", "math", "qa")])


def server_away(place):
    config = CustomRewardConfig(path="http://127.0.0.1:9/score", reward_kwargs={"attempts": 1})
    return place.refused(resolve_reward, config)


def program(text):
    """What the sandbox makes of a program that a model wrote."""

    def meet(place):
        limits = SandboxConfig(timeout_s=1.5, memory_mb=96, processes=8, disk_mb=8, output_kb=64)
        code.configure(limits.to_dict(), partial_credit=False)
        try:
            truth = {"inputs": ["1\n"], "outputs": ["1\n"]}
            result = score_by_source("code", f"```python\n{text}\nprint(1)\n```", truth)
        finally:
            code.close()
        assert isinstance(result, dict)
        return f"{result['score']} {result['failure']}"

    return meet


def saved(place):
    notes: list[str] = []
    manager = CheckpointManager(place.folder / "checkpoints", on_note=notes.append)
    for step in (1, 2):
        manager.save(step, tensors={"actor": {"w": torch.full((64,), step)}}, state={"step": step}, rng={})
    return manager, notes


def corrupt_checkpoint(place):
    manager, notes = saved(place)
    path = manager.path_of(2) / "state.json"
    path.write_bytes(path.read_bytes().replace(b"2", b"3"))
    newest = manager.newest()
    assert newest is not None
    return f"{newest.name} {notes[-1]} {place.refused(manager.load_state, manager.path_of(2))}"


def truncated_shard(place):
    manager, notes = saved(place)
    shard = next(manager.path_of(2).glob("actor/*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-10])
    newest = manager.newest()
    assert newest is not None
    return f"{newest.name} {notes[-1]}"


def full_disk_at_a_checkpoint(place):
    place.run()  # without limits first: 2 steps and a checkpoint
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))  # a real refusal by the kernel, in the midst of a shard
    try:
        said = place.refused(place.run, trainer__total_training_steps=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert place.run(trainer__total_training_steps=4).steps == 4
    return said


def full_disk_at_a_sample(place):
    from posttrain.trainer.ppo import recorder

    plain, tries = recorder.write_step, []

    def write(folder, step, table):
        tries.append(step)
        if tries == [1, 2]:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder / "step_2.parquet"))
        plain(folder, step, table)

    place.patch.setattr(recorder, "write_step", write)
    said = place.refused(place.run, trainer__save_freq=1)
    assert place.run(trainer__save_freq=1).steps == 2 and tries == [1, 2, 2]
    return said


def ctrl_c_twice(place):
    from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer

    plain = RayPPOTrainer._update

    def update(self, batch, step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return plain(self, batch, step)

    with place.patch.context() as patch:
        patch.setattr(RayPPOTrainer, "_update", update)
        with pytest.raises(KeyboardInterrupt):
            place.run(trainer__save_freq=1)
    status = json.loads((place.folder / "out" / "test" / "run" / "status.json").read_text())
    assert place.run(trainer__save_freq=1).steps == 2
    return f"{status['status']} {place.capture.readouterr().out}"


def clock_jump(place):
    import time

    from runs import metrics_of, run

    straight = place.run()
    place.patch.setattr(time, "time", lambda: -1e9)  # set back by decades
    again = run(place.model, place.sums, place.folder / "jumped")
    return "same" if metrics_of(again.path) == metrics_of(straight.path) else "other"
