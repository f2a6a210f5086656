"""From a resolved configuration to a finished run: directory, data, reward workers, trainer, and tidy ends."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from posttrain.config.data import HELD_OUT, DataConfig
from posttrain.config.resolved import Resolved
from posttrain.config.reward import RewardConfig
from posttrain.config.reward_model import RewardModelConfig
from posttrain.config.root import PPOConfig
from posttrain.conversations.opening import check_agent_names, open_conversations
from posttrain.data.dataset import PromptDataset, describe_held_out, hold_out
from posttrain.data.rows import read_table
from posttrain.models.loading import load_tokenizer
from posttrain.rewards.combined import asks_sources, named_sources
from posttrain.rewards.loading import check_columns, resolve_reward
from posttrain.rewards.pool import PrintLimiter, RewardPool
from posttrain.rewards.process import WorkerProcess
from posttrain.rewards.scorers import check_sources
from posttrain.rewards.scorers.code import check_programs, code_settings
from posttrain.rewards.types import RewardError, RewardList, RewardSpec
from posttrain.rollout.engines import check_engine_name
from posttrain.tracking.console import hang_up_is_no_end
from posttrain.tracking.progress import say
from posttrain.tracking.rundir import RunDirectory
from posttrain.tracking.tee import tee_output
from posttrain.trainer.embedded import ensure_embedded
from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer
from posttrain.trainer.ppo.reward import RewardManager
from posttrain.trainer.run.directory import open_run_directory
from posttrain.trainer.run.process import explain_errors, prepare_torch, restore_determinism
from posttrain.trainer.run.result import RunResult
from posttrain.trainer.run.serving import driven_by_one_machine
from posttrain.trainer.run.workers import keep_worker_logs, open_workers
from posttrain.workers.roles import pick_device

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
    with opened_training(resolved, reward=reward, data=data, val_data=val_data) as trainer:
        return trainer.fit()


@contextmanager
def opened_training(
    resolved: Resolved,
    *,
    reward: Callable[..., Any] | RewardList | None = None,
    data: Rows | None = None,
    val_data: Rows | None = None,
    trainer_class: type[RayPPOTrainer] | None = None,
) -> Iterator[RayPPOTrainer]:
    """The trainer of a run, with everything around it; what was opened for it is closed behind it."""
    config = copy.deepcopy(resolved.config)  # sizes and paths are filled in below; the caller's stays as it was
    with ExitStack() as stack:
        stack.enter_context(hang_up_is_no_end())
        stack.enter_context(restore_determinism())
        run, _ = open_run_directory(config, say)
        stack.callback(run.close)
        stack.enter_context(tee_output(run.log))
        say(f"Run directory: {run.path}")
        for note in resolved.notes:
            say(f"note: {note}")
        with explain_errors(run, config):
            yield _build(stack, resolved, config, run, reward, data, val_data, trainer_class)


def _build(
    stack: ExitStack,
    resolved: Resolved,
    config: PPOConfig,
    run: RunDirectory,
    reward: Any,
    data: Any,
    val_data: Any,
    trainer_class: type[RayPPOTrainer] | None,
) -> RayPPOTrainer:
    stored = copy.deepcopy(config)  # for config.yaml: the settings as given, which a resumed run is compared with
    _load_external(config.actor_rollout_ref.model.external_lib)
    check_engine_name(config.actor_rollout_ref.rollout.name)
    # The process that loads and inspects the reward function becomes the first reward worker: importing a user's file
    # twice would cost its time twice, and run its side effects twice.
    looker: list[WorkerProcess] = []
    stack.callback(lambda: [worker.kill() for worker in looker])
    spec = resolve_reward(
        config.custom_reward_function,
        functions=config.reward.functions,
        function=reward,
        told={"code": code_settings(config.reward), "timeout_s": config.reward.timeout_s},
        kept=looker,
    )
    device = pick_device(config.trainer.device)
    prepare_torch(config.trainer, device)
    _fill_embedded(config, data)
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    turns = stack.enter_context(open_conversations(config, tokenizer, device, say))
    tools = turns.schemas if turns else ()
    trained, held_out = _rows(config.data, resolved.explicit, data, val_data)
    train = PromptDataset(trained, tokenizer, config.data, tools=tools)
    val = None if held_out is None else PromptDataset(held_out, tokenizer, config.data, split="val", tools=tools)
    check_agent_names(turns, [name for rows in (train, val) if rows for name in rows.column("agent_name")])
    if settings := _keep_rows(config):
        train.check_savable(settings)
    for note in dict.fromkeys([*train.notes, *(val.notes if val else [])]):
        say(f"note: {note}")
    if spec.columns:
        check_columns(spec, train.columns | (val.columns if val else set()))
    limits = config.reward
    sources = {source or config.data.data_source for data in (train, val) if data for source in data.data_sources}
    named = spec.kind != "builtin"
    pool = None
    others = config.reward_model.enable or bool(turns and turns.has_agents)  # who may give rewards too
    if named or not others or _can_judge(config.reward_model, sources, train, val):
        pool = stack.enter_context(_reward_pool(spec, limits, sources, looker))
    elif turns and turns.has_agents:
        say("note: there is no reward function for these rows: the agent's own rewards are the only ones.")
    workers = stack.enter_context(open_workers(config, device, config.actor_rollout_ref.model.external_lib, run.logs))
    stack.callback(keep_worker_logs, workers, run.logs)
    trainer = (trainer_class or RayPPOTrainer)(
        config,
        tokenizer=tokenizer,
        run=run,
        train_dataset=train,
        val_dataset=val,
        reward_fn=RewardManager(
            pool,
            tokenizer,
            default_source=config.data.data_source,
            named=named,
            prompts_are_texts=train.prompts_are_texts and (val is None or val.prompts_are_texts),
        ),
        device=device,
        explicit=resolved.explicit,
        stored_config=stored,
        workers=workers,
        turns=turns,
    )
    return trainer


def _reward_pool(
    spec: RewardSpec, limits: RewardConfig, sources: set[str | None], looker: list[WorkerProcess] | None = None
) -> RewardPool:
    """The workers that score with the reward functions, after all that can be checked about these."""
    by_source = asks_sources(spec)
    if by_source:
        check_sources(sources)
    spec.code = code_settings(limits)
    named = named_sources(spec)
    for note in check_programs(sources | named, limits.sandbox, must_run=by_source or bool(named)):
        say(f"note: {note}")
    if spec.kind == "combined":
        say(f"Reward: {spec.label}")
    return RewardPool(
        spec,
        num_workers=limits.num_workers,
        timeout_s=limits.timeout_s,
        failure_score=limits.failure_score,
        on_print=PrintLimiter(say),
        first=looker.pop() if looker else None,
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


def _keep_rows(config: PPOConfig) -> str:
    """The settings because of which checkpoints hold rows of the data; empty where they hold none."""
    named = {
        "algorithm.filter_groups.enable": config.algorithm.filter_groups.enable,
        "trainer.one_step_off": config.trainer.one_step_off,
    }
    return " and ".join(f"{name}=True" for name, on in named.items() if on)


def _can_judge(reward_model: RewardModelConfig, sources: set[str | None], *data: PromptDataset | None) -> bool:
    """Whether built-in scorers can tell right responses beside a reward model; without them it scores alone."""
    try:
        check_sources(sources)
    except RewardError:
        if reward_model.enable and reward_model.function_weight:
            raise
        return False
    return not any(rows.rows_without_truth for rows in data if rows is not None)


def _load_external(name: str | None) -> None:
    """Import the user's module, which may register estimators, losses, samplers or rollout engines."""
    if name:
        from posttrain.external import import_external

        import_external(name)
        say(f"Loaded {name}.")


def _fill_embedded(config: PPOConfig, data: Any) -> None:
    """Replace `embedded` (and what was left unset) by the files that posttrain makes itself."""
    model, critic, files = config.actor_rollout_ref.model, config.critic.model, config.data
    wants_model = [role for role in (model, critic) if role.path == "embedded" or (role is model and not model.path)]
    wants_train = data is None and files.train_files in (None, "embedded")
    if not (wants_model or wants_train or files.val_files == "embedded"):
        return
    folder = ensure_embedded(say, model=bool(wants_model))
    for role in wants_model:
        role.path = str(folder / "model")
    if wants_train:
        files.train_files = str(folder / "train.json")
    if files.val_files == "embedded":
        files.val_files = str(folder / "test.json")
