"""`scripts/mutants/ignore`: the run reads the default of one setting; loading, checks and tests see what was set."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "scripts" / "mutants" / "ignore"


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("ignored_settings", FOLDER / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()
ignored = script.Ignored(f"{__name__}:Root", "critic.optim.lr")


@dataclass
class Section:
    def get(self, name: str) -> Any:
        return getattr(self, name)


script.patch(Section, ignored)


@dataclass
class Optim(Section):
    lr: float = 0.1


@dataclass
class Role(Section):
    optim: Optim = field(default_factory=Optim)
    betas: list[float] = field(default_factory=lambda: [0.9])
    free: dict[str, Any] = field(default_factory=dict)


@dataclass
class Root(Section):
    actor: Role = field(default_factory=Role)
    critic: Role = field(default_factory=Role)


def function_of(folder: str, name: str = "read") -> Any:
    """A function that stands in a file of this folder, and reads `config.X`."""
    code = f"import dataclasses\ndef {name}(section, name):\n    return getattr(section, name)\n"
    code += "def changed(section, **values):\n    return dataclasses.replace(section, **values)\n"
    names: dict[str, Any] = {}
    exec(compile(code, os.path.join(folder, "some_file.py"), "exec"), names)
    return names[name], names["changed"]


run, changed_by_the_run = function_of(script.PRODUCT)


@pytest.fixture
def config() -> Root:
    made = Root()
    made.actor.optim.lr, made.critic.optim.lr = 3.0, 5.0
    return made


@pytest.fixture
def ignoring(monkeypatch: pytest.MonkeyPatch):
    def use(key: str, **instead: Any) -> None:
        fresh = script.Ignored(f"{__name__}:Root", key, **instead)
        for name, value in vars(fresh).items():
            monkeypatch.setattr(ignored, name, value)

    return use


def test_the_run_reads_the_default_of_this_place_only(config):
    assert run(config.critic.optim, "lr") == 0.1 and run(config.actor.optim, "lr") == 3.0
    assert config.critic.optim.lr == 5.0, "a test reads what was set"
    assert function_of(str(ROOT / "tests"))[0](config.critic.optim, "lr") == 5.0


def test_the_library_between_counts_for_its_caller(config):
    path, _ = function_of("/usr/lib/python3")
    asked = changed_by_the_run(config, critic=config.critic)
    assert run(asked.critic.optim, "lr") == 5.0, "a section that the run makes is no setting of the user's"
    assert path(config.critic.optim, "lr") == 5.0
    assert changed_by_the_run(config.critic.optim).lr == 0.1 and dataclasses.replace(config.critic.optim).lr == 5.0


def test_what_the_configuration_hands_over_counts_as_read_by_the_run_unless_it_is_loading(config):
    for name, seen in (("helper", 0.1), (script.LOADER, 5.0)):
        code = "def caller(function, section):\n    return function(section, 'lr')\n"
        names: dict[str, Any] = {}
        exec(compile(code, os.path.join(script.PRODUCT, "caller.py"), "exec"), names)
        assert names["caller"](function_of(script.CONFIG, name)[0], config.critic.optim) == seen, name


def test_copies_and_processes_keep_the_place(config):
    run(config.critic.optim, "lr")
    for one in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert run(one.critic.optim, "lr") == 0.1 and run(one.actor.optim, "lr") == 3.0
    assert run(pickle.loads(pickle.dumps(config.actor.optim)), "lr") == 3.0


def test_a_section_that_a_test_makes_alone_counts_as_any_place_of_its_class():
    assert run(Optim(7.0), "lr") == 0.1
    assert run(Role(optim=Optim(7.0)).optim, "lr") == 0.1


def test_another_value_than_the_default_can_be_given(config, ignoring):
    ignoring("critic.optim.lr", value=9.0)
    assert run(config.critic.optim, "lr") == 9.0


def test_readers_cannot_change_a_default(config, ignoring):
    ignoring("actor.betas")
    run(config.actor, "betas").append(0.5)
    assert run(config.actor, "betas") == [0.9]


def test_a_key_of_a_free_form_setting_is_missing_for_the_run(config, ignoring):
    config.actor.free = {"vllm": {"seed": 3, "eager": True}}
    ignoring("actor.free.vllm.seed")
    assert run(config.actor, "free") == {"vllm": {"eager": True}} and config.actor.free["vllm"]["seed"] == 3
    ignoring("actor.free")
    assert run(config.actor, "free") == {}


def test_every_process_of_a_run_ignores_the_setting(tmp_path):
    program = f"""
from posttrain.config.root import PPOConfig
config = PPOConfig()
config.algorithm.gamma = 0.5
exec(compile("read = lambda: config.algorithm.gamma", {os.path.join(script.PRODUCT, "some_file.py")!r}, "exec"))
print(config.algorithm.gamma, read())
"""
    ignored_setting = {"root": "posttrain.config.root:PPOConfig", "key": "algorithm.gamma"}
    environment = {
        **os.environ,
        script.VARIABLE: json.dumps(ignored_setting),
        "PYTHONPATH": os.pathsep.join((str(FOLDER), str(ROOT))),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.split() == ["0.5", "1.0"], done.stderr
