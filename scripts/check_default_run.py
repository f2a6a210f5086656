#!/usr/bin/env python3
"""Runs ./train.sh without arguments in an empty folder and checks what a newcomer gets (minutes on two cores).

It must exit 0, write 5 samples per prompt, raise the accuracy on held-out sums from 0.6 or below to 0.9 or above with
responses that end by themselves, and leave a model under outputs/checkpoints that transformers loads.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

TRAIN = Path(__file__).parents[1] / "train.sh"
METRIC = "val/math_reasoning/mean@1"


def test_a_bare_train_sh_trains_and_leaves_a_model() -> None:
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        subprocess.run([str(TRAIN)], cwd=folder, check=True)
        print(f"./train.sh took {time.monotonic() - started:.0f} s")
        outputs = Path(folder) / "outputs"
        checkpoints = (outputs / "checkpoints").resolve()
        run = checkpoints.parent
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        curve = [(line["step"], line[METRIC]) for line in lines if METRIC in line]
        print("accuracy by step: " + " ".join(f"{step}:{value:.3f}" for step, value in curve))
        assert curve[0][1] <= 0.6 and curve[-1][1] >= 0.9, curve
        cut_off = max(line.get("response_length/clip_ratio", 0.0) for line in lines)
        assert cut_off <= 0.05, f"{cut_off:.0%} of a step's responses were cut off: they go on behind their answers"
        check_samples(min((run / "samples").glob("step_*.parquet")))
        newest = max(checkpoints.glob("global_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
        check_model(newest / "huggingface")
    print("1 passed, 0 failed")


def check_samples(path: Path) -> None:
    import pyarrow.parquet as pq

    counts = Counter(pq.read_table(path, columns=["uid"])["uid"].to_pylist())
    assert set(counts.values()) == {5}, counts


def check_model(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": "12 + 14 = ?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        answer = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt) :]
    print("transformers, 12 + 14 = ?:", tokenizer.decode(answer, skip_special_tokens=True))


if __name__ == "__main__":
    test_a_bare_train_sh_trains_and_leaves_a_model()
