"""What the README shows is what runs."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

import posttrain
from posttrain.data.recipes.arithmetic import arithmetic_rows, write_files
from posttrain.models.embedded import write_model
from posttrain.trainer.embedded import embedded_folder

ROOT = Path(__file__).resolve().parents[2]
READMES = ("README.md", "README.zh.md")


def python_of(readme: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / readme).read_text(), re.S)
    assert len(blocks) == 1
    return blocks[0]


def test_the_python_snippet_runs_as_printed(tmp_path, own_cache, forked):
    """With a tiny model in the embedded one's place and 2 steps in place of 20; nothing else is changed."""
    folder = embedded_folder()
    write_files(folder, arithmetic_rows(max_operand=10))
    write_model(folder / "model", hidden_size=32, intermediate_size=64)
    code = python_of("README.md")
    assert code.count('"trainer.total_training_steps": 20}') == 1
    (tmp_path / "snippet.py").write_text(code.replace('steps": 20}', 'steps": 2, "data.train_batch_size": 20}'))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([forked.python, "snippet.py"], cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    last, number = done.stdout.splitlines()[-2:]
    assert re.fullmatch(r"finished at step 2, val/math_reasoning/mean@1 [\d.]+: outputs/embedded/grpo-1", last)
    assert 0.0 <= float(number) <= 1.0


def test_both_readmes_show_the_same_code():
    assert python_of(READMES[0]) == python_of(READMES[1])


def rewards_shown() -> dict[str, str]:
    """The pages' own rewards of an answer, as they are printed."""
    found = {
        readme: re.findall(r"my_reward\.py <<'EOF'\n(.*?)\nEOF", (ROOT / readme).read_text(), re.S)
        for readme in READMES
    }
    page = (ROOT / "docs" / "rewards.md").read_text()
    found["docs/rewards.md"] = re.findall(r"```python\n# my_reward\.py\n(.*?)```", page, re.S)
    assert all(len(codes) == 1 for codes in found.values())
    return {page: codes[0] for page, codes in found.items()}


@pytest.mark.parametrize("page", [*READMES, "docs/rewards.md"])
def test_the_reward_that_a_page_shows_pays_the_right_answer_and_no_list_of_guesses(page):
    names: dict = {}
    exec(rewards_shown()[page], names)

    def right(response: str) -> float:
        result = names["compute_score"]("math_reasoning", response, "42")
        return float(result["acc"] if isinstance(result, dict) else result)

    for response in ("42", "15 + 27 = 42", "The answer is 42.", "答案是42", "6 * 7 = \\boxed{42}"):
        assert right(response) == 1.0, response
    guesses = " ".join(str(number) for number in range(100))
    for response in ("", "no idea", "142", "420", "4.2", guesses, "42 or 43", "42, 43, 44"):
        assert right(response) == 0.0, response


def test_what_can_be_imported_lazily_is_found():
    assert {"train", "DataProto", "__version__"} <= set(dir(posttrain))


@pytest.mark.parametrize("readme", READMES)
def test_the_tree_names_what_is_there_and_every_room(readme):
    text = (ROOT / readme).read_text()
    tree = text.partition("\nposttrain/\n")[2].partition("\ntests/")[0]
    rooms = {path.parent.name for path in (ROOT / "posttrain").glob("*/__init__.py")} - {"utils"}
    named = set(re.findall(r"^  (\w+)/ ", tree, re.M))
    assert named == rooms
    files = re.findall(r"(?<![\w/])(\w+\.py)\b", tree)
    missing = [file for file in files if not list((ROOT / "posttrain").rglob(file))]
    assert missing == [] and {"cli.py", "launch.py", "api.py", "pulse.py"} <= set(files)
