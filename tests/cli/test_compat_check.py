"""`posttrain compat check`: scripts are read as a shell would read them, and each key gets its answer."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.config import load_config
from posttrain.errors import UserError
from posttrain.other_systems.verl_script import command
from posttrain.other_systems.verl_script.command import quote_word
from posttrain.other_systems.verl_script.program import find_calls
from posttrain.other_systems.verl_script.shell import Script

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "scripts" / "verl_scripts").glob("*.sh"))
START = "python3 -m verl.trainer.main_ppo"


def settings(text: str) -> list[str]:
    return find_calls(Script(text))[0].settings


READING = {
    "continuation lines": (f"{START} \\\n  a.b=1 \\\n  c.d=2\necho done", ["a.b=1", "c.d=2"]),
    "quotes": (
        f"{START} a='x y' b=\"p q\" c=['u','v'] d='[\"u\",\"v\"]'",
        ["a=x y", "b=p q", "c=[u,v]", 'd=["u","v"]'],
    ),
    "variables": (f'N=3\nM="$N-${{N}}"\n{START} a=$M b="${{N}}x"', ["a=3-3", "b=3x"]),
    "defaults": (f"M=${{M:-Qwen/Q}}\n{START} a=$M b=${{K:-$M}} c=${{M:+set}}", ["a=Qwen/Q", "b=Qwen/Q", "c=set"]),
    "quoted defaults": (
        'P=${P:-"-m verl.trainer.main_ppo"}\nS=${S:-\'["model","extra"]\'}\nM=${M:-"$H/q w"}\nH=${H:-$HOME}\n'
        'python3 ${P} a=$S b="$M" c=${C:-"it\'s"}',
        ['a=["model","extra"]', "b=$H/q w", "c=it's"],
    ),
    "positional defaults": (f"n=${{1:-8}}\n{START} a=$n $@", ["a=8"]),
    "arithmetic": (f"p=$((1024 * 2))\nr=1024\n{START} a=$(((p + r) / 3)) b=$((p - -1))", ["a=1024", "b=2049"]),
    "arrays": (
        f'A=(\n x.y=1 # why\n\n z.w="a b"\n)\nA+=(v=2)\n{START} "${{A[@]}}" u=3',
        ["x.y=1", "z.w=a b", "v=2", "u=3"],
    ),
    "an array as a text": (
        f'A=(x.y=1 z=2)\nexport T="${{A[@]}}"\n{START} $T v="${{A[@]}}"',
        ["x.y=1", "z=2", "v=x.y=1", "z=2"],
    ),
    "text of several words": (f'ARGS="a.b=1 c.d=2"\n{START} $ARGS e="$ARGS"', ["a.b=1", "c.d=2", "e=a.b=1 c.d=2"]),
    "comments": (f"# {START} a=1\n{START} b=2 # c=3", ["b=2"]),
    "pipes and streams": (f"{START} a=1 2>&1 | tee log.txt", ["a=1"]),
    "files": (f"{START} a=1 > log.txt 2> err.txt &", ["a=1"]),
    "a text to the end of a mark": (f"cat > f <<EOF\n{START} a=1\nEOF\n{START} b=2", ["b=2"]),
    "the first branch": (f"if [ $X = 1 ]; then\n n=4\nelse\n n=8\nfi\n{START} a=$n", ["a=4"]),
    "a device that is asked for": (
        "D=${D:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}\nA=()\n"
        'case "$D" in\n  gpu | cpu) n=4 ;;\n  npu)\n    n=8\n    A+=(x=1)\n    ;;\nesac\n'
        f'{START} a=$n "${{A[@]}}"',
        ["a=4"],
    ),
    "a branch within a branch": (
        'M=${M:-}\nA=(y=0)\ncase gpu in\n  gpu)\n    case "$M" in\n      b200) n=1; A+=(x=1) ;;\n      *) n=2 ;;\n'
        f'    esac\n    m=$n\n    ;;\n  *) m=9 ;;\nesac\n{START} a=$m "${{A[@]}}"',
        ["a=2", "y=0"],
    ),
    "conditions": (
        'E=vllm\nn=8\nif [ "${U:-1}" != 0 ] && { [ "$E" = sglang ] || [ "$E" = vllm ]; }; then\n  a=1\n'
        "else\n  a=2\nfi\n"
        'if [[ -z "$E" || $n -lt 8 ]]; then b=1; elif [ $n -ge 8 ]; then b=2; else b=3; fi\n'
        f'if ! [ -n "$E" ]; then\n  c=1\nfi\n{START} a=$a b=$b c=${{c:-0}}',
        ["a=1", "b=2", "c=0"],
    ),
    "a job of Ray": (f"ray job submit --no-wait --runtime-env=e.yaml -- {START} a=1", ["a=1"]),
    "an interpreter's own arguments": (f"CUDA_VISIBLE_DEVICES=0 nsys profile -o x {START} a=1", ["a=1"]),
    "what the shell gives stays": (f"{START} a=$HOME/x b=run_$(date +%s)", ["a=$HOME/x", "b=run_$(date +%s)"]),
    "added and removed keys": (f"{START} +a.b=1 ++c.d=2 ~e.f", ["+a.b=1", "++c.d=2", "~e.f"]),
    "exported": (f"export N=3 M=4\n{START} a=$N$M", ["a=34"]),
    "no further arguments": (f'A=()\n{START} a=1 "$@" "${{A[@]}}" ${{B[@]}}', ["a=1"]),
    "a path to the program": ("python3 verl/trainer/main_ppo.py a=1", ["a=1"]),
}


@pytest.mark.parametrize(("text", "expected"), list(READING.values()), ids=list(READING))
def test_a_script_is_read_as_a_shell_would(text, expected):
    assert settings(text) == expected


ORACLE = ["no further arguments", "a device that is asked for", "a branch within a branch", "conditions"]


@pytest.mark.parametrize("name", ["quotes", "arrays", "text of several words", "arithmetic", "variables", *ORACLE])
def test_bash_reads_the_same(name):
    """The oracle: bash itself, with the program replaced by one that prints its arguments."""
    text, expected = READING[name]
    show = f"{shlex.quote(sys.executable)} -c 'import sys; print(chr(10).join(sys.argv[1:]))'"
    done = subprocess.run(["bash", "-c", text.replace(START, show)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == expected


def test_nothing_of_the_script_is_run(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(f"touch {tmp_path}/ran\nX=$(touch {tmp_path}/ran)\n{START} a=`touch {tmp_path}/ran`\n")
    command.main(["check", str(script)])
    assert not (tmp_path / "ran").exists()


CUT = {
    "a comment after it": "  trainer.seed=1 \\ # twice\n  trainer.total_epochs=2 \\\n  data.train_batch_size=8\n",
    "a comment line": "  trainer.seed=1 \\\n  # how long\n  trainer.total_epochs=2 \\\n  data.train_batch_size=8\n",
    "an empty line": "  trainer.seed=1 \\\n\n  trainer.total_epochs=2 \\\n  data.train_batch_size=8\n",
    "no backslash": "  trainer.seed=1\n  trainer.total_epochs=2 \\\n  data.train_batch_size=8\n",
}


@pytest.mark.parametrize("program", [START, "python3 -m recipe.dapo.main_dapo", "python3 verl/trainer/main_ppo.py"])
@pytest.mark.parametrize("rest", list(CUT.values()), ids=list(CUT))
def test_a_command_that_is_cut_short_is_found_as_when_it_runs(rest, program, tmp_path, capsys):
    script = tmp_path / "run.sh"
    script.write_text(f"{program} \\\n  algorithm.adv_estimator=grpo \\\n{rest}echo done\n")
    assert command.main(["check", str(script)]) == 1
    said = capsys.readouterr().out
    assert "This command was cut short: 2 lines" in said and "`trainer.total_epochs=2`" in said


def test_a_whole_command_is_not_taken_for_one_that_is_cut_short(tmp_path, capsys):
    script = tmp_path / "run.sh"
    keys = "algorithm.adv_estimator=grpo \\\n  trainer.total_epochs=2"
    script.write_text(
        f'# {START} is started\n{START} \\\n  {keys} "$@" $EXTRA\n\n# and later\nexport A=1\n{START} {keys}\n'
    )
    assert command.main(["check", str(script)]) == 0
    assert "cut short" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "named",
    [
        "--config-name=ppo_megatron_trainer",
        "--config-name ppo_megatron_trainer.yaml",
        "--config-path=./config --config-name='ppo_megatron_trainer.yaml'",
        "-cp config -cn ppo_megatron_trainer",
    ],
)
def test_verls_main_file_for_megatron_is_read_as_megatron(named, tmp_path, capsys):
    script = tmp_path / "run.sh"
    cut = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
    script.write_text(f"{START} {named} algorithm.adv_estimator=grpo {cut} trainer.n_gpus_per_node=2\n")
    out = tmp_path / "here.sh"
    assert command.main(["check", str(script), "--write", str(out)]) == 0
    said = capsys.readouterr().out
    assert "not read" not in said and "no effect" not in said
    assert "actor_rollout_ref.actor.strategy=megatron" in out.read_text()
    assert command.main(["check", str(script), "actor_rollout_ref.actor.strategy=fsdp"]) == 0
    assert "actor_rollout_ref.actor.strategy=megatron" not in capsys.readouterr().out


MINE = """
hydra: {searchpath: [file://verl/trainer/config]}
defaults: [ppo_trainer, {override model_engine: megatron}, _self_]
data: {train_batch_size: 64, return_raw_chat: true}
actor_rollout_ref: {rollout: {n: 8, multi_turn: {max_assistant_turns: 3}}}
"""


@pytest.mark.parametrize("path", ["$(pwd)/project/conf", "$PROJECT/conf", "conf", "./conf"])
def test_a_main_file_of_the_users_own_is_read_as_settings_that_the_command_overrides(path, tmp_path, capsys):
    script, out = tmp_path / "project" / "jobs" / "run.sh", tmp_path / "here.sh"
    for folder in (script.parent, tmp_path / "project" / "conf"):
        folder.mkdir(parents=True)
    (tmp_path / "project" / "conf" / "mine.yaml").write_text(MINE)
    own = "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4"
    script.write_text(f'PROJECT="$(pwd)/project"\n{START} --config-path="{path}" --config-name=mine {own}\n')
    command.main(["check", str(script), "--write", str(out)])
    said, written = capsys.readouterr().out, out.read_text()
    assert f"read: {tmp_path / 'project' / 'conf' / 'mine.yaml'}" in said
    assert "data.return_raw_chat=true\n      batches always hold the messages" in said
    assert "data.train_batch_size=64" in written and "multi_turn.max_assistant_turns=3" in written
    assert "model_engine=megatron" in written and "rollout.n=4" in written and "rollout.n=8" not in written


@pytest.mark.parametrize(("text", "says"), [("a: [1", "mine.yaml cannot be read"), ("- a", "it holds no keys")])
def test_a_main_file_that_cannot_be_read_is_named(text, says, tmp_path):
    (tmp_path / "mine.yaml").write_text(text)
    script = tmp_path / "run.sh"
    script.write_text(f"{START} --config-name=mine algorithm.adv_estimator=grpo\n")
    with pytest.raises(UserError, match=says):
        command.main(["check", str(script)])


def test_a_main_file_of_the_users_own_that_is_not_found_is_named(tmp_path, capsys):
    script = tmp_path / "run.sh"
    script.write_text(f"{START} --config-path=conf --config-name=mine algorithm.adv_estimator=grpo\n")
    command.main(["check", str(script)])
    assert "not read: the main file conf/mine.yaml" in capsys.readouterr().out


def test_a_file_below_a_folder_from_outside_is_not_missed(tmp_path, capsys):
    script = tmp_path / "run.sh"
    start = f"{START} algorithm.adv_estimator=grpo data.custom_cls.name=Rows"
    script.write_text(f"HERE=$(pwd)\n{start} data.custom_cls.path=$HERE/rows.py\n")
    assert command.main(["check", str(script)]) == 0
    script.write_text(f"{start} data.custom_cls.path=rows.py\n")
    assert command.main(["check", str(script)]) == 1
    assert "rows.py does not exist" in capsys.readouterr().out


def test_megatrons_settings_of_supervised_training_are_answered_one_by_one(tmp_path, capsys):
    script = tmp_path / "run.sh"
    taken = "engine=megatron optim=megatron engine.tensor_model_parallel_size=2 engine.expert_tensor_parallel_size=1"
    noted = "engine.use_mbridge=True +engine.override_transformer_config.recompute_granularity=full"
    start = "torchrun --nproc_per_node=4 -m verl.trainer.sft_trainer"
    script.write_text(f"{start} {taken} {noted} model.path=m data.train_files=a.parquet data.val_files=a.parquet\n")
    assert command.main(["check", str(script)]) == 0
    assert "model.enable_gradient_checkpointing says whether layers are computed again" in capsys.readouterr().out
    assert command.main(["check", str(script), "+engine.override_transformer_config.hidden_dropout=0.1"]) == 1
    assert "the engine computes without dropout" in capsys.readouterr().out


def test_variables_that_the_script_does_not_set_are_named_and_nothing_is_refused_for_them(tmp_path, capsys):
    script, out = tmp_path / "run.sh", tmp_path / "here.sh"
    keys = "trainer.nnodes=$WORLD_SIZE trainer.n_gpus_per_node=${GPUS:?how many} data.train_batch_size=$((GPUS * 8))"
    engine = "actor_rollout_ref.rollout.name=$ENGINE actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    script.write_text(f"{START} {keys} {engine} trainer.experiment_name=$RUN data.train_files=$HOME/x.parquet\n")
    assert command.main(["check", str(script), "--write", str(out)]) == 0
    said = capsys.readouterr().out
    assert "set before it is run: $WORLD_SIZE (trainer.nnodes, 1 is assumed here)" in said
    assert "set before it is run: $GPUS (trainer.n_gpus_per_node, 8 is assumed here)" in said
    assert "set before it is run: $RUN (trainer.experiment_name)" in said and "$HOME" not in said.split("honoured")[-1]
    assert 'trainer.nnodes=$WORLD_SIZE"' in out.read_text()
    folder = '$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)'
    script.write_text(f"ROOT={folder}\n{START} custom_reward_function.path=$ROOT/r.py trainer.n_gpus_per_node=$1\n")
    assert command.main(["check", str(script)]) == 0
    assert "set before it is run: $1 (trainer.n_gpus_per_node, 8 is assumed here)" in capsys.readouterr().out
    script.write_text(f"{START} trainer.nnodes=$WORLD_SIZE algorithm.lam=$LAM trainer.nodes=$WORLD_SIZE\n")
    assert command.main(["check", str(script)]) == 1
    assert "did you mean `trainer.nnodes`" in capsys.readouterr().out


def test_torchruns_counts_become_settings():
    call = find_calls(Script("torchrun --nnodes=2 --nproc-per-node 4 -m verl.trainer.sft_trainer optim.lr=1e-5"))[0]
    assert call.program == "sft" and call.launched == {"trainer.nnodes": "2", "trainer.n_gpus_per_node": "4"}


def test_a_program_of_ours_is_no_recipes(tmp_path, capsys):
    for start, said in (("posttrain.trainer.main_ppo", False), ("recipe.dapo.main_dapo", True)):
        (tmp_path / "run.sh").write_text(f"python3 -m {start} data.train_files=a.parquet trainer.nnodes=1\n")
        command.main(["check", str(tmp_path / "run.sh")])
        assert ("is a program of its own" in capsys.readouterr().out) == said


def test_a_script_without_verl_says_what_was_looked_for(tmp_path):
    (tmp_path / "run.sh").write_text("echo hello\n")
    with pytest.raises(UserError, match="starts no program of verl"):
        command.main(["check", str(tmp_path / "run.sh")])


def test_a_file_that_is_none_is_told_in_plain_words(tmp_path):
    (tmp_path / "run.bin").write_bytes(b"\xff\xfe\x00")
    for name, says in (("none.sh", "There is no file"), (".", "is a folder"), ("run.bin", "is no text")):
        with pytest.raises(UserError, match=says) as told:
            command.main(["check", str(tmp_path / name)])
        assert "Errno" not in str(told.value) and "codec" not in str(told.value)


def test_each_key_is_told_with_its_answer_and_the_status_says_whether_all_are_taken(tmp_path, capsys, monkeypatch):
    script = tmp_path / "run.sh"
    monkeypatch.setattr("posttrain.other_systems.verl_script.command.is_installed", lambda package: False)
    keys = "algorithm.adv_estimator=grpo trainer.balance_batch=True trainer.max_actor_ckpt_to_keep=3"
    script.write_text(f"{START} {keys} actor_rollout_ref.rollout.name=vllm\n")
    assert command.main(["check", str(script), "--all"]) == 0
    said = capsys.readouterr().out
    assert "1 honoured, 1 translated, 1 not needed, 1 not supported" in said
    assert "added for the command here: data.max_response_length=512" in said
    assert "vLLM is not installed here" in said and "actor_rollout_ref.rollout.name=native" in said
    monkeypatch.setattr("posttrain.other_systems.verl_script.command.is_installed", lambda package: True)
    assert command.main(["check", str(script), "--all"]) == 0
    said = capsys.readouterr().out
    assert "2 honoured, 1 translated, 1 not needed, 0 not supported" in said and "name=native" not in said
    script.write_text(f"{START} {keys} algorithm.use_pf_ppo=True trainer.balanc_batch=True\n")
    assert command.main(["check", str(script)]) == 1
    said = capsys.readouterr().out
    assert "PF-PPO's reweighting of samples is not built" in said and "did you mean `trainer.balance_batch`" in said
    script.write_text(f"{START} {keys} trainer.total_epochs=many\n")
    assert command.main(["check", str(script)]) == 1 and "expected an integer, got 'many'" in capsys.readouterr().out


NOT_BY_POSTTRAIN_ALONE = {
    "batch_reward": "`batch` and managers of your own",
    "own_algorithm": "a key added for an algorithm of your own",
}
"""Scripts with keys that the command for posttrain leaves out -> the reason that is told."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_key_of_a_script_such_as_verl_ships_is_taken_or_has_a_reason(script, capsys):
    small = ["trainer.n_gpus_per_node=8", "trainer.nnodes=1"]
    reason = NOT_BY_POSTTRAIN_ALONE.get(script.stem, "")
    status = command.main(["check", str(script), *small])
    said = capsys.readouterr().out
    assert status == (1 if reason else 0) and reason in said, said
    assert "unknown" not in said


def test_the_written_command_means_what_the_script_means(tmp_path):
    out = tmp_path / "here.sh"
    command.main(["check", str(ROOT / "scripts" / "verl_scripts" / "gspo.sh"), "--write", str(out)])
    show = f"{shlex.quote(sys.executable)} -c 'import sys; print(chr(10).join(sys.argv[1:]))'"
    text = out.read_text().replace("python3 -m posttrain.trainer.main_ppo", show)
    words = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout.splitlines()
    resolved = load_config(words)
    assert resolved.value("actor_rollout_ref.actor.policy_loss.loss_mode") == "gspo"
    assert resolved.value("actor_rollout_ref.actor.clip_ratio_high") == 4e-4
    assert resolved.value("actor_rollout_ref.actor.ppo_max_token_len_per_gpu") == 3072
    assert resolved.value("actor_rollout_ref.rollout.name") == "native"
    assert resolved.value("trainer.max_ckpt_to_keep") == 2 and "$" not in resolved.value("data.train_files")


@pytest.mark.parametrize("text", ["a=b", "a=x y", "a=['u','v']", 'a=["u"]', "a=it's", "a=b\\c"])
def test_a_word_survives_being_quoted(text):
    assert shlex.split(quote_word(text)) == [text]


def test_a_word_with_a_variable_is_still_expanded():
    word = quote_word('a=$N/it is "so"')
    done = subprocess.run(["bash", "-c", "N=7; printf %s " + word], capture_output=True, text=True, check=True)
    assert done.stdout == 'a=7/it is "so"'
