"""What a user did wrong is answered before torch is imported, and with the right spelling."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.data.fields import check_prompt
from posttrain.data.rows import DataError, load_rows, read_ahead, table_of_rows
from posttrain.data.supervised import check_pair, check_row

REACHED = 77
WITHOUT_TORCH = f"""
import json, os, sys

class Deny:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("torch is imported", flush=True)
            raise SystemExit({REACHED})

sys.meta_path.insert(0, Deny())
import pyarrow.parquet
import posttrain.config.load, posttrain.data.fields
from posttrain.cli import main
for line in sys.stdin:
    folder, words = json.loads(line)
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.path.join(folder, "said"), os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(1, 2)
        os.chdir(folder)
        status = 1
        try:
            status = main(words)
        except SystemExit as end:
            status = end.code
        finally:
            sys.stdout.flush()
            os._exit(status or 0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Runs each command in a fork, of a process that has imported what comes before torch."""
GOOD = [{"prompt": f"{n} + 1 = ?", "ground_truth": str(n + 1), "response": str(n + 1)} for n in range(8)]
PAIRS = [{"prompt": "1 + 1 = ?", "chosen": "2", "rejected": "3"}]
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"


@pytest.fixture
def desk(tmp_path):
    def lines(rows: list[dict]) -> str:
        return "".join(json.dumps(row) + "\n" for row in rows)

    files = {
        "good.jsonl": lines(GOOD),
        "pairs.jsonl": lines(PAIRS),
        "cut.jsonl": lines(GOOD) + '{"prompt": ',
        "cut.json": json.dumps(GOOD)[:-20],
        "other.jsonl": lines([{"question": "1 + 1 = ?", "answer": "2"}]),
        "empty.jsonl": "",
        "good.py": REWARD,
        "bad.py": REWARD.replace(":\n", "\n", 1),
        "other.py": REWARD.replace("compute_score", "my_score"),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "run" / "config.yaml").write_text("{}\n")
    return tmp_path


@pytest.fixture(scope="module")
def answer():
    """`answer(folder, *words)`: the exit status of the command in that folder, and what it printed."""
    command = [sys.executable, "-c", WITHOUT_TORCH]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None

        def ask(desk: Path, *words: str) -> tuple[int, str]:
            print(json.dumps([str(desk), words]), file=server.stdin, flush=True)
            return int(server.stdout.readline()), (desk / "said").read_text()

        yield ask


SFT = ("sft", "model.path=embedded")
PAIR = ("reward-model", "model.path=embedded")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train", "--train_files", "cut.jsonl"), "Line 9 of cut.jsonl is not valid JSON"),
        (("train", "--train_files", "cut.json"), "cut.json is not valid JSON"),
        (("train", "--train_files", "good.jsonl", "--val_files", "cut.jsonl"), "Line 9 of cut.jsonl"),
        (("train", "--train_files", "other.jsonl"), "data.prompt_key=question"),
        (("train", "--train_files", "empty.jsonl"), "there are no rows in empty.jsonl"),
        (("train", "--reward_func", "bad.py"), "syntax error in"),
        (("train", "--reward_func", "other.py", "custom_reward_function.name=compute_score"), "compute_score"),
        ((*SFT, "data.train_files=cut.jsonl"), "Line 9 of cut.jsonl"),
        ((*SFT, "data.train_files=other.jsonl"), "data.prompt_key=question"),
        ((*PAIR, "data.train_files=cut.jsonl"), "Line 9 of cut.jsonl"),
        ((*PAIR, "data.train_files=other.jsonl"), "has no 'chosen' (data.chosen_key)"),
        (("export", "nowhere", "out"), "nowhere does not exist. Name a folder"),
        (("export", ".", "out"), "is no whole checkpoint"),
        (("replay",), "arguments are required: run"),
        (("replay", "nowhere"), "There is no run `nowhere`"),
        (("replay", ".", "x"), "invalid int value: 'x'"),
        (("replay", "run", "3"), "kept no batches"),
        (("generate", "embedded", "--promt", "hi"), "there is no option --promt (did you mean --prompt?)"),
        (("eval", "embedded", "--daat", "good.jsonl"), "(did you mean --data?)"),
        (("generate", "nowhere/at/all", "--prompt", "hi"), "nowhere/at/all"),
        (("eval", "./nowhere", "--data", "good.jsonl"), "nowhere"),
        (("eval", "compare", "one", "two"), "There is no report one"),
        (("doctor", "trainer.sede=1"), "did you mean `trainer.seed`?"),
        (("train", "--load_in_4bit"), "actor_rollout_ref.model.quantization=nf4"),
        (("train", "--load_in_4bit=True"), "actor_rollout_ref.model.quantization=nf4"),
        (("train", "model.load_in_4bit=True"), "actor_rollout_ref.model.quantization=nf4"),
        (("train", "--max_new_tokens", "5"), "data.max_response_length"),
        (("train", "model=Qwen/Qwen2.5-0.5B"), "`actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B`"),
        (("data", "gsm8kk"), "did you mean gsm8k?"),
        (("sft", "--load_in_4bit"), "`model.quantization=nf4`"),
        (("sft", "model.load_in_4bit=True"), "`model.quantization=nf4`"),
        (("sft", "--model", "X"), "`model.path`"),
        (("reward-model", "--learning-rate", "1e-5"), "`optim.lr`"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else "",
)
def test_a_mistake_is_answered_without_torch(answer, desk, words, said):
    status, text = answer(desk, *words)
    assert status in (1, 2) and said in text, (status, text)


@pytest.mark.parametrize(
    "words",
    [
        ("train", "--train_files", "good.jsonl", "--val_files", "good.jsonl", "--reward_func", "good.py"),
        ("train", "--train_files", "good.jsonl", "--reward_func", "other.py", "custom_reward_function.name=my_score"),
        (*SFT, "data.train_files=good.jsonl"),
        (*PAIR, "data.train_files=pairs.jsonl"),
        ("generate", "embedded", "--prompt", "hi", "--max_new_tokens", "5"),
        ("generate", "embedded", "--prompt", "hi", "--max_tokens=5"),
    ],
    ids=lambda value: " ".join(value)[:60],
)
def test_what_is_right_goes_on_to_torch(answer, desk, words):
    status, text = answer(desk, *words)
    assert status == REACHED, (status, text)


def test_what_was_read_ahead_is_taken_once_and_only_while_the_file_is_the_same(desk):
    file = desk / "good.jsonl"
    ahead = read_ahead(str(file))
    assert load_rows(str(file), limit=3) is not ahead and load_rows(str(file)) is ahead
    assert load_rows(str(file)) is not ahead
    ahead = read_ahead(str(file))
    file.write_text(file.read_text() + json.dumps(GOOD[0]) + "\n")
    assert len(load_rows(str(file))) == len(ahead) + 1


def test_a_look_at_a_row_asks_for_what_training_needs_and_no_more():
    from posttrain.config.supervised import PairDataConfig, SFTDataConfig
    from posttrain.config.trainer import DataConfig

    talk = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    for look, config, right, wrong in (
        (check_prompt, DataConfig(), GOOD[0], {"question": "?"}),
        (check_row, SFTDataConfig(), GOOD[0], {"prompt": "?"}),
        (check_row, SFTDataConfig(), talk, {"messages": "hi"}),
        (check_pair, PairDataConfig(), PAIRS[0], {"prompt": "?", "chosen": "2"}),
    ):
        look(table_of_rows([right]), 0, config)
        with pytest.raises(DataError):
            look(table_of_rows([wrong]), 0, config)
