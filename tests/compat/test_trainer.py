"""Subclasses of RayPPOTrainer, reward managers and workers written for verl train here."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from posttrain.errors import UserError
from verl import DataProto
from verl._pools import resolve_with_pools
from verl.trainer.config import AlgoConfig
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo.core_algos import AdaptiveKLController
from verl.trainer.ppo.ray_trainer import (
    RayPPOTrainer,
    RayWorkerGroup,
    ResourcePoolManager,
    Role,
    apply_kl_penalty,
    compute_advantage,
    compute_response_mask,
)
from verl.trainer.ppo.reward import compute_reward, load_reward_manager
from verl.utils import hf_tokenizer
from verl.utils.metric import reduce_metrics
from verl.workers import fsdp_workers, megatron_workers
from verl.workers.fsdp_workers import ActorRolloutRefWorker
from verl.workers.reward_manager import AbstractRewardManager, get_reward_manager_cls, register, registry


@pytest.fixture
def config(tiny_model, sums, tmp_path):
    sections = {
        "algorithm": {"adv_estimator": "grpo"},
        "actor_rollout_ref": {
            "model": {"path": str(tiny_model)},
            "rollout": {"n": 3},
            "actor": {"optim": {"lr": 1e-3}, "ppo_mini_batch_size": 2},
        },
        "data": {
            "train_files": str(sums["train"]),
            "train_batch_size": 4,
            "max_prompt_length": 32,
            "max_response_length": 5,
        },
        "trainer": {
            "total_training_steps": 2,
            "device": "cpu",
            "default_local_dir": str(tmp_path),
            "export_hf": "none",
            "save_freq": -1,
        },
        "reward": {"num_workers": 1},
    }
    return OmegaConf.create(sections)


@pytest.fixture
def managers(monkeypatch):
    monkeypatch.setattr(registry, "REWARD_MANAGER_REGISTRY", dict(registry.REWARD_MANAGER_REGISTRY))


class SumManager(AbstractRewardManager):
    """Scores by the sum of the response's ids."""

    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", **kwargs):
        self.tokenizer, self.sizes = tokenizer, []

    def __call__(self, data, return_dict=False):
        lengths = data.batch["attention_mask"][:, data.batch["prompts"].shape[1] :].sum(-1)
        truths = [row["ground_truth"] for row in data.non_tensor_batch["reward_model"]]
        assert all(truths) and len(truths) == len(data)
        self.sizes.append(len(data))
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        rewards[torch.arange(len(data)), lengths - 1] = (data.batch["responses"].sum(-1) % 3).float()
        extra = {"odd": (lengths % 2).tolist()}
        return {"reward_tensor": rewards, "reward_extra_info": extra} if return_dict else rewards


def trainer_of(cls, config, **more):
    pools = ResourcePoolManager({"global_pool": [1]}, {Role.ActorRollout: "global_pool"})
    workers = {Role.ActorRollout: ActorRolloutRefWorker}
    tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)
    given = {"role_worker_mapping": workers, "resource_pool_manager": pools} | more
    return cls(config=config, tokenizer=tokenizer, **given)


def test_a_reward_manager_and_a_worker_of_ones_own_train_in_posttrains_loop(config, managers):
    register("by_sum")(SumManager)
    settings = OmegaConf.merge(config, {"reward_model": {"reward_manager": "by_sum"}})
    manager = load_reward_manager(settings, tokenizer=None, num_examine=0)
    assert isinstance(manager, SumManager)
    synced = []

    class Watched(ActorRolloutRefWorker):
        def sync_weights(self, version):
            synced.append(version)
            return super().sync_weights(version)

    workers = {Role.ActorRollout: Watched}
    trainer = trainer_of(RayPPOTrainer, config, reward_fn=manager, role_worker_mapping=workers)
    trainer.init_workers()
    result = trainer.fit()
    assert result.status == "finished" and result.steps == 2
    assert manager.sizes == [12, 12] and synced[-2:] == [1, 2]
    assert "reward/odd/mean" in result.metrics[0] and result.metrics[0]["actor/grad_norm"] > 0


