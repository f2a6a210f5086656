"""Mistakes that users make before a run. The list was written before the doctor was: what a user does, and the words
that somebody who is told about it must see. Nothing here knows how the doctor looks.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.doctor.desk import Desk
from tests.doctor.spoiling import (
    CHATML,
    Mistake,
    R,
    a_file_in_the_way,
    afterwards,
    another_run,
    answered,
    half_the_weights,
    no_space,
    paired,
    reward,
    rows,
    setting,
    supervised,
    talked,
    template,
    together,
    without_package,
)

MIXTURE = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip

CONFIGURATION = [
    Mistake("a misspelled key", ["train_bath_size", "train_batch_size"], setting(data__train_bath_size=8)),
    Mistake("one response per prompt under grpo", ["rollout.n", "group"], setting(R__n=1)),
    Mistake("a learning rate ten thousand times too high", ["optim.lr"], setting(A__optim__lr=0.01)),
    Mistake("a learning rate that changes nothing", ["optim.lr"], setting(A__optim__lr=1e-12)),
    Mistake("more prompts per step than rows", ["train_batch_size", "24"], setting(data__train_batch_size=256)),
    Mistake("temperature 0 in training", ["temperature"], setting(R__temperature=0)),
    Mistake("only the most likely token sampled", ["top_k"], setting(R__top_k=1)),
    Mistake("KL in the reward and in the loss", ["kl"], setting(algorithm__use_kl_in_reward=True, A__use_kl_loss=True)),
    Mistake(
        "longer rows than the model has positions",
        ["max_response_length", "position"],
        setting(data__max_response_length=100000),
    ),
    Mistake("a critic's learning rate without a critic", ["critic.optim.lr"], setting(critic__optim__lr=1e-6)),
    Mistake("eight greedy answers to each validation prompt", ["val_kwargs"], setting(R__val_kwargs__n=8)),
    Mistake("warm-up longer than the run", ["lr_warmup_steps"], setting(A__optim__lr_warmup_steps=1000)),
    Mistake(
        "validation every ten steps of nothing", ["val_files"], setting(trainer__test_freq=10, data__val_files="null")
    ),
    Mistake(
        "a KL coefficient that forbids learning", ["kl_loss_coef"], setting(A__use_kl_loss=True, A__kl_loss_coef=10)
    ),
    Mistake(
        "adapters of experts that are as large as the base",
        ["model.lora_rank", "of the base's numbers"],
        together(
            setting(M__lora_rank=32, M__target_modules="[all-linear,experts]", A__optim__lr=1e-4),
            afterwards(lambda desk: desk.edit("config.json", **MIXTURE)),
        ),
    ),
    Mistake("a response limit of one token", ["max_response_length"], setting(data__max_response_length=1)),
]

DATA = [
    Mistake("a file that is not there", ["train_files", "nowhere.json"], setting(data__train_files="nowhere.json")),
    Mistake(
        "the prompt's column has another name",
        ["prompt", "question"],
        rows(lambda i, row: {"question": row.pop("prompt"), **row}),
    ),
    Mistake(
        "a third of the rows without a truth",
        ["ground_truth", "8 of 24"],
        rows(lambda i, row: row if i % 3 else {key: row[key] for key in ("prompt", "data_source")}),
    ),
    Mistake("most prompts longer than the limit", ["max_prompt_length"], setting(data__max_prompt_length=12)),
    Mistake(
        "validation prompts among the training ones",
        ["validation", "training", "5"],
        lambda desk, patch: desk.val.extend(desk.train[:5]),
    ),
    Mistake(
        "one prompt with two reference answers",
        ["reference answer", "prompt"],
        lambda desk, patch: desk.train.extend([{**row, "ground_truth": "7"} for row in desk.train[:6]]),
    ),
    Mistake(
        "a data source that no scorer knows",
        ["math_reasonning", "data_source"],
        together(
            lambda desk, patch: setattr(desk, "reward", None),
            rows(lambda i, row: {**row, "data_source": "math_reasonning"}),
        ),
    ),
    Mistake(
        "a broken line of JSON",
        ["train.json"],
        afterwards(lambda desk: (desk.folder / "train.json").write_text('[{"prompt": "1')),
    ),
    Mistake("blank prompts", ["blank"], rows(lambda i, row: {**row, "prompt": "  "} if i < 6 else row)),
    Mistake(
        "the answer stands in the prompt as the last turn",
        ["assistant"],
        rows(
            lambda i, row: {
                **row,
                "prompt": [
                    {"role": "user", "content": row["prompt"]},
                    {"role": "assistant", "content": row["ground_truth"]},
                ],
            }
        ),
    ),
    Mistake(
        "answers that cannot fit",
        ["max_response_length", "reference answer"],
        rows(lambda i, row: {**row, "ground_truth": "9" * 40}),
    ),
    Mistake("rows with images", ["image"], rows(lambda i, row: {**row, "images": ["a.png"]})),
    Mistake("the same rows many times", ["24", "same"], lambda desk, patch: setattr(desk, "train", desk.train[:3] * 8)),
]

TEMPLATE = [
    Mistake(
        "messages, and a tokenizer without a chat template",
        ["chat template"],
        together(
            afterwards(lambda desk: (desk.model / "chat_template.jinja").unlink(missing_ok=True)),
            afterwards(lambda desk: desk.edit("tokenizer_config.json", chat_template=None)),
            rows(lambda i, row: {**row, "prompt": [{"role": "user", "content": row["prompt"]}]}),
        ),
    ),
    Mistake("no generation prompt", ["generation prompt"], template(CHATML.split("{% if")[0])),
    Mistake(
        "the turn ends with a token that the model does not end with",
        ["end"],
        template(CHATML.replace("<|im_end|>", "</turn>")),
    ),
    Mistake(
        "today's time in every prompt", ["same", "template"], template("{{ strftime_now('%H:%M:%S.%f') }} " + CHATML)
    ),
    Mistake(
        "the template rewrites earlier turns",
        ["earlier", "template"],
        together(
            supervised("sft", talked),
            template(CHATML.replace("m.content", "(m.content if loop.last else m.content.split('</think>')[-1])")),
        ),
    ),
    Mistake(
        "a system prompt that the template refuses",
        ["system"],
        together(
            setting(data__system_prompt="Be brief."),
            template(
                "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
                + CHATML
            ),
        ),
    ),
    Mistake(
        "the tokenizer of another model", ["vocab"], afterwards(lambda desk: desk.edit("config.json", vocab_size=64))
    ),
]

REWARD = [
    Mistake("a reward that is not Python", ["my_reward.py", "line"], reward("return 1.0 if (")),
    Mistake(
        "a reward that raises on every row",
        ["extra_info['answer']"],
        reward("return float(extra_info['answer'] in solution_str)"),
    ),
    Mistake("a reward that is always 0", ["reference answer", "0"], reward("return 0.0")),
    Mistake("a reward that is always 1", ["wrong", "1"], reward("return 1.0")),
    Mistake("a reward that throws dice", ["same response"], reward("return time.time_ns() % 1000 / 1000")),
    Mistake(
        "a reward slower than its deadline",
        ["reward.timeout_s"],
        together(reward("time.sleep(30)"), setting(reward__timeout_s=0.2)),
    ),
    Mistake("right and wrong exchanged", ["wrong"], reward("return 0.0 if ground_truth in solution_str else 1.0")),
    Mistake(
        "a reward that forgets to return",
        ["none"],
        reward("if solution_str.strip() == ground_truth:\n    return 1.0"),
    ),
    Mistake(
        "a reward that wants a box that nobody asks for",
        ["boxed"],
        reward("return 1.0 if '\\\\boxed{' + ground_truth + '}' in solution_str else 0.0"),
    ),
    Mistake(
        "a function that is not in the file", ["compute_reward"], setting(custom_reward_function__name="compute_reward")
    ),
]

RESOURCES = [
    Mistake("a disk too small for one checkpoint", ["disk"], no_space),
    Mistake("a logger that is not installed", ["pip install", "wandb"], without_package("wandb")),
    Mistake("cuda on a machine without it", ["cuda"], setting(trainer__device="cuda")),
    Mistake("an engine that is not there", ["sglang"], setting(R__name="sglang")),
    Mistake("a file where the outputs should go", ["outputs"], afterwards(a_file_in_the_way)),
    Mistake("weights of one layer missing", ["layers.1"], afterwards(half_the_weights)),
    Mistake(
        "more workers than cores",
        ["n_gpus_per_node", "core"],
        setting(trainer__n_gpus_per_node=512, data__train_batch_size=24),
    ),
    Mistake(
        "a name that another run has",
        ["resume_mode"],
        together(afterwards(another_run), setting(trainer__resume_mode="disable")),
    ),
    Mistake(
        "a cache that no memory holds",
        ["memory"],
        setting(A__ppo_max_token_len_per_gpu=10**10, R__n=10000, data__max_response_length=400),
    ),
]

SUPERVISED = [
    Mistake(
        "no column with responses",
        ["response"],
        supervised("sft", lambda i, row: {**answered(i, row), "response": None}),
    ),
    Mistake("rows longer than the limit", ["max_length"], supervised("sft", answered, data__max_length=12)),
    Mistake(
        "empty responses",
        ["empty"],
        supervised("sft", lambda i, row: {**answered(i, row), "response": ""} if i % 2 else answered(i, row)),
    ),
    Mistake(
        "the better answer is the worse one",
        ["same", "chosen"],
        supervised(
            "reward-model",
            lambda i, row: {**paired(i, row), "rejected": row["ground_truth"]} if i % 2 else paired(i, row),
        ),
    ),
    Mistake("a pair in both orders", ["both"], supervised("reward-model", lambda i, row: turned(i, row))),
]


def lfs_pointer(desk: Desk) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 988097824\n"
    (desk.model / "model.safetensors").write_text(text)


def templated(i: int, row: dict) -> dict:
    text = f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n"
    return {**row, "prompt": text}


FURTHER = {
    "configuration": [
        Mistake(
            "an encoder in place of a language model",
            ["bert", "language model"],
            afterwards(lambda desk: desk.edit("config.json", model_type="bert", architectures=["BertModel"])),
        ),
        Mistake("a temperature at which any token is as good as another", ["temperature"], setting(R__temperature=4)),
        Mistake(
            "adapters on modules that are not there",
            ["target_modules", "q_prj"],
            setting(M__lora_rank=8, M__target_modules="[q_prj,v_prj]"),
        ),
    ],
    "data": [
        Mistake(
            "messages written down as text",
            ["messages", "text"],
            rows(lambda i, row: {**row, "prompt": json.dumps([{"role": "user", "content": row["prompt"]}])}),
        ),
        Mistake(
            "the truth stands in the prompt",
            ["prompt", "reference answer", "24 of 24"],
            rows(lambda i, row: {**row, "prompt": f"{row['prompt']} (Answer: {row['ground_truth']})"}),
        ),
        Mistake(
            "one reference answer for all rows",
            ["same reference answer"],
            rows(lambda i, row: {**row, "ground_truth": "42"}),
        ),
    ],
    "template": [
        Mistake(
            "a system prompt that the template leaves out",
            ["system_prompt", "never sees"],
            together(
                template(CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")),
                setting(data__system_prompt="Be brief."),
            ),
        ),
        Mistake(
            "an option that the template does not know",
            ["enable_thinking", "does not use"],
            together(template(CHATML), setting(data__apply_chat_template_kwargs__enable_thinking=False)),
        ),
        Mistake(
            "prompts that went through a chat template before",
            ["template", "twice"],
            together(template(CHATML), rows(templated)),
        ),
    ],
    "reward": [
        Mistake(
            "a reward that stumbles over an empty response",
            ["empty response", "indexerror"],
            reward("return float(solution_str.split()[-1] == ground_truth)"),
        ),
    ],
    "resources": [
        Mistake(
            "weights that were never fetched from git lfs", ["git lfs", "model.safetensors"], afterwards(lfs_pointer)
        ),
        Mistake(
            "outputs where nobody may write", ["/proc/outputs"], setting(trainer__default_local_dir="/proc/outputs")
        ),
    ],
}
"""Ten of other kinds, added later; none of them was looked for when they were written down."""


TOOLS = {"R__multi_turn": True, "R__tools": "[calculator]", "R__max_turns": 2}
ROOM = {"data__max_prompt_length": 352, "data__max_response_length": 160}
"""The byte tokenizer of the desk's model has a token for each letter of the calculator's description."""


def for_tool(name: str) -> Callable[[Desk, pytest.MonkeyPatch], object]:
    given = {"tools_kwargs": {name: {"create_kwargs": {"digits": 2}}}}
    return rows(lambda i, row: {**row, "extra_info": given})


INTERACTION = """
class Again:
    def __init__(self, config): ...

    async def start_interaction(self, instance_id=None, **kwargs):
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        return True, "Right.", 1.0, {}
"""


def interaction(name: str, chosen: str) -> Callable[[Desk, pytest.MonkeyPatch], object]:
    """A file with the interaction `again` of this class, and rows that choose one."""

    def write(desk: Desk) -> None:
        (desk.folder / "again.py").write_text(INTERACTION)
        entry = f"{{name: again, class_name: '{desk.folder}/again.py:{name}'}}"
        (desk.folder / "interactions.yaml").write_text(f"interaction: [{entry}]")

    def use(desk: Desk, patch: pytest.MonkeyPatch) -> None:
        desk.settings[f"{R}.multi_turn.enable"] = True
        desk.settings[f"{R}.multi_turn.interaction_config_path"] = f"{desk.folder}/interactions.yaml"

    given = {"interaction_kwargs": {"name": chosen}}
    return together(use, afterwards(write), rows(lambda i, row: {**row, "extra_info": given}))


TOOL_MISTAKES = [
    Mistake(
        "an interaction whose class is not in the file",
        ["error, tools", "has no function 'Agian'", "did you mean Again?"],
        interaction("Agian", "again"),
    ),
    Mistake(
        "rows of a misspelt interaction",
        ["rows name the interaction agian", "did you mean again?"],
        interaction("Again", "agian"),
    ),
    Mistake(
        "a misspelt tool",
        ["error, tools", "calculater", "did you mean calculator"],
        setting(**{**TOOLS, "R__tools": "[calculater]"}, **ROOM),
    ),
    Mistake(
        "a misspelt tool in a run that calls none",
        ["error, tools", "calculater", "did you mean calculator"],
        setting(R__tools="[calculater]"),
    ),
    Mistake(
        "tools in a run that calls none",
        ["warning, tools", "no tool would be called"],
        setting(R__tools="[calculator]"),
    ),
    Mistake(
        "a format of calls that the model does not write",
        ["error, tools", "format=glm does not read", "format=hermes"],
        setting(**TOOLS, **ROOM, R__multi_turn__format="glm"),
    ),
    Mistake(
        "rows for a misspelt tool",
        ["tools_kwargs", "24 of 32 rows", "'calculatr'", "did you mean calculator"],
        together(setting(**TOOLS, **ROOM), for_tool("calculatr")),
    ),
    Mistake(
        "rows of a misspelt agent",
        ["agent_name", "tool_agnet", "did you mean tool_agent"],
        rows(lambda i, row: {**row, "agent_name": "tool_agnet"}),
    ),
    Mistake(
        "rows of the agent with tools, and no tools",
        ["agent_name", "24 of 32", "multi_turn.enable"],
        rows(lambda i, row: {**row, "agent_name": "tool_agent"}),
    ),
    Mistake(
        "more turns than a response has room for",
        ["data.max_response_length=160", "no room for 5 turns"],
        setting(**{**TOOLS, "R__max_turns": 5}, **ROOM),
    ),
    Mistake(
        "a response without room for one call",
        ["data.max_response_length=64", "a call and an answer"],
        setting(**{**TOOLS, "R__max_turns": "null"}, **{**ROOM, "data__max_response_length": 64}),
    ),
    Mistake(
        "prompts that have no room for the tools' descriptions",
        ["24 of 24 train prompts exceed data.max_prompt_length=64"],
        setting(**TOOLS, **{**ROOM, "data__max_prompt_length": 64}),
    ),
    Mistake(
        "an agent that is not in the file",
        ["error, tools", "leads"],
        together(
            lambda desk, patch: desk.settings.update({f"{R}.agent": f"{desk.folder}/agents.py:leads"}),
            afterwards(lambda desk: (desk.folder / "agents.py").write_text("async def lead(chat, row):\n    ...\n")),
        ),
    ),
]

LATER = {
    "tools": TOOL_MISTAKES,
    "configuration": [
        Mistake(
            "adapters at the learning rate of all weights",
            ["optim.lr=1e-06", "lora", "1e-5 and 1e-4"],
            setting(M__lora_rank=8, A__optim__lr=1e-6),
        ),
        Mistake("a temperature of 0.1", ["temperature=0.1", "alike", "signal"], setting(R__temperature=0.1)),
        Mistake(
            "mini-batches of one prompt", ["ppo_mini_batch_size=1", "single prompt"], setting(A__ppo_mini_batch_size=1)
        ),
    ],
    "supervised": [
        Mistake(
            "adapters in sft at the rate of all weights",
            ["optim.lr=1e-06", "lora", "about 1e-4"],
            supervised("sft", answered, model__lora_rank=8, optim__lr=1e-6),
        ),
    ],
    "reward": [
        Mistake(
            "a reward that finds the answer anywhere",
            ["lists many answers", "24 of 24 rows"],
            reward("return float(ground_truth in solution_str)"),
        ),
        Mistake(
            "a reward that the question earns",
            ["repeats the question", "24 of 24 rows"],
            together(
                reward("return float(ground_truth in solution_str)"),
                rows(lambda i, row: {**row, "prompt": f"Is {row['ground_truth']} or {i + 100} = {row['prompt']}"}),
            ),
        ),
        Mistake(
            "dice of another kind",
            ["error, reward", "the reward is random", "same response"],
            reward("return random.choice([0.0, 1.0])"),
        ),
        Mistake(
            "a reward that fails with another text on every row",
            ["error, reward", "on every row", "keyerror"],
            reward("if not solution_str:\n    return 0.0\nreturn {}[ground_truth]"),
        ),
        Mistake(
            "a reward that a step waits minutes for",
            ["256 responses", "1 worker", "num_workers"],
            together(
                reward("time.sleep(0.2)\nreturn float(solution_str.split()[-1:] == [ground_truth])"),
                setting(R__n=32),
            ),
        ),
    ],
}
"""Of further kinds, each beside a sound run that looks much like it (`sound_runs.py`)."""


def turned(i: int, row: dict) -> dict:
    """Rows 2k and 2k+1 are one question; which answer is better depends on which of them is read."""
    better, worse = ("yes", "no") if i % 2 else ("no", "yes")
    return {"prompt": f"Question {i // 2}?", "chosen": better, "rejected": worse}


ALL = {
    "configuration": CONFIGURATION,
    "data": DATA,
    "template": TEMPLATE,
    "reward": REWARD,
    "resources": RESOURCES,
    "supervised": SUPERVISED,
}
ALL = {
    area: [*ALL.get(area, []), *FURTHER.get(area, []), *LATER.get(area, [])] for area in dict.fromkeys([*ALL, *LATER])
}
