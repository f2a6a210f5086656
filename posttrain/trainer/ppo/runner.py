"""From a resolved configuration to a finished run: directory, data, reward workers, trainer, and tidy ends."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from posttrain.config.resolved import Resolved
from posttrain.config.rollout import RewardModelConfig
from posttrain.config.root import PPOConfig
from posttrain.config.trainer import HELD_OUT, DataConfig
from posttrain.controller.pool import Workers
from posttrain.conversations.loop import ConversationLoop
from posttrain.conversations.machines import has_workers, spread_conversations
from posttrain.conversations.opening import check_rows, open_conversations
from posttrain.conversations.settings import agent_settings
from posttrain.data.dataset import PromptDataset, describe_held_out, hold_out
from posttrain.data.own_dataset import open_own_rows
from posttrain.data.rows import read_table
from posttrain.machines.cluster import other_machines
from posttrain.models.loading import load_tokenizer
from posttrain.rewards.crew import WorkerProcess
from posttrain.rewards.loading import check_columns, resolve_reward
from posttrain.rewards.pool import RewardPool
from posttrain.rewards.scorers import check_sources
from posttrain.rewards.scorers.code import code_settings
from posttrain.rewards.types import RewardError, RewardList, RewardSpec
from posttrain.rollout.engines import check_engine_name
from posttrain.tracking.progress import say
from posttrain.tracking.rundir import RunDirectory
from posttrain.trainer.embedded import fill_embedded
from posttrain.trainer.ppo.own_roles import pools_of_roles
from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer
from posttrain.trainer.ppo.reward import RewardManager, make_reward_pool
from posttrain.trainer.run.process import (
    driven_by_one_machine,
    find_run_device,
    keep_machine_logs,
    keep_worker_logs,
    load_external,
    open_workers,
    opened_attempt,
    opened_run,
    prepare_torch,
)
from posttrain.trainer.run.recovery import run_with_restarts
from posttrain.trainer.run.result import RunResult
from posttrain.workers.weight_transport import check_transport

Rows = Sequence[dict[str, Any]]


@driven_by_one_machine
def run_training(
    resolved: Resolved,
    *,
    reward: Callable[..., Any] | RewardList | None = None,
    data: Rows | None = None,
    val_data: Rows | None = None,
) -> RunResult:
    """One whole run. `reward`, `data` and `val_data` stand in for files when called from Python."""

    def attempt(stack: ExitStack, config: PPOConfig, run: RunDirectory) -> RunResult:
        return _open_trainer(stack, config, run, resolved, reward, data, val_data).fit()

    return run_with_restarts(resolved, attempt)


@contextmanager
def opened_training(
    resolved: Resolved,
    *,
    reward: Callable[..., Any] | RewardList | None = None,
    data: Rows | None = None,
    val_data: Rows | None = None,
    trainer_class: type[RayPPOTrainer] | None = None,
) -> Iterator[RayPPOTrainer]:
    """The trainer of a run, with everything around it; what was opened for it is closed behind it. A caller that has
    its own loop ends when a worker is lost; `run_training` goes on."""
    with opened_run(resolved) as run, opened_attempt(resolved, run) as (stack, config):
        yield _open_trainer(stack, config, run, resolved, reward, data, val_data, trainer_class)


def _open_trainer(
    stack: ExitStack,
    config: PPOConfig,
    run: RunDirectory,
    resolved: Resolved,
    reward: Any,
    data: Rows | None,
    val_data: Rows | None,
    trainer_class: type[RayPPOTrainer] | None = None,
) -> RayPPOTrainer:
    stored = copy.deepcopy(config)  # for config.yaml: the settings as given, which a resumed run is compared with
    external = config.actor_rollout_ref.model.external_lib
    load_external(external)
    check_engine_name(config.actor_rollout_ref.rollout.name)
    check_transport(config)
    spec, first_worker = _load_reward(stack, config, reward)
    device = find_run_device(config.trainer)
    prepare_torch(config.trainer, device)
    fill_embedded([config.actor_rollout_ref.model, config.critic.model], config.data, given=data is not None)
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    turns = stack.enter_context(open_conversations(config, tokenizer, device, say))
    train, val = _open_data(config, resolved.explicit, tokenizer, turns, data, val_data)
    rewards = _open_rewards(stack, config, spec, first_worker, tokenizer, turns, train, val)
    kind = trainer_class or RayPPOTrainer
    own = pools_of_roles(kind.own_roles, kind.__name__)
    workers = stack.enter_context(open_workers(config, device, external, run.logs, run.machines, own))
    stack.callback(keep_worker_logs, workers, run.logs)
    spread_work(stack, config, rewards.pool, turns, workers, run.logs, say)
    return kind(
        config,
        tokenizer=tokenizer,
        run=run,
        train_dataset=train,
        val_dataset=val,
        reward_fn=rewards,
        device=device,
        explicit=resolved.explicit,
        stored_config=stored,
        workers=workers,
        turns=turns,
    )


def _load_reward(stack: ExitStack, config: PPOConfig, function: Any) -> tuple[RewardSpec, list[WorkerProcess]]:
    """The reward function, and the process that loaded and inspected it (empty where none was needed)."""
    # That process becomes the first reward worker: importing a user's file twice would cost its time twice, and run
    # its side effects twice. Whoever takes it out of the list owns it; what is left there is ended with the run.
    loaded_by: list[WorkerProcess] = []
    stack.callback(lambda: [worker.kill() for worker in loaded_by])
    spec = resolve_reward(
        config.custom_reward_function,
        functions=config.reward.functions,
        function=function,
        spec_fields={"code": code_settings(config.reward), "timeout_s": config.reward.timeout_s},
        kept=loaded_by,
    )
    return spec, loaded_by


def _open_data(
    config: PPOConfig, explicit: set[str], tokenizer: Any, turns: ConversationLoop | None, data: Any, val_data: Any
) -> tuple[PromptDataset, PromptDataset | None]:
    """The prompts to train on and those of validation, checked for what the run needs of them."""
    tools = turns.schemas if turns else ()
    trained, held_out = _rows(config.data, explicit, *open_own_rows(config.data, tokenizer, data, val_data))
    train = PromptDataset(trained, tokenizer, config.data, tools=tools)
    val = None if held_out is None else PromptDataset(held_out, tokenizer, config.data, split="val", tools=tools)
    check_rows(turns, [item["extra_info"] for rows in (train, val) if rows for item in rows])
    if settings := _settings_that_keep_rows(config):
        train.check_savable(settings)
    for note in dict.fromkeys([*train.notes, *(val.notes if val else [])]):
        say(f"note: {note}")
    return train, val


def _open_rewards(
    stack: ExitStack,
    config: PPOConfig,
    spec: RewardSpec,
    first_worker: list[WorkerProcess],
    tokenizer: Any,
    turns: ConversationLoop | None,
    train: PromptDataset,
    val: PromptDataset | None,
) -> RewardManager:
    """Scores by the reward function; without a pool of workers where only a reward model or agents give rewards."""
    splits = [rows for rows in (train, val) if rows]
    if spec.columns:
        check_columns(spec, set().union(*(rows.columns for rows in splits)))
    sources = {source or config.data.data_source for rows in splits for source in rows.data_sources}
    has_agents = bool(turns and turns.has_agents)
    named, pool = spec.kind != "builtin", None
    others = config.reward_model.enable or has_agents  # what may give rewards beside the function
    if named or not others or _can_judge(config.reward_model, sources, train, val):
        first = first_worker.pop() if first_worker else None
        pool = stack.enter_context(make_reward_pool(spec, config.reward, sources, say, first=first))
        if spec.kind == "combined":
            say(f"Reward: {spec.label}")
    elif has_agents:
        say("note: there is no reward function for these rows: the agent's own rewards are the only ones.")
    return RewardManager(
        pool,
        tokenizer,
        default_source=config.data.data_source,
        named=named,
        prompts_are_texts=all(rows.prompts_are_texts for rows in (train, val) if rows is not None),
    )


def _rows(settings: DataConfig, explicit: set[str], data: Any, val_data: Any) -> tuple[Any, Any]:
    """(training data, validation data or None): paths, rows, or the two parts of a table of which some are held out."""
    train = data if data is not None else settings.train_files
    if val_data is not None or settings.val_files != HELD_OUT:
        return train, val_data if val_data is not None else settings.val_files
    table = read_table(train, limit=settings.train_max_samples)
    batch = settings.train_batch_size if "data.train_batch_size" in explicit else 1
    trained, held_out = hold_out(table, settings.prompt_key, most=settings.val_max_samples, batch=batch)
    say(f"note: {describe_held_out(len(trained), len(held_out or ()))}")
    return trained, held_out


def _settings_that_keep_rows(config: PPOConfig) -> str:
    """The settings because of which checkpoints hold rows of the data; empty where they hold none."""
    named = {
        "algorithm.filter_groups.enable": config.algorithm.filter_groups.enable,
        "trainer.max_staleness": config.trainer.max_staleness,
    }
    return " and ".join(f"{name}={value}" for name, value in named.items() if value)


def _can_judge(reward_model: RewardModelConfig, sources: set[str | None], *data: PromptDataset | None) -> bool:
    # Built-in scorers tell which responses are right beside a reward model; without them it scores alone.
    try:
        check_sources(sources)
    except RewardError:
        if reward_model.enable and reward_model.function_weight:
            raise
        return False
    return not any(rows.rows_without_truth for rows in data if rows is not None)


def spread_work(
    stack: ExitStack,
    config: PPOConfig,
    pool: RewardPool | None,
    turns: ConversationLoop | None,
    workers: Workers,
    logs: Path,
    say: Callable[[str], object],
) -> None:
    """Let the other machines compute rewards and run tools and agents as well, as the settings say, until the stack is
    closed; what they print there is then added to the folder `logs`."""
    scores = pool if config.reward.on_all_machines else None
    settings = agent_settings(config.actor_rollout_ref.rollout.agent)
    talks = turns if turns is not None and settings.on_all_machines and has_workers(turns) else None
    if not workers.in_ray or (scores is None and talks is None):
        return
    machines = stack.enter_context(other_machines(say))
    if not machines:
        return
    stack.callback(keep_machine_logs, machines, logs)
    if scores is not None:
        scores.spread(machines, say)
    if talks is not None:
        stack.callback(talks.close)  # tools are asked to end what they started, before their machines are given up
        spread_conversations(talks, config, machines, say)