def test_a_subclass_overrides_one_stage(config, managers):
    seen = []

    class Scaled(RayPPOTrainer):
        def _compute_advantage(self, batch):
            batch = super()._compute_advantage(batch)
            seen.append((len(batch), sorted(set(batch.non_tensor_batch["uid"]))))
            batch.batch["advantages"] = batch.batch["advantages"] * 0
            return batch

    trainer = trainer_of(Scaled, config, reward_fn=SumManager(None, 0))
    trainer.init_workers()
    before = weights(trainer)
    metrics = trainer.fit()
    assert [rows for rows, _ in seen] == [12, 12] and seen[0][1] != seen[1][1]
    assert metrics["actor/grad_norm"] == 0  # without advantages nothing is learnt
    assert before


def weights(trainer):
    module = trainer._inner.actor_rollout_wg.worker.engine.module
    return {name: tensor.detach().clone() for name, tensor in module.named_parameters()}


def test_a_subclass_with_a_loop_of_its_own(config):
    class Own(RayPPOTrainer):
        def fit(self):
            self.moved = []
            for batch_dict in self.train_dataloader:
                self.global_steps += 1
                batch = DataProto.from_single_dict(batch_dict)
                batch.non_tensor_batch["uid"] = np.array([f"u{row}" for row in range(len(batch))], dtype=object)
                gen_batch = self._get_gen_batch(batch)
                output = self.actor_rollout_wg.generate_sequences(gen_batch.repeat(repeat_times=3, interleave=True))
                output.meta_info.pop("timing")
                batch = batch.repeat(repeat_times=3, interleave=True).union(output)
                batch.batch["response_mask"] = compute_response_mask(batch)
                reward_tensor, _ = compute_reward(batch, self.reward_fn)
                batch.batch["token_level_scores"] = batch.batch["token_level_rewards"] = reward_tensor
                old = self.actor_rollout_wg.compute_log_prob(batch)
                entropies = old.batch.pop("entropys")
                batch = batch.union(old)
                batch = compute_advantage(batch, adv_estimator="grpo")
                batch.reorder(torch.randperm(len(batch)))  # as balancing over ranks does
                before = weights(self)
                metrics = reduce_metrics(self.actor_rollout_wg.update_actor(batch).meta_info["metrics"])
                after = weights(self)
                self.moved.append(any(not torch.equal(after[name], before[name]) for name in after))
                gap = (batch.batch["old_log_probs"] - batch.batch["rollout_log_probs"]).abs()
                assert float(gap.max()) < 1e-3 and entropies.shape == gap.shape
                assert metrics["actor/grad_norm"] > 0 and metrics["actor/optimizer_steps"] == 2
                if self.global_steps == self.total_training_steps:
                    return "done"

    trainer = trainer_of(Own, config, reward_fn=SumManager(None, 0))
    trainer.init_workers()
    assert trainer.fit() == "done" and trainer.moved == [True, True]


def test_what_cannot_be_taken_says_what_to_do(config):
    with pytest.raises(UserError, match=r"data\.sampler"):
        trainer_of(RayPPOTrainer, config, train_sampler=iter([]))
    with pytest.raises(UserError, match=r"subclass of verl\.workers\.fsdp_workers\.ActorRolloutRefWorker"):
        trainer_of(RayPPOTrainer, config, role_worker_mapping={Role.ActorRollout: dict}).init_workers()
    for worker in ("ActorRolloutRefWorker", "CriticWorker", "RewardModelWorker"):  # the strategy chooses their engine
        assert getattr(megatron_workers, worker) is getattr(fsdp_workers, worker)


def given_pools(critic="global_pool", **pools):
    return ResourcePoolManager(pools, {Role.ActorRollout: "global_pool", Role.Critic: critic})


def with_critic(config, **more):
    return {**OmegaConf.to_container(config), "algorithm": {"adv_estimator": "gae"}, **more}


