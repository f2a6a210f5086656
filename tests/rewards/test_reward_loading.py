"""Finding the user's function: paths, names, signatures; and what is said when it cannot be used."""

import subprocess
import sys
from textwrap import dedent

import pytest

from posttrain.config.rollout import CustomRewardConfig
from posttrain.rewards import RewardError, RewardItem, RewardPool, resolve_reward

SEED_1 = r"""
import re

def math_reward(completions: list[str], ground_truths: list[str]) -> list[float]:
    rewards = []
    for completion, gt in zip(completions, ground_truths):
        pred = extract_boxed_answer(completion)
        if pred is None:
            rewards.append(-0.5)
        elif pred == gt:
            rewards.append(1.0)
        else:
            rewards.append(-1.0)
    return rewards

def extract_boxed_answer(text: str) -> str | None:
    match = re.search(r'\\boxed\{(.+?)\}', text)
    return match.group(1).strip() if match else None
"""

SEED_4 = r"""
import re

def gsm8k_reward_fn(response: str, ground_truth: str) -> float:
    def extract_answer(text):
        match = re.search(r'#### (\d+)', text)
        return int(match.group(1)) if match else None
    pred = extract_answer(response)
    return 1.0 if pred is not None and pred == extract_answer(ground_truth) else 0.0
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
        return str(path)

    return write


def scores(spec, items):
    with RewardPool(spec, num_workers=1) as pool:
        for key, item in enumerate(items):
            pool.submit(key, item)
        results = pool.wait_all()
    assert [results[k].error for k in range(len(items))] == [None] * len(items)
    return [results[k].score for k in range(len(items))]


def resolve(path, **settings):
    return resolve_reward(CustomRewardConfig(path=path, **settings))


def problem(path, **settings):
    with pytest.raises(RewardError) as caught:
        resolve(path, **settings)
    assert caught.value.todo and "set in: custom_reward_function" in str(caught.value)
    return str(caught.value)


def test_compute_score_of_a_file_is_called_with_the_four_arguments(write):
    write(
        "my_reward.py",
        """
        def helper(text):
            return 0

        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            assert (data_source, solution_str, ground_truth) == ("mine", "text", ["a", 1])
            return extra_info["value"]
        """,
    )
    spec = resolve("./my_reward.py")
    assert (spec.name, spec.form) == ("compute_score", "source")
    assert scores(spec, [RewardItem("mine", "text", ["a", 1], {"value": 0.75})]) == [0.75]


def test_single_public_function_of_a_file_is_taken(write):
    write(
        "one.py",
        "import json\ndef mine(solution_str, ground_truth): return 0.5\ndef _private(response, ground_truth): ...",
    )
    assert resolve("one.py").name == "mine"


def test_file_with_neither_is_refused_with_its_candidates(write):
    write("two.py", "def first(response, ground_truth): return 0\ndef second(response, ground_truth): return 1")
    text = problem("two.py")
    assert "no compute_score" in text and "first(response, ground_truth)" in text and "second(" in text
    assert resolve("two.py", name="second").name == "second"
    write("none.py", "X = 1")
    assert "no public function" in problem("none.py")


def test_dotted_path_to_a_module_takes_its_namesake_without_init_file(write):
    write("rewards/math_reward.py", SEED_1)
    spec = resolve("rewards.math_reward")
    assert (spec.name, spec.form) == ("math_reward", "list")


def test_working_folder_wins_over_an_installed_package_of_the_same_name(write, tmp_path, monkeypatch):
    installed = tmp_path / "site"
    write("site/rewards/__init__.py", "")
    write("site/rewards/math_reward.py", "def math_reward(response, ground_truth): return 99")
    write("rewards/math_reward.py", SEED_1)
    monkeypatch.setenv("PYTHONPATH", str(installed))
    assert resolve("rewards.math_reward").form == "list"


def test_module_without_namesake_takes_its_only_fitting_function_or_lists_candidates(write):
    write("pack/__init__.py", "")
    write(
        "pack/scoring.py",
        "from .helpers import bonus\ndef pick(text): ...\ndef judge(response, ground_truth): return bonus",
    )
    write("pack/helpers.py", "bonus = 0.125")
    spec = resolve("pack.scoring")
    assert spec.name == "judge"
    assert scores(spec, [RewardItem("", "", "")]) == [0.125]
    write("pack/many.py", "def a(response, ground_truth): ...\ndef b(response, ground_truth): ...")
    text = problem("pack.many")
    assert "a(response, ground_truth)" in text and "b(response, ground_truth)" in text


def test_list_form_is_called_once_with_the_group_in_order(write):
    write("rewards/math_reward.py", SEED_1)
    responses = ["\\boxed{42}", "\\boxed{41}", "42"]
    items = [RewardItem("", text, "42", group="uid", group_size=3) for text in responses]
    assert scores(resolve("rewards/math_reward.py"), items) == [1.0, -1.0, -0.5]


def test_two_argument_form_by_dotted_path_of_the_working_folder(write):
    write("my_reward.py", SEED_4)
    spec = resolve("my_reward.gsm8k_reward_fn")
    assert (spec.name, spec.form) == ("gsm8k_reward_fn", "pair")
    texts = ["so #### 42", "so #### 41", "42"]
    assert scores(spec, [RewardItem("", text, "thus #### 42") for text in texts]) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("my_rewards.gsm8k_reward_fn", "no module 'my_rewards'"),
        ("my_reward.gsm8k_reward", "did you mean gsm8k_reward_fn?"),
        ("my_reword.py", "did you mean my_reward.py?"),
        ("folder/none.py", "does not exist"),
        ("verl.utils.reward_score.x", "posttrain-verl"),
    ],
)
def test_wrong_path_is_refused_in_time(write, path, said):
    write("my_reward.py", SEED_4)
    assert said in problem(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def compute_score(a, b): return 0", "none of the known signatures"),
        (
            "class compute_score:\n    def __init__(self, x): ...\n    def __call__(self, completions): ...",
            "a class that",
        ),
        ("def compute_score(response, ground_truth, tokenizer): return 0", "needs tokenizer"),
        ("x = 1\ndef compute_score(response ground_truth): return 0", "line 2"),
        ("import no_such_package\ndef compute_score(response, ground_truth): return 0", "install no_such_package"),
        ("x = 1\ny = x / 0\n", "bad.py, line 2"),
        ("import sys\nsys.exit(3)", "exit(3)"),
        ("import os\nos._exit(3)", "exit code 3"),
    ],
)
def test_unusable_files_are_refused_with_the_reason_and_the_place(write, text, said):
    write("bad.py", text)
    assert said in problem("bad.py")


def test_name_error_tells_file_line_and_the_missing_import(write):
    path = write("forgot.py", "def compute_score(response, ground_truth):\n    return json.loads(response)\n")
    with RewardPool(resolve("forgot.py"), num_workers=1) as pool:
        pool.submit(0, RewardItem("", "1", ""))
        error = pool.wait_all()[0].error
    assert f"{path}, line 2" in error and "add `import json`" in error


def test_resolving_imports_the_file_elsewhere_and_does_not_call_the_reward(write, tmp_path):
    write(
        "quiet.py",
        """
        import os, sys
        IMPORTED_BY = os.getpid()
        def compute_score(response, ground_truth):
            open("called", "w")
        """,
    )
    resolve("quiet.py")
    assert not (tmp_path / "called").exists()
    assert not any("quiet" in name for name in sys.modules)


def test_reward_kwargs_reach_the_function_and_unknown_ones_are_refused(write):
    write("kw.py", "def compute_score(response, ground_truth, scale): return scale * len(response)")
    spec = resolve("kw.py", reward_kwargs={"scale": 0.5})
    assert scores(spec, [RewardItem("", "four", "")]) == [2.0]
    assert "scael" in problem("kw.py", reward_kwargs={"scale": 1, "scael": 2})
    assert "ground_truth" in problem("kw.py", reward_kwargs={"scale": 1, "ground_truth": 2})


def test_settings_without_a_function_to_apply_to_are_refused():
    assert resolve_reward(CustomRewardConfig()).kind == "builtin"
    assert "reward_kwargs" in problem(None, reward_kwargs={"a": 1})
    assert "name" in problem(None, name="f")


def test_a_function_object_and_a_path_together_are_refused():
    with pytest.raises(RewardError, match="two rewards"):
        resolve_reward(CustomRewardConfig(path="my_reward.py"), function=lambda response, ground_truth: 1.0)


def test_a_function_object_travels_to_the_workers_with_what_it_captured():
    bonus = 0.25
    spec = resolve_reward(
        CustomRewardConfig(), function=lambda response, ground_truth: bonus + (response == ground_truth)
    )
    assert scores(spec, [RewardItem("", "a", "a"), RewardItem("", "a", "b")]) == [1.25, 0.25]
    with pytest.raises(RewardError, match="known signatures"):
        resolve_reward(CustomRewardConfig(), function=lambda a, b: 1.0)


def test_a_script_that_trains_at_its_top_level_is_not_run_again_by_its_workers(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        dedent("""
        from posttrain.config.rollout import CustomRewardConfig
        from posttrain.rewards import RewardItem, RewardPool, resolve_reward
        print("top")
        FACTOR = 3
        def reward(response, ground_truth):
            return FACTOR * len(response)
        with RewardPool(resolve_reward(CustomRewardConfig(), function=reward), num_workers=2) as pool:
            for key in range(4):
                pool.submit(key, RewardItem("", "x" * key, ""))
            print(sorted(result.score for result in pool.wait_all().values()))
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "top\n[0.0, 3.0, 6.0, 9.0]\n", done.stderr


def test_rewards_and_their_workers_start_without_torch_and_workers_without_http():
    code = "import sys, posttrain.rewards.worker; bad = {'http.client', 'ssl'} & {*sys.modules}; assert not bad, bad; "
    code += "import posttrain.rewards.pool, posttrain.rewards.tryout; "
    code += "bad = {'torch', 'transformers', 'hydra', 'sympy', 'pyarrow'} & set(sys.modules); assert not bad, bad"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_workers_import_the_posttrain_of_their_parent_whatever_else_the_python_path_names(tmp_path, monkeypatch):
    for name, text in {
        "posttrain/__init__.py": 'raise SystemExit("another posttrain")',
        "beside.py": "SCORE = 0.25",
        "my_reward.py": "import beside, posttrain\n\n\ndef score(response, ground_truth):\n    return beside.SCORE\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    spec = resolve_reward(CustomRewardConfig(path=str(tmp_path / "my_reward.py")))
    with RewardPool(spec, num_workers=1) as pool:
        pool.submit(0, RewardItem("", "a", "b"))
        assert pool.wait_all()[0].score == 0.25
