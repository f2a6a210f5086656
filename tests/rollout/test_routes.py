"""Recorded routes: the experts of every cached token, whoever computed it, shares it, copies it or evicts it."""

import numpy as np
import pytest
import torch
from test_tight_cache import SAMPLINGS, converse

from posttrain.config.rollout import RolloutConfig
from posttrain.conversations.branch import Branch
from posttrain.rollout.base import Output, Request, Sampling
from posttrain.rollout.generate import to_batch
from posttrain.rollout.native.build import build_native
from tests.rollout.tiny import tiny


def native(module, blocks=None, segment=64):
    config = RolloutConfig(kv_cache_gb=0.01, enable_rollout_routing_replay=True)
    engine, name = build_native(module, config, decode=lambda ids: "".join(chr(33 + one) for one in ids))
    assert name.endswith(", routes recorded)")
    if blocks:
        engine.pool.limit, engine.queue.segment = blocks, segment
    return engine


def chosen_by_transformers(module, ids):
    """(tokens, layers, top_k) the experts of all tokens but the last, by the model's own routers."""
    found = []
    routers = [layer.mlp.gate for layer in module.base_model.layers if hasattr(layer.mlp, "experts")]
    hooks = [router.register_forward_hook(lambda _, __, out: found.append(out[2])) for router in routers]
    with torch.no_grad():
        module(torch.tensor([ids[:-1]]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).numpy()


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["by text", "by token"])
@pytest.mark.parametrize("blocks", [40, 12], ids=["wide", "tight"])
def test_turns_over_kept_shared_and_evicted_blocks_have_the_routes_of_all_their_tokens(sampling, blocks):
    """Groups with one prompt, turns that continue a kept cache, preempted rows: none differs from transformers."""
    module = tiny("qwen3-moe-mixed")
    engine, asked = native(module, blocks), {}
    submit = engine.submit
    engine.submit = lambda request: (asked.update({request.id: request}), submit(request))
    outputs = converse(engine, 1, sampling, in_rounds=False)
    assert len(outputs) > 20
    differing = tokens = 0
    for id, output in outputs.items():
        ids = [*asked[id].prompt_ids, *output.token_ids]
        assert output.routes.shape == (len(ids) - 1, 2, 3) and output.routes.dtype == np.uint8
        differing += (np.sort(output.routes) != np.sort(chosen_by_transformers(module, ids))).sum()
        tokens += len(ids) - 1
    assert differing == 0 and tokens > 1000


def test_routes_stay_those_of_the_keys_when_weights_change_under_a_running_row():
    module, other = tiny("qwen3-moe"), tiny("qwen3-moe", seed=1)
    engine = native(module)
    engine.submit(Request(0, list(range(9)), Sampling(max_tokens=8), 0))
    for _ in range(4):
        engine.step()
    done = engine.so_far([0])[0].token_ids
    before = chosen_by_transformers(module, [*range(9), *done])
    engine.load_weights([(name, weight.clone()) for name, weight in other.state_dict().items()], version=1)
    while engine.has_work():
        ended = engine.step()
    (output,) = ended
    assert len(output.routes) == 16 and (np.sort(output.routes[: len(before)]) == np.sort(before)).all()
    assert (np.sort(output.routes) != np.sort(chosen_by_transformers(module, [*range(9), *output.token_ids]))).any()


def test_more_than_256_experts_take_two_bytes():
    from posttrain.models.routing import RouteShape

    assert [RouteShape(48, experts, 8).dtype for experts in (256, 257)] == [np.uint8, np.int16]
    assert RouteShape(48, 128, 8).bytes_per_token == 384


def test_a_branch_has_the_routes_of_its_last_turn_and_a_batch_cuts_them_to_its_tokens():
    """What follows the last turn was never computed: the trainer's router chooses for it."""

    def routes(tokens, mark):
        return np.full((tokens, 2, 2), mark, np.uint8)

    branch = Branch(0, [1, 2, 3])
    branch.add_sampled(Output("a", [4, 5], [0.0, 0.0], "stop", [(0, 2)], routes=routes(4, 1)), 0)
    branch.add_observation([6, 7, 8])
    branch.add_sampled(Output("b", [9], [0.0], "stop", [(0, 1)], routes=routes(8, 2)), 1)
    branch.add_observation([10, 11])
    whole = branch.output("a", "stop")
    cut = Output("c", [4], [0.0], "abort", routes=routes(9, 3))
    found = to_batch([[1, 2, 3]] * 3, [whole, cut, Output("d", [4], [0.0], "abort")], 0).non_tensor_batch[
        "routed_experts"
    ]
    assert [(len(array), array.ravel()[:1].tolist()) for array in found] == [(8, [2]), (3, [3]), (0, [])]