def test_pools_set_the_workers_that_the_settings_leave_open(config):
    pools = given_pools("critics", global_pool=[1], critics=[1])
    for settings in (with_critic(config), with_critic(config, critic={"n_workers": 1})):
        made = resolve_with_pools(settings, pools).config
        assert (made.trainer.n_gpus_per_node, made.critic.n_workers) == (1, 1)
    pools.resource_pool_spec["global_pool"] = [2]
    made = resolve_with_pools(OmegaConf.to_container(config), pools).config  # without a critic
    assert (made.trainer.n_gpus_per_node, made.critic.n_workers) == (2, 0)
    made = resolve_with_pools(with_critic(config), given_pools(global_pool=[2])).config  # as verl's own runs have it
    assert (made.trainer.n_gpus_per_node, made.critic.n_workers) == (2, 0)
    with pytest.raises(UserError, match=r"asks for other workers than the settings\n.*\n  to do:  critic.n_workers=0"):
        resolve_with_pools(with_critic(config, critic={"n_workers": 1}), given_pools(global_pool=[1]))


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        (given_pools(global_pool=[4, 4]), r"to do:  trainer.nnodes=2 trainer.n_gpus_per_node=4$"),
        (given_pools(global_pool=[2, 1]), r"gives machines different numbers of processes \(global_pool: \[2, 1\]\)"),
        (given_pools("none", global_pool=[1]), "a role in the pool 'none', which is none.*choose one of global_pool"),
        (ResourcePoolManager({"a": [1]}, {}), "names no pool for Role.ActorRollout"),
        (ResourcePoolManager({"a": [1]}, {Role.ActorRollout: "a", Role.Env: "a"}), "has a pool for <Role.Env: 7>"),
        ({"global_pool": [1]}, r"is {'global_pool': \[1\]}"),
        (
            type("Mine", (ResourcePoolManager,), {"create_resource_pool": print})({"a": [1]}, {Role.ActorRollout: "a"}),
            "is a Mine with a `create_resource_pool` of its own, which nothing calls",
        ),
    ],
)  # fmt: skip
def test_pools_that_a_run_cannot_have_are_rejected(config, pools, said):
    config.trainer.nnodes = 1
    with pytest.raises(UserError, match=f"(?s)the resource pool manager.*{said}"):
        trainer_of(RayPPOTrainer, config, resource_pool_manager=pools).init_workers()


def test_two_roles_share_no_pool_apart_from_the_policy(config):
    config.actor_rollout_ref.actor.use_kl_loss = True
    pools = given_pools("others", global_pool=[1], others=[1])
    pools.mapping[Role.RefPolicy] = "others"
    with pytest.raises(UserError, match=r"puts <Role\.Critic: 3> and <Role\.RefPolicy: 4> together in others"):
        resolve_with_pools(with_critic(config), pools)


def test_hooks_of_a_task_runner_that_nothing_calls_are_rejected(config):
    class Runner(TaskRunner):
        def init_resource_pool_mgr(self, config):
            raise AssertionError

    class OwnRun(Runner):
        def run(self, config):
            return self.init_resource_pool_mgr

    with pytest.raises(UserError, match=r"(?s)Runner\.init_resource_pool_mgr is not called.*override `run`"):
        run_ppo(config, Runner)
    assert run_ppo(config, OwnRun)


class OwnReference(ActorRolloutRefWorker):
    pass


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"processor": object()}, r"RayPPOTrainer\(processor=...\) is not taken: runs train on text alone"),
        ({"ray_worker_group_cls": dict}, r"\(ray_worker_group_cls=...\) is not taken: posttrain calls its workers"),
        ({"val_reward_fn": SumManager(None, 0)}, r"\(val_reward_fn=...\) is not taken: validation is scored as"),
        ({"device_name": "cuda"}, r"\(device_name='cuda'\) is not taken: this run trains on cpu; set trainer.device"),
        ({"role_worker_mapping": {Role.RefPolicy: OwnReference}}, r"role_worker_mapping\[<Role.RefPolicy: 4>\] is"),
    ],
)
def test_arguments_that_would_have_no_effect_are_rejected(config, given, said):
    with pytest.raises(UserError, match=said):
        trainer_of(RayPPOTrainer, config, **given).init_workers()


def test_arguments_that_say_what_runs_do_anyway_are_taken(config):
    managers = [load_reward_manager(config, tokenizer=None, num_examine=number) for number in (0, 1)]
    more = {"reward_fn": managers[0], "val_reward_fn": managers[1], "device_name": "cpu", "processor": None}
    more["role_worker_mapping"] = {Role.ActorRollout: ActorRolloutRefWorker, Role.RefPolicy: ActorRolloutRefWorker}
    trainer = trainer_of(RayPPOTrainer, config, ray_worker_group_cls=RayWorkerGroup, **more)
    trainer.tokenizer.chat_template = "{{ messages }}"
    with pytest.raises(UserError, match=r"its chat template is not that of the run's.*model.tokenizer_path=FOLDER"):
        trainer.init_workers()
    trainer.tokenizer.chat_template = hf_tokenizer(config.actor_rollout_ref.model.path).chat_template
    trainer.init_workers()
    trainer.close()


