"""RayPPOTrainer with verl's signature: posttrain's run around it, and a loop whose stages a subclass may override.

    trainer = MyTrainer(config=config, tokenizer=tokenizer, role_worker_mapping=..., resource_pool_manager=...)
    trainer.init_workers()
    trainer.fit()

Nothing overridden: posttrain's own loop trains. A subclass that overrides a stage, or `fit`, works with verl's batches:
`actor_rollout_wg`, `critic_wg` and `train_dataloader` are posttrain's workers and data as verl's loops call them.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

import torch

from posttrain.algorithms.common import read_setting as setting
from posttrain.errors import UserError
from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer as Ours
from posttrain.trainer.ppo.runner import opened_training
from posttrain.trainer.run.process import find_run_device
from posttrain.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker
from verl._managed_rewards import ManagedRewards
from verl._pools import resolve_with_pools
from verl._rows import to_posttrain
from verl._worker_views import ActorView, CriticView, Prompts
from verl.protocol import DataProto
from verl.single_controller.ray import RayWorkerGroup
from verl.single_controller.ray.base import plain_class
from verl.trainer.ppo.metric_utils import reduce_metrics
from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage, compute_response_mask
from verl.trainer.ppo.reward import compute_reward
from verl.trainer.ppo.utils import Role
from verl.utils.py_functional import convert_to_regular_types

STAGES = (
    "_get_gen_batch",
    "_generate",
    "_compute_reward",
    "_compute_old_log_prob",
    "_compute_ref_log_prob",
    "_compute_values",
    "_compute_advantage",
    "_update_actor",
    "_update_critic",
)
"""What a subclass may override; each is called once per step by `fit`."""
_BASES = {"actor_class": ActorRolloutRefWorker, "critic_class": CriticWorker, "reward_model_class": RewardModelWorker}
_ROLES = {
    "actor_class": (Role.ActorRolloutRef, Role.ActorRollout, Role.Actor),
    "critic_class": (Role.Critic,),
    "reward_model_class": (Role.RewardModel,),
}


class RayPPOTrainer:
    """A training of posttrain with verl's interface."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any = None,
        role_worker_mapping: dict[Any, Any] | None = None,
        resource_pool_manager: Any = None,
        ray_worker_group_cls: Any = None,
        processor: Any = None,
        reward_fn: Any = None,
        val_reward_fn: Any = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        collate_fn: Any = None,
        train_sampler: Any = None,
        device_name: str | None = None,
    ) -> None:
        _refuse_own_order(collate_fn, train_sampler)
        _refuse_other_rewards(reward_fn, val_reward_fn)
        if ray_worker_group_cls not in (None, RayWorkerGroup):
            raise _not_taken(
                "ray_worker_group_cls", "posttrain calls its workers itself; leave it out, or give RayWorkerGroup"
            )
        if processor is not None:
            raise _not_taken("processor", "runs train on text alone; give None, and a model of text")
        self.config, self.tokenizer, self.processor = config, tokenizer, processor
        self.role_worker_mapping = role_worker_mapping or {}
        self.resource_pool_manager = resource_pool_manager
        self.reward_fn, self.val_reward_fn = reward_fn, val_reward_fn
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        self.device_name = device_name
        self.global_steps, self.async_rollout_mode = 0, False
        self._stack = ExitStack()
        self._inner: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "fit" in cls.__dict__:
            cls.fit = _closing(cls.__dict__["fit"])  # pyright: ignore

    # -- opening ------------------------------------------------------------------------------------------------------
    def init_workers(self) -> None:
        """Opens the run: its directory, data, rewards and workers."""
        resolved = resolve_with_pools(convert_to_regular_types(self.config), self.resource_pool_manager)
        if self.device_name is not None and self.device_name != (device := _device_of(resolved.config)):
            raise _not_taken("device_name", f"this run trains on {device}; set trainer.device", self.device_name)
        rows = {"data": _rows(self.train_dataset), "val_data": _rows(self.val_dataset)}
        score = _unused if self.reward_fn is not None else None
        opened = opened_training(resolved, reward=score, trainer_class=self._ours(), **rows)
        self._inner = inner = self._stack.enter_context(opened)
        try:
            _refuse_other_tokenizer(self.tokenizer, inner.tokenizer)
        except UserError:
            self.close()
            raise
        self.tokenizer = inner.tokenizer
        self.use_critic, self.use_reference_policy = inner.critic_wg is not None, inner.use_reference
        self.use_rm = inner.rm_wg is not None
        self.actor_rollout_wg = self.ref_policy_wg = ActorView(inner, inner.actor_rollout_wg)
        self.critic_wg = CriticView(inner, inner.critic_wg) if self.use_critic else None
        self.train_dataloader = Prompts(inner)
        self.total_training_steps = inner.sizes.total_steps
        self.kl_ctrl_in_reward = inner.kl_controller

    def _ours(self) -> type[Ours]:
        """posttrain's trainer with the worker classes and the reward manager that were given."""
        manager, classes = self.reward_fn, self._worker_classes()

        class WithVerl(Ours):
            def __init__(self, config: Any, **parts: Any) -> None:
                if manager is not None:
                    parts["reward_fn"] = ManagedRewards(manager, parts["tokenizer"], config.data.data_source)
                super().__init__(config, **parts)

        for name, cls in classes.items():
            setattr(WithVerl, name, cls)
        return WithVerl

    def _worker_classes(self) -> dict[str, Any]:
        found = {}
        known = [role for roles in _ROLES.values() for role in roles]
        for role, cls in self.role_worker_mapping.items():
            if role not in known and plain_class(cls) not in (ActorRolloutRefWorker, None):
                raise UserError(
                    f"role_worker_mapping[{role!r}] is {cls}: a run makes no worker of its own class for this role. "
                    "Give it under Role.ActorRollout, whose workers are the reference and the rollout as well; a role "
                    "of your own is `own_roles` (docs/pools.md)."
                )
        for name, roles in _ROLES.items():
            for role in roles:
                cls = plain_class(self.role_worker_mapping.get(role, _BASES[name]))
                if not (isinstance(cls, type) and issubclass(cls, _BASES[name])):
                    raise UserError(
                        f"role_worker_mapping[{role}] is {cls}: a worker of one's own is a subclass of "
                        f"verl.workers.fsdp_workers.{_BASES[name].__name__} (posttrain's, see docs/workers.md); other "
                        "workers can be called beside the training through a RayWorkerGroup."
                    )
                if cls is not _BASES[name]:
                    found[name] = cls
        return found

    # -- the loop -----------------------------------------------------------------------------------------------------
    def fit(self) -> Any:
        """Trains to the last step."""
        if self._inner is None:
            self.init_workers()
        changed = [name for name in STAGES if getattr(type(self), name) is not getattr(RayPPOTrainer, name)]
        try:
            inner: Any = self._inner
            if changed and (bound := inner.config.trainer.max_staleness):
                stages = ", ".join(changed)
                raise UserError(
                    f"trainer.max_staleness={bound}: {type(self).__name__} has stages of its own ({stages}), "
                    "and these are called one after the other. Set it to 0, or leave the stages as they are."
                )
            return self._fit_by_stages() if changed else inner.fit()
        finally:
            self.close()

    def _fit_by_stages(self) -> dict[str, float]:
        inner = self._inner
        self._load_checkpoint()
        inner.recorder.start(inner.step)
        status, metrics = "failed", {}
        try:
            while self.global_steps < self.total_training_steps:
                for batch_dict in self.train_dataloader:
                    metrics = self._step(batch_dict)
                    if self.global_steps >= self.total_training_steps:
                        break
            status = "finished"
        finally:
            inner.recorder.close(status)
        return metrics

    def _step(self, batch_dict: dict[str, Any]) -> dict[str, float]:
        inner, stage = self._inner, self._inner.recorder.stage
        metrics: dict[str, Any] = {}
        batch = DataProto.from_single_dict(batch_dict)
        with stage("gen"):
            gen_batch = self._get_gen_batch(batch)
            count = inner.config.actor_rollout_ref.rollout.n
            generated = self._generate(gen_batch.repeat(count, interleave=True))
            generated.meta_info.pop("timing", None)
            batch = batch.repeat(count, interleave=True).union(generated)
        batch.batch.setdefault("response_mask", compute_response_mask(batch))
        with stage("reward"):
            scores, extra = self._compute_reward(batch)
            batch.batch["token_level_scores"] = batch.batch["token_level_rewards"] = scores
        with stage("old_log_prob"):
            batch = batch.union(_batch_of(self._compute_old_log_prob(batch)))
        if self.use_reference_policy:
            with stage("ref"):
                batch = batch.union(_batch_of(self._compute_ref_log_prob(batch)))
        if self.use_critic:
            with stage("values"):
                batch = batch.union(_batch_of(self._compute_values(batch)))
        with stage("adv"):
            if inner.config.algorithm.use_kl_in_reward:
                kind = inner.config.algorithm.kl_penalty
                batch, metrics = apply_kl_penalty(batch, self.kl_ctrl_in_reward, kl_penalty=kind)
            batch = self._compute_advantage(batch)
        if self.use_critic:
            with stage("update_critic"):
                metrics |= reduce_metrics(self._update_critic(batch).meta_info["metrics"])
        with stage("update_actor"):
            metrics |= reduce_metrics(self._update_actor(batch).meta_info["metrics"])
        self.global_steps = inner.step = inner.step + 1
        validation = inner._validate_if_due()
        inner.recorder.finish_step(inner.step, self._recorded(batch, extra), metrics, validation)
        if inner._save_is_due():
            self._save_checkpoint()
        return metrics

    def _recorded(self, batch: DataProto, extra: dict[str, Any]) -> Any:
        """The batch as the run's records want it."""
        made = to_posttrain(batch)
        rows = range(len(made))
        made.non_tensor_batch["reward_score"] = batch.batch["token_level_scores"].sum(-1).tolist()
        made.non_tensor_batch["reward_parts"] = [{name: values[row] for name, values in extra.items()} for row in rows]
        made.non_tensor_batch["reward_error"] = [None for _ in rows]
        return made.set_decoder(self._inner.experience.decode)

    # -- stages -------------------------------------------------------------------------------------------------------
    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        """The prompts; everything else stays in `batch`."""
        tensors = [name for name in ("input_ids", "attention_mask", "position_ids") if name in batch.batch.keys()]
        fields = [name for name in ("raw_prompt_ids", "serial") if name in batch.non_tensor_batch]
        return batch.pop(batch_keys=tensors, non_tensor_batch_keys=fields)

    def _generate(self, gen_batch: DataProto) -> DataProto:
        """One response per row."""
        return self.actor_rollout_wg.generate_sequences(gen_batch)

    def _compute_reward(self, batch: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
        """(rewards of the tokens, what else was measured): by the manager, or by the run's reward function."""
        if self.reward_fn is not None:
            return compute_reward(batch, self.reward_fn)
        made = self._inner.reward_fn.score(to_posttrain(batch)).non_tensor_batch
        lengths = batch.batch["response_mask"].sum(-1)
        rewards = torch.zeros_like(batch.batch["responses"], dtype=torch.float32)
        rewards[torch.arange(len(rewards)), lengths - 1] = torch.tensor([float(s) for s in made["reward_score"]])
        names = dict.fromkeys(name for part in made["reward_parts"] for name in part)
        return rewards, {name: [part.get(name) for part in made["reward_parts"]] for name in names}

    def _compute_old_log_prob(self, batch: DataProto) -> Any:
        return self.actor_rollout_wg.compute_log_prob(batch)

    def _compute_ref_log_prob(self, batch: DataProto) -> Any:
        return self.ref_policy_wg.compute_ref_log_prob(batch)

    def _compute_values(self, batch: DataProto) -> Any:
        assert self.critic_wg is not None
        return self.critic_wg.compute_values(batch)

    def _compute_advantage(self, batch: DataProto) -> DataProto:
        algorithm = self._inner.config.algorithm
        return compute_advantage(
            batch,
            adv_estimator=algorithm.adv_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            config=algorithm,
        )

    def _update_actor(self, batch: DataProto) -> DataProto:
        return self.actor_rollout_wg.update_actor(batch)

    def _update_critic(self, batch: DataProto) -> DataProto:
        assert self.critic_wg is not None
        return self.critic_wg.update_critic(batch)

    # -- validation, checkpoints, the end -----------------------------------------------------------------------------
    def _validate(self) -> dict[str, float]:
        """Metrics of the held-out data; empty without any."""
        inner = self._inner
        return {} if inner.validator is None else inner.validator.run(self.global_steps)

    def _save_checkpoint(self) -> Any:
        self._inner.step = self.global_steps
        return self._inner._save_checkpoint()

    def _load_checkpoint(self) -> int:
        self._inner._load_checkpoint()
        self.global_steps = self._inner.step
        return self.global_steps

    def _balance_batch(self, batch: DataProto, metrics: dict[str, Any], logging_prefix: str = "global_seqlen") -> None:
        """Nothing to do: an update balances the tokens of its ranks by itself."""

    def close(self) -> None:
        """Ends what was opened for the run."""
        self._stack.close()
        self._inner = None


def _closing(fit: Any) -> Any:
    """A subclass's `fit`: the run is opened before it if it was not, and closed after it."""

    @functools.wraps(fit)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._inner is None:
            self.init_workers()
        try:
            return fit(self, *args, **kwargs)
        finally:
            self.close()

    return run


def _refuse_own_order(collate_fn: Any, train_sampler: Any) -> None:
    """verl's own are what posttrain does anyway (data.shuffle, data.seed); others have another place here."""
    from torch.utils.data import RandomSampler, SequentialSampler

    from verl.utils.dataset.rl_dataset import collate_fn as usual

    own = {"collate_fn": collate_fn not in (None, usual)}
    own["train_sampler"] = type(train_sampler) not in (type(None), RandomSampler, SequentialSampler)
    for name in (name for name, given in own.items() if given):
        raise UserError(
            f"RayPPOTrainer({name}=...) is not taken: batches are made by posttrain.data.dataset, and the order of "
            "rows is data.sampler (register one with posttrain.data.sampler.register_sampler)."
        )


def _not_taken(name: str, way: str, given: Any = ...) -> UserError:
    return UserError(f"RayPPOTrainer({name}={'...' if given is ... else repr(given)}) is not taken: {way}.")


def _refuse_other_rewards(reward_fn: Any, val_reward_fn: Any) -> None:
    """Validation scores as training does. verl's runs make the manager twice, with another `num_examine`."""
    if val_reward_fn is not None and _scoring(val_reward_fn) != _scoring(reward_fn):
        raise _not_taken(
            "val_reward_fn",
            "validation is scored as training is; give the manager as reward_fn too, and let it look at the rows' "
            "data_source where they differ",
        )


def _scoring(manager: Any) -> Any:
    function = getattr(manager, "compute_score", None)
    further = {}
    while isinstance(function, functools.partial):
        function, further = function.func, {**function.keywords, **further}
    # Code, not functions: the same file may have been loaded twice.
    return type(manager), getattr(manager if function is None else function, "__code__", function), further


def _refuse_other_tokenizer(given: Any, own: Any) -> None:
    """verl's runs load it from the model's folder, as posttrain does. One that was changed would have no effect."""
    if given is None:
        return
    differs = "chat template" if given.chat_template != own.chat_template else ""
    if differs := differs or ("vocabulary" if given.get_vocab() != own.get_vocab() else ""):
        raise _not_taken(
            "tokenizer",
            f"its {differs} is not that of the run's tokenizer; save it by tokenizer.save_pretrained(FOLDER) and set "
            "actor_rollout_ref.model.tokenizer_path=FOLDER",
        )


def _device_of(config: Any) -> str:
    device = config.trainer.device
    return find_run_device(config.trainer).type if device == "auto" else device


def _batch_of(made: Any) -> DataProto:
    """verl's stages give a batch, or a batch and a measure."""
    return made[0] if isinstance(made, tuple) else made


def _unused(solution_str: str, ground_truth: Any) -> float:
    """Stands where a reward function would: the manager scores."""
    raise RuntimeError("responses are scored by the reward manager")


def _rows(dataset: Any) -> Any:
    """Rows of a data set that was given as an object."""
    if dataset is None:
        return None
    rows = setting(dataset, "dataframe", None)
    return list(rows) if rows is not None else [dataset[row] for row in range(len(dataset))]
