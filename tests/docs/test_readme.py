"""What the READMEs and the page of the project's layout show is what there is: code, figures, files."""

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
TEXTS = {readme: (ROOT / readme).read_text(encoding="utf-8") for readme in READMES}


def python_of(readme: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", TEXTS[readme], re.S)
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
    assert re.fullmatch(r"finished at step 2, val/unknown/mean@1 [\d.]+: outputs/embedded/grpo-1", last)
    assert 0.0 <= float(number) <= 1.0


def test_both_readmes_show_the_same_code_figures_and_pages():
    english, chinese = (TEXTS[readme] for readme in READMES)
    assert python_of(READMES[0]) == python_of(READMES[1])
    commands = [re.sub(r" +#.*", "", "".join(re.findall(r"```bash\n(.*?)```", text, re.S))) for text in TEXTS.values()]
    assert commands[0] == commands[1] and commands[0].startswith("./train.sh\n./test.sh\n")
    for pattern in (r"\*\*[\d.,]+\*\*", r"`tests/[\w/]+\.py`"):
        assert re.findall(pattern, english) == re.findall(pattern, chinese) != []
    pages = [
        {page.replace("docs/zh/", "docs/") for page in re.findall(r"\((docs/[\w/]+\.md)", text)}
        for text in (english, chinese)
    ]
    assert pages[0] == pages[1]


def test_the_readme_is_short_and_begins_with_the_two_commands():
    text = TEXTS["README.md"]
    assert len(text.split()) < 900
    assert text.index("```bash\n./train.sh") < text.index("\n## ")


@pytest.mark.parametrize("readme", READMES)
def test_every_figure_stands_on_the_page_that_it_links_to(readme):
    """Of the reasons and of the speed tables; a figure that is measured again changes in both places."""
    lines = re.findall(r"^(?:\d\. .+(?:\n   .+)*|\| \[.+\*\*.+)$", TEXTS[readme], re.M)
    seen = 0
    for line in lines:
        pages = [(ROOT / page).read_text(encoding="utf-8") for page in re.findall(r"\((docs/[\w/]+\.md)", line)]
        plain = re.sub(r"\(docs/[^)]*\)|^\d\. ", "", line)
        for figure in re.findall(r"(?<![\w.,])\d[\d,]*\.\d+|(?<![\w.,])\d{1,3}(?:,\d{3})+|\d+%", plain):
            number = figure.replace(",", ",?")
            assert any(re.search(rf"(?<![\d.,]){number}0?(?!\d)", page) for page in pages), (line, figure)
            seen += 1
    assert seen > 20


def test_the_number_of_verls_keys_is_that_of_their_page():
    table = (ROOT / "docs" / "verl_keys.md").read_text(encoding="utf-8")
    [total] = re.findall(r"^\| together \|.*\| (\d+) \|$", table, re.M)
    assert all(f"{int(total):,}" in text for text in TEXTS.values())


@pytest.mark.parametrize("readme", READMES)
def test_the_tests_that_show_a_promise_are_there(readme):
    named = re.findall(r"`(tests/[\w/]+\.py)`", TEXTS[readme])
    assert len(named) >= 9 and [test for test in named if not (ROOT / test).is_file()] == []


def rewards_shown() -> dict[str, str]:
    """The pages' own rewards of an answer, as they are printed."""
    found = {readme: re.findall(r"(from .*?)\n\n\nrows", python_of(readme), re.S) for readme in READMES}
    page = (ROOT / "docs" / "rewards.md").read_text()
    found["docs/rewards.md"] = re.findall(r"```python\n# my_reward\.py\n(.*?)```", page, re.S)
    assert all(len(codes) == 1 for codes in found.values())
    return {page: codes[0] for page, codes in found.items()}


@pytest.mark.parametrize("page", [*READMES, "docs/rewards.md"])
def test_the_reward_that_a_page_shows_pays_the_right_answer_and_no_list_of_guesses(page):
    names: dict = {}
    exec(rewards_shown()[page], names)
    score = names.get("compute_score") or names["my_reward"]

    def right(response: str) -> float:
        result = score("math_reasoning", response, "42")
        return float(result["acc"] if isinstance(result, dict) else result)

    for response in ("42", "15 + 27 = 42", "The answer is 42.", "答案是42", "6 * 7 = \\boxed{42}"):
        assert right(response) == 1.0, response
    guesses = " ".join(str(number) for number in range(100))
    for response in ("", "no idea", "142", "420", "4.2", guesses, "42 or 43", "42, 43, 44"):
        assert right(response) == 0.0, response


def test_what_can_be_imported_lazily_is_found():
    assert {"train", "DataProto", "__version__"} <= set(dir(posttrain))


def test_the_tree_names_what_is_there_and_every_room():
    """Of docs/project_layout.md: every package and module, and nothing that is gone."""
    text = (ROOT / "docs" / "project_layout.md").read_text(encoding="utf-8")
    tree = text.partition("\nposttrain/\n")[2].partition("\n```")[0]
    packages = {path.parent.name for path in (ROOT / "posttrain").glob("*/__init__.py")}
    assert set(re.findall(r"^  (\w+)/ ", tree, re.M)) == packages
    files = set(re.findall(r"(?<![\w/])(\w+\.py)\b", text))
    modules = {path.name for path in (ROOT / "posttrain").glob("*.py")} - {"__init__.py"}
    assert modules - files == set()
    missing = [file for file in files if not [*(ROOT / "posttrain").rglob(file), *ROOT.glob(file)]]
    assert missing == []
