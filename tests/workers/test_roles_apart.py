"""Policy, rollout and reference as workers of their own answer as the worker that holds the three together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from textbook import ACTOR, CPU, actor, batch, ppo_config

from posttrain.controller.dispatch import Calls
from posttrain.controller.pool import LocalWorkers
from posttrain.models.loading import load_tokenizer
from posttrain.protocol import DataProto
from posttrain.workers.fsdp_workers import PolicyWorker, ReferenceWorker, RolloutWorker
from posttrain.workers.spread import in_row_order

SETTINGS = {f"{ACTOR}.optim.lr": 1e-2}


@pytest.fixture(scope="module")
def together(tiny_model):
    return actor(tiny_model, SETTINGS, total_updates=8, reference=True)


@pytest.fixture(scope="module")
def apart(tiny_model):
    """The three by role, in one process."""
    config = ppo_config(tiny_model, SETTINGS)
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    workers = LocalWorkers()
    groups = {
        "policy": workers.create("policy", PolicyWorker, config, tokenizer, CPU, total_updates=8),
        "rollout": workers.create("rollout", RolloutWorker, config, tokenizer, CPU),
        "reference": workers.create("reference", ReferenceWorker, config, CPU),
    }
    for group in groups.values():
        group.init_model()
    return groups


def responses(group) -> list[list[int]]:
    ids, seeds = np.empty(4, dtype=object), np.arange(4).astype(object)
    ids[:] = [[256, 40 + row, 61] for row in range(4)]
    made = group.generate_sequences(DataProto.from_dict(non_tensors={"raw_prompt_ids": ids, "seed": seeds})).batch
    return [row[mask.bool()].tolist() for row, mask in zip(made["responses"], made["response_mask"], strict=True)]


def test_policy_rollout_and_reference_apart_give_what_they_give_together(together, apart):
    data = batch()
    assert responses(apart["rollout"]) == responses(together)
    before = apart["policy"].compute_log_prob(data).batch["old_log_probs"]
    assert apart["policy"].update_actor(data) == together.update_actor(data)
    after = apart["policy"].compute_log_prob(data).batch["old_log_probs"]
    assert torch.equal(after, together.compute_log_prob(data).batch["old_log_probs"]) and not torch.equal(before, after)
    frozen = apart["reference"].compute_ref_log_prob(data).batch["ref_log_prob"]
    assert torch.equal(frozen, together.compute_ref_log_prob(data).batch["ref_log_prob"]) and torch.equal(
        frozen, before
    )


def test_a_role_alone_answers_for_itself_only(apart):
    for role, name in (("policy", "submit"), ("reference", "update_actor"), ("rollout", "compute_log_prob")):
        with pytest.raises(AttributeError, match=name):
            getattr(apart[role], name)


def test_a_call_that_fails_leaves_the_rollout_asleep_and_without_requests(apart):
    worker, ids = apart["rollout"].worker, np.empty(2, dtype=object)
    ids[:] = [[256, 40], []]
    with pytest.raises(ValueError, match="needs a prompt"):
        prompts = DataProto.from_dict(non_tensors={"raw_prompt_ids": ids, "seed": np.arange(2).astype(object)})
        apart["rollout"].generate_sequences(prompts)
    assert not worker.awake and not worker.rollout.has_work() and worker.rollout.asleep


def test_a_rank_that_got_no_rows_generates_nothing(apart):
    """Fewer prompts than ranks: the others' rows are all there is."""
    ids = np.empty(1, dtype=object)
    ids[:] = [[256, 40]]
    prompts = DataProto.from_dict(non_tensors={"raw_prompt_ids": ids, "seed": np.zeros(1, object)})
    worker = apart["rollout"].worker
    assert len(worker.generate_sequences(prompts[[]])) == 0 and not worker.awake
    calls = Calls([(prompts,), (prompts[[]],)], [[0], []])
    made = in_row_order([worker.generate_sequences(*arguments) for arguments in calls.arguments], calls)
    assert len(made) == 1 and made.batch["responses"].shape[0] == 1
