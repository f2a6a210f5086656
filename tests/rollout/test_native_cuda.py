"""The native engine on a CUDA device, by its torch kernels."""

import pytest
import torch

from posttrain.config.rollout import RolloutConfig
from posttrain.rollout.base import Sampling
from posttrain.rollout.generate import generate
from posttrain.rollout.hf import HFEngine
from posttrain.rollout.native.build import build_native
from tests.rollout.tiny import KINDS, tiny

pytestmark = pytest.mark.gpu
PROMPTS = [[5, 6, 7], list(range(40)), [5, 6, 7], [9], list(range(10, 75))]


@pytest.mark.parametrize("kind", KINDS)
def test_samples_and_log_probs_equal_the_oracles(kind):
    module = tiny(kind).cuda()
    settings = [Sampling(max_tokens=40, greedy=True), Sampling(max_tokens=20, temperature=0.8)] * 2
    settings.append(Sampling(max_tokens=30, top_p=0.9))
    ours = generate(build_native(module, RolloutConfig(), decode=None)[0], PROMPTS, settings, range(5))
    theirs = generate(HFEngine(module, pad_token_id=0), PROMPTS, settings, range(5))
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), rtol=0, atol=1e-4)


def test_weights_that_come_and_go_between_host_and_device():
    module = tiny("qwen2")
    engine = build_native(module, RolloutConfig(), decode=None, device=torch.device("cuda"))[0]
    found = []
    for _ in range(2):
        module.cuda()
        found.append(engine.score([PROMPTS[1]])[0])
        module.cpu()
    assert torch.equal(*found)
