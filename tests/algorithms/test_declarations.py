"""What an algorithm's file declares is true: a recording configuration sees what each one reads, in one call."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from posttrain.algorithms import compute_advantage, register_adv_est, register_policy_loss
from posttrain.algorithms.registry import ADV_ESTIMATORS, POLICY_LOSSES, Declaration, loss_settings
from posttrain.config.checked import SHARED_BY_ESTIMATORS, SHARED_BY_LOSSES
from posttrain.config.root import AlgorithmConfig, PPOConfig
from posttrain.config.schema import leaves
from posttrain.settings import POSITIVE, setting


class RecordingConfig:
    """Every setting is unset; the names that were asked for are kept, those of sections inside it as `section.name`."""

    def __init__(self, sections: tuple[str, ...] = (), prefix: str = "", read: set[str] | None = None) -> None:
        self.sections, self.prefix = sections, prefix
        self.read = set() if read is None else read

    def get(self, name: str, default: Any = None) -> Any:
        if name in self.sections:
            return RecordingConfig(prefix=f"{name}.", read=self.read)
        self.read.add(self.prefix + name)
        return default


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    old, new, advantages = (torch.randn(4, 3, generator=generator) for _ in range(3))
    return {"old_log_prob": -old.abs(), "log_prob": -new.abs(), "advantages": advantages}


def call_loss(loss: Any) -> tuple[set[str], set[str]]:
    """(settings that it read, metrics that it gave)."""
    config, mask = RecordingConfig(("policy_loss",)), torch.ones(4, 3)
    given = batch()
    fields = {"response_mask": mask, "advantages": given["advantages"], "old_log_probs": given["old_log_prob"]}
    prepared = loss.prepare(SimpleNamespace(batch=fields, meta_info={}), config) if loss.prepare else {}
    _, metrics = loss(**given, response_mask=mask, config=config, **prepared)
    return config.read, set(metrics)


def call_estimator(name: str) -> set[str]:
    """Settings of the section `algorithm` that it read."""
    config, ones = RecordingConfig(), torch.ones(4, 3)
    more = {"values": ones, "reward_baselines": torch.ones(4), "sum_pi_squared": ones / 2, "old_log_probs": -ones}
    more |= {"rollout_log_probs": -ones, "reward_scores": [1.0, 0.0, 1.0, 0.0]}
    index = ["a", "a", "b", "b"]
    compute_advantage(name, token_level_rewards=ones, response_mask=ones, index=index, config=config, **more)
    return config.read & {field.name for field in dataclasses.fields(AlgorithmConfig)}


def declared(declaration: Declaration, prefix: str = "") -> set[str]:
    own = dataclasses.fields(declaration.settings) if declaration.settings else ()
    return {*(declaration.reads or ()), *(prefix + field.name for field in own)}


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_loss_reads_what_it_declares_and_gives_the_metrics_that_it_declares(name):
    loss = POLICY_LOSSES[name]
    read, metrics = call_loss(loss)
    assert read == declared(loss, "policy_loss.")
    assert metrics == set(loss.metrics)
    assert loss.reads is not None and set(loss.reads) <= set(SHARED_BY_LOSSES)


@pytest.mark.parametrize("name", ADV_ESTIMATORS)
def test_an_estimator_reads_what_it_declares(name):
    estimator = ADV_ESTIMATORS[name]
    assert call_estimator(name) == declared(estimator)
    assert estimator.reads is not None and set(estimator.reads) <= set(SHARED_BY_ESTIMATORS)


@dataclass
class UnreadSettings:
    never_read: float = setting(1.0, range=POSITIVE)


def test_a_declaration_that_lies_is_seen_in_both_directions():
    @register_policy_loss("says_less", reads=())
    def says_less(log_prob, advantages, config, **kwargs):
        return -advantages * log_prob * config.get("clip_ratio", 1.0), {}

    @register_policy_loss("says_more", settings=UnreadSettings, reads=("clip_ratio_c",))
    def says_more(log_prob, advantages, **kwargs):
        return -advantages * log_prob, {"actor/undeclared": 1.0}

    @register_adv_est("says_less", reads=())
    def estimate(token_level_rewards, response_mask, gamma=1.0, **kwargs):
        return gamma * token_level_rewards, token_level_rewards

    less, more = POLICY_LOSSES["says_less"], POLICY_LOSSES["says_more"]
    assert call_loss(less)[0] - declared(less, "policy_loss.") == {"clip_ratio"}
    assert declared(more, "policy_loss.") - call_loss(more)[0] == {"clip_ratio_c", "policy_loss.never_read"}
    assert call_loss(more)[1] - set(more.metrics) == {"actor/undeclared"}
    assert call_estimator("says_less") - declared(ADV_ESTIMATORS["says_less"]) == {"gamma"}


@pytest.mark.parametrize("registry", [ADV_ESTIMATORS, POLICY_LOSSES], ids=["estimators", "losses"])
def test_every_declared_setting_has_a_sentence_and_every_page_a_paper(registry):
    for name, declaration in registry.items():
        assert "arXiv" in declaration.page and "Settings:" in declaration.page, name
        own = declared(declaration) - set(declaration.reads or ())
        sentences = {key.rpartition(".")[2]: leaf.sentence for key, leaf in leaves(PPOConfig).items()}
        assert all(sentences[setting] for setting in own), name


def test_settings_of_a_loss_are_read_from_any_kind_of_section_and_checked():
    from posttrain.algorithms import AlgorithmError
    from posttrain.algorithms.losses.dro import DROSettings

    assert loss_settings(DROSettings, None) == DROSettings(1.0)
    assert loss_settings(DROSettings, {"policy_loss": {"dro_beta": 3}}) == DROSettings(3)
    assert loss_settings(DROSettings, SimpleNamespace(policy_loss=SimpleNamespace(dro_beta=None))) == DROSettings(1.0)
    with pytest.raises(AlgorithmError, match=r"policy_loss\.dro_beta is -5; it must be above 0\."):
        loss_settings(DROSettings, {"policy_loss": {"dro_beta": -5}})
