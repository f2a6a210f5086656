"""A train engine of the user's own: a file registers it, and RL, SFT and reward models train through it."""

from __future__ import annotations

import pytest
from runs import metrics_of, run
from sft_runs import metrics_of as supervised_metrics
from sft_runs import reward_model, sft

from posttrain.engine.settings import ENGINES, RL, register_train_engine, train_engine
from posttrain.errors import UserError
from posttrain.workers.supervised import TAKEN

COUNTING = '''
from collections import Counter

from posttrain.engine.settings import register_train_engine
from posttrain.engine.base import TrainEngine
from posttrain.engine.torch_engine import TorchEngine

CALLS = Counter()


@register_train_engine("counting")
class CountingEngine(TrainEngine):
    """Counts calls, and has torch's engine do the work."""

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def create(cls, module, settings, layout, head=None):
        CALLS["create"] += 1
        return cls(TorchEngine.create(module, settings, layout, head))

    @classmethod
    def check_model(cls, config, layout, *, ranks, packed):
        CALLS["check_model"] += 1
        TorchEngine.check_model(config, layout, ranks=ranks, packed=packed)

    def __getattr__(self, name):  # what the contract does not name
        return getattr(self.inner, name)


def forwarded(name):
    def call(self, *given, **named):
        CALLS[name] += 1
        return getattr(self.inner, name)(*given, **named)

    return call


for name in TrainEngine.__abstractmethods__ - {"create", "check_model"}:
    setattr(CountingEngine, name, forwarded(name))
CountingEngine.__abstractmethods__ = frozenset()
'''


@pytest.fixture
def counting(tmp_path, monkeypatch):
    """The file, and what it counts."""
    monkeypatch.delitem(ENGINES, "counting", raising=False)
    file = tmp_path / "counting_engine.py"
    file.write_text(COUNTING)
    yield str(file)
    ENGINES.pop("counting", None)


def calls():
    return ENGINES["counting"].engine.create.__func__.__globals__["CALLS"]


def test_rl_trains_through_a_registered_engine_with_the_same_numbers(tiny_model, sums, tmp_path, counting):
    plain = run(tiny_model, sums, tmp_path / "plain")
    more = {"actor_rollout_ref__actor__strategy": "counting", "actor_rollout_ref__model__external_lib": counting}
    found = run(tiny_model, sums, tmp_path / "own", **more)
    assert metrics_of(found.path) == metrics_of(plain.path)
    counted = calls()
    assert counted["create"] == 1 and counted["update"] == 2 and counted["compute"] > 0 and counted["save"] == 1


@pytest.mark.parametrize("train", [sft, reward_model], ids=["sft", "reward model"])
def test_supervised_training_goes_through_it_too(tiny_model, tmp_path, counting, train):
    plain = train(tiny_model, tmp_path / "plain")
    found = train(tiny_model, tmp_path / "own", fsdp__strategy="counting", model__external_lib=counting)
    assert supervised_metrics(found.path) == supervised_metrics(plain.path)
    assert calls()["create"] == 1 and calls()["update"] == 2


RETURNING = """
from posttrain.engine.settings import register_train_engine
from posttrain.engine.torch_engine import TorchEngine


@register_train_engine("returning")
class ReturningEngine(TorchEngine):
    def update(self, data, loss, **options):
        made = super().update(data, loss, **options)
        return {returned}
"""


@pytest.fixture
def returning(tmp_path, monkeypatch):
    """Settings of a run whose engine returns an expression from `update`, for RL and for supervised training."""
    monkeypatch.delitem(ENGINES, "returning", raising=False)

    def settings(returned, actor="", model=""):
        file = tmp_path / "returning_engine.py"
        file.write_text(RETURNING.replace("{returned}", returned))
        return {f"{actor or 'fsdp__'}strategy": "returning", f"{model}model__external_lib": str(file)}

    yield settings
    ENGINES.pop("returning", None)


def rl_settings(returning, returned):
    return returning(returned, "actor_rollout_ref__actor__", "actor_rollout_ref__")


NOT_RETURNED = r"The train engine ReturningEngine: its `update` "


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("made | {'optimizer_steps': 1.0}", "returns `optimizer_steps`, which is a metric of posttrain already"),
        ("made | {'policy_loss': 1.0}", "returns `policy_loss`, which is a metric of posttrain already"),
        ("{'lr': 1.0}", "returns no grad_norm and no skipped"),
        ("made | {'steps': 'one'}", "returns 'one' as `steps`, which is no number"),
        ("None", "returns NoneType, and no dict"),
    ],
)
def test_what_update_may_not_return_ends_an_rl_run_with_the_engine_and_the_key(
    tiny_model, sums, tmp_path, returning, returned, said
):
    with pytest.raises(UserError, match=NOT_RETURNED + said):
        run(tiny_model, sums, tmp_path / "out", **rl_settings(returning, returned))


@pytest.mark.parametrize("train", [sft, reward_model], ids=["sft", "reward model"])
@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("made | {'rows': 1.0}", "returns `rows`, which is a metric of posttrain already"),
        ("made | {'steps': None}", "returns None as `steps`, which is no number"),
    ],
)
def test_it_ends_supervised_training_too(tiny_model, tmp_path, returning, train, returned, said):
    with pytest.raises(UserError, match=NOT_RETURNED + said):
        train(tiny_model, tmp_path / "out", **returning(returned))


def test_an_engines_own_number_is_logged_by_role(tiny_model, sums, tmp_path, returning):
    ran = run(tiny_model, sums, tmp_path / "out", **rl_settings(returning, "made | {'steps': 3.0}"))
    assert [line["actor/steps"] for line in metrics_of(ran.path)] == [3.0, 3.0]


@pytest.mark.parametrize("train", [sft, reward_model], ids=["sft", "reward model"])
def test_all_metrics_of_a_supervised_step_are_taken(tiny_model, tmp_path, train):
    *_, line = supervised_metrics(train(tiny_model, tmp_path / "out").path)
    names = {key.removeprefix("train/") for key in line if key.startswith("train/")}
    assert names - {"grad_norm", "lr"} <= set(TAKEN)


def test_an_engine_that_the_module_does_not_register_ends_the_run_before_a_model_is_loaded(tiny_model, tmp_path):
    (tmp_path / "empty.py").write_text("")
    said = r"fsdp\.strategy=counting: there is no such train engine; known: fsdp, fsdp2, megatron\."
    with pytest.raises(UserError, match=said):
        sft(tiny_model, tmp_path / "out", fsdp__strategy="counting", model__external_lib=str(tmp_path / "empty.py"))


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="there is a train engine called 'fsdp2' already"):
        register_train_engine("fsdp2")(object)
    assert train_engine("fsdp2", RL).engine is None, "which engine/registry.py has the class of"
