"""Wrong inputs by name, and what their users get: the words (what, where, what to do), or a recorded failure."""

from __future__ import annotations

import pytest
import wrong_inputs as wrong

from posttrain.sandbox import Sandbox
from tests.machine import warm

ROLLOUT = "actor_rollout_ref.rollout"
MISSING = {"question": "q"}

CASES = {
    # settings
    "misspelt key": (wrong.settings(f"{ROLLOUT}.temprature=1"), [f"did you mean `{ROLLOUT}.temperature`", "where:"]),
    "wrong type": (wrong.settings("data.train_batch_size=many"), ["expected an integer, got 'many'", "command line"]),
    "missing file": (wrong.settings("data.train_files=nowhere.json"), ["nowhere.json does not exist", "what to do:"]),
    "output folder that cannot be written": (wrong.closed_folder, ["cannot be made", "trainer.default_local_dir"]),
    # data
    "empty data": (wrong.data("empty.jsonl", ""), ["data.train_files: there are no rows in", "empty.jsonl"]),
    "row without prompt": (
        wrong.data("rows.jsonl", [{"prompt": "a"}, MISSING]),
        ["row 2 of", "column 'prompt'", "data.prompt_key", "question"],
    ),
    "prompt of a wrong type": (wrong.data("rows.jsonl", [{"prompt": 5}]), ["row 1 of", "is a int", "list of messages"]),
    "mixed schemas": (wrong.mixed_schemas, ["['1', None, 3]", "1 of 3 train rows have neither ground_truth"]),
    "data file that is not what its suffix says": (
        wrong.data("rows.parquet", '[{"prompt": "a"}]'),
        ["rows.parquet cannot be read as parquet"],
    ),
    "broken line": (wrong.data("rows.jsonl", '{"prompt": "a"}\n{oops\n'), ["Line 2 of", "is not valid JSON"]),
    "unreadable file": (wrong.unreadable_file, ["closed.jsonl cannot be read", "Permission denied"]),
    "parquet with images": (wrong.images, ["column 'images'", "trains text models", "remove rows"]),
    "duplicate ids": (wrong.duplicate_ids, ["4 groups of [3, 3, 3, 3]"]),
    "prompt longer than the setting": (
        wrong.data("rows.jsonl", [{"prompt": "x" * 50}], max_prompt_length=8, filter_overlong_prompts=False),
        ["the first is row 1 of", "Raise data.max_prompt_length", "data.truncation=left"],
    ),
    # models
    "prompt longer than the model": (wrong.longer_than_the_model, ["allow 100 tokens", "for 64 only", "lower one"]),
    "model folder without tokenizer": (wrong.no_tokenizer, ["bare holds no tokenizer", "where:", "tokenizer_path"]),
    "tokenizer without chat template": (
        wrong.no_chat_template,
        ["prompts are used as they are", "row 1 of", "template"],
    ),
    # rewards
    "NaN reward": (wrong.reward("nan"), ["-1.0 returned nan"]),
    "reward that hangs": (wrong.reward("hang", timeout_s=0.5), ["-1.0 took longer than 0.5 s"]),
    "reward that raises": (wrong.reward("raise"), ["-1.0 KeyError: 'reward_model'", "mine.py, line 6"]),
    "reward that prints megabytes": (wrong.reward("megabytes"), ["1.0 None", "... cut"]),
    "worker killed from outside": (wrong.reward("killed"), ["killed by SIGKILL", "out of memory"]),
    "reward that imports something missing": (wrong.missing_import, ["no_such_package", "set in:", "install"]),
    "wrong number of scores": (wrong.wrong_number_of_scores, ["(-1.0, 'returned 1 scores for 3 responses')"]),
    "empty completion": (wrong.empty_completion, ["[{'score': 0.0, 'pred': ''}, {'score': 0.0"]),
    "reward server that is away": (wrong.server_away, ["does not answer: no connection", "set in:", "start it"]),
    # programs
    "program that forks": (wrong.program("import os\nwhile True:\n try: os.fork()\n except OSError: pass"), ["0.0 "]),
    "program that eats memory": (wrong.program("x = bytearray(500 << 20)"), ["0.0 memory"]),
    "program that writes gigabytes": (
        wrong.program("f = open('big', 'wb')\nfor _ in range(2000): f.write(b'x' * (1 << 20))"),
        ["0.0 error", "OSError"],
    ),
    "program that opens a socket": (wrong.program("import socket\nsocket.socket()"), ["0.0 error", "PermissionError"]),
    "program that reads /proc": (wrong.program("open('/proc/1/environ').read()"), ["0.0 error", "FileNotFoundError"]),
    "program that ignores SIGTERM": (
        wrong.program("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass"),
        ["0.0 timeout"],
    ),
    # runs
    "corrupt checkpoint": (wrong.corrupt_checkpoint, ["global_step_1 ", "damaged and is skipped", "resume_from_path"]),
    "truncated shard": (wrong.truncated_shard, ["global_step_1 ", "bytes instead of"]),
    "full disk at a checkpoint": (
        wrong.full_disk_at_a_checkpoint,
        ["no room for it", "trainer.max_ckpt_to_keep", "the same command continues"],
    ),
    "full disk at a sample": (
        wrong.full_disk_at_a_sample,
        ["step_2.parquet failed: No space left", "tracking.samples_max_gb", "the same command continues"],
    ),
    "Ctrl-C twice": (wrong.ctrl_c_twice, ["stopped ", "Leaving at once", "The same command continues"]),
    "clock jump": (wrong.clock_jump, ["same"]),
}


@pytest.mark.parametrize("name", list(CASES))
def test_wrong_input_is_answered(place, name):
    meet, parts = CASES[name]
    if name.startswith("program"):
        with warm(Sandbox()):
            pass
    text = meet(place)
    assert [part for part in parts if part not in text] == [], text


def test_there_are_thirty_and_more():
    assert len(CASES) >= 30