# (The rest holds for verl as well.)


def scored():
    tensors = {
        "responses": torch.zeros(2, 3, dtype=torch.long),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 0, 0]]),
        "token_level_scores": torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 0.0]]),
        "old_log_probs": torch.tensor([[-1.0, -2.0, 0.0], [-3.0, 0.0, 0.0]]),
        "ref_log_prob": torch.tensor([[-1.5, -1.0, 0.0], [-2.0, 0.0, 0.0]]),
    }
    return DataProto.from_dict(tensors, {"uid": np.array(["a", "a"], dtype=object)})


def test_kl_in_the_reward_and_advantages_of_a_batch():
    data = scored()
    data.batch["response_mask"] = compute_response_mask(data)
    assert data.batch["response_mask"].tolist() == [[1, 1, 0], [1, 0, 0]]
    controller = AdaptiveKLController(0.1, 1.0, 10)
    data, metrics = apply_kl_penalty(data, controller)
    assert data.batch["token_level_rewards"].tolist() == [
        pytest.approx([-0.05, 1.1, 0.0]),
        pytest.approx([0.6, 0.0, 0.0]),
    ]
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(-0.625) and controller.value == pytest.approx(0.096)
    data = compute_advantage(data, "grpo", norm_adv_by_std_in_grpo=False, config=AlgoConfig())
    assert data.batch["advantages"].tolist() == [pytest.approx([0.225, 0.225, 0.0]), pytest.approx([-0.225, 0.0, 0.0])]


def test_managers_put_scores_on_last_tokens(tiny_model):
    tokenizer = hf_tokenizer(str(tiny_model))
    texts = ["#### 42", "#### 4"]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    width = max(map(len, ids))
    responses = torch.tensor([row + [0] * (width - len(row)) for row in ids])
    mask = torch.tensor([[1] * (2 + len(row)) + [0] * (width - len(row)) for row in ids])
    tensors = {"prompts": torch.zeros(2, 2, dtype=torch.long), "responses": responses, "attention_mask": mask}
    fields = {
        "data_source": np.array(["openai/gsm8k"] * 2, dtype=object),
        "reward_model": np.array([{"ground_truth": "42"}] * 2, dtype=object),
    }
    data = DataProto.from_dict(tensors, fields)
    rewards = get_reward_manager_cls("naive")(tokenizer, 0)(data)
    assert rewards.sum(-1).tolist() == [1.0, 0.0] and rewards[0, len(ids[0]) - 1] == 1.0
    batch = get_reward_manager_cls("batch")(tokenizer, 0, compute_score=lambda solution_strs, **_: [2.0, 3.0])
    assert batch(data, return_dict=True)["reward_tensor"].sum(-1).tolist() == [2.0, 3.0]
    buffer = OmegaConf.create({"enable": True, "len": 4, "penalty_factor": 1.0, "log": True})
    dapo = get_reward_manager_cls("dapo")(tokenizer, 0, max_resp_len=len(ids[0]) + 2, overlong_buffer_cfg=buffer)
    found = dapo(data, return_dict=True)
    assert found["reward_tensor"].sum(-1).tolist() == pytest.approx([0.5, -0.25])
    assert found["reward_extra_info"]["overlong_reward"] == pytest.approx([-0.5, -0.25])
    data.batch["rm_scores"] = torch.ones(2, width)
    assert get_reward_manager_cls("naive")(tokenizer, 0)(data).sum() == 2 * width


def test_stages_of_ones_own_are_not_done_at_once(config):
    class Own(RayPPOTrainer):
        def _compute_advantage(self, batch):
            raise AssertionError

    trainer = Own(config, tokenizer=None)
    trainer._inner = Mock(**{"config.trainer.max_staleness": 1})
    with pytest.raises(UserError, match=r"max_staleness=1: Own has stages of its own \(_compute_advantage\)"):
        trainer.fit()
