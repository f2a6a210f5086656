"""`posttrain.config` works alone: without a package that knows the settings of other systems."""

import subprocess
import sys

PROGRAM = """
from posttrain import lazy
lazy.dialect_package = None
from posttrain.config import ConfigError, load_config
from posttrain.config.trees import REWARD_MODEL, SFT
good = load_config(["preset=embedded", "algorithm.kl_coef=0.1", "rollout.n=4"], environment=True)
print(good.value("actor_rollout_ref.rollout.n"), good.value("actor_rollout_ref.actor.kl_loss_coef"))
for tree in (SFT, REWARD_MODEL):
    print(load_config(["model.path=embedded", "optim.lr=1e-3"], tree=tree).value("optim.lr"))
try:
    load_config(["actor_rollout_ref.actor.use_dynamic_bsz=True", "trainer.sede=3", "--nope"])
except ConfigError as error:
    print(error)
import sys
print(any(name.startswith("posttrain.other_systems") for name in sys.modules), "torch" in sys.modules)
"""


def test_settings_are_loaded_and_other_systems_keys_are_unknown(tmp_path):
    run = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[:3] == ["4 0.1", "0.001", "0.001"] and lines[-1] == "False False"
    assert "3 problems in the configuration" in run.stdout and "did you mean `trainer.seed`?" in run.stdout
    assert "Unknown key `actor_rollout_ref.actor.use_dynamic_bsz`." in run.stdout
