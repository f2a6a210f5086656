"""Every other spelling of a setting, in one table: renamed keys, moved sections, keys that act on several settings
(resolved in `derived.py`), and keys whose feature is not built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from posttrain.config.closest import closest, longer_or_shorter, same_key, slips
from posttrain.config.dialect import Dialect, dialect
from posttrain.config.parallel import AS_THE_ACTOR, OF_THE_COMMAND, ROLLOUT_EACH, ROLLOUT_MACHINES, TOGETHER
from posttrain.config.reward_trainer import RewardTrainerConfig
from posttrain.config.root import PPOConfig
from posttrain.config.schema import Leaf, Section, leaf_of, leaves, sections
from posttrain.config.sft import SFTConfig
from posttrain.config.values import NULLS
from posttrain.yaml_text import parse_yaml

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"

MOVED_SECTIONS: dict[str, str] = {
    **{f"{place}.tool_config.": f"{_ROLLOUT}.multi_turn.tool_config." for place in ("rollout", _ROLLOUT)},
    **{f"{place}.megatron.": f"{_ACTOR}.megatron_config." for place in ("actor", _ACTOR)},
    "actor_rollout.ref.": "actor_rollout_ref.",
    "actor.": f"{_ACTOR}.",
    "rollout.": f"{_ROLLOUT}.",
    "ref.": "actor_rollout_ref.ref.",
    "model.": f"{_MODEL}.",
    "critic.model.fsdp_config.": "critic.fsdp_config.",
    "reward_model.model.fsdp_config.": "reward_model.fsdp_config.",
    "reward_model.overlong_buffer.": "reward.overlong_buffer.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.": "reward.overlong_buffer.",
    "reward.reward_kwargs.overlong_buffer_cfg.": "reward.overlong_buffer.",
}
"""Prefix -> prefix; applied before the renames below. The first that fits is taken."""


@dataclass(frozen=True)
class FreeDict:
    """A setting that is a free dict, into which keys outside of it write, too: one that is given whole does not
    replace what these say."""

    switch: str = ""
    """`KEY=True` is `KEY.switch=True`."""
    named_by: str = ""
    """`KEY=TEXT` is `KEY.named_by=TEXT`."""

    def inner_name(self, value: Any) -> str:
        """`.name` of the inner key that a plain value means; empty where it means the dict itself."""
        if self.switch and str(value).lower() in ("true", "false"):
            return f".{self.switch}"
        is_name = isinstance(value, str) and value.lower() not in NULLS and not value.startswith("{")
        return f".{self.named_by}" if self.named_by and is_name else ""

    def split(self, value: Any) -> dict[str, Any] | None:
        """A dict, also one that is written out; None for all else, which is judged where its type is known."""
        if isinstance(value, str) and value.startswith("{") and "${" not in value:
            try:
                value = parse_yaml(value)
            except ValueError:
                return None
        return value if isinstance(value, dict) else None


FREE_DICTS: dict[str, FreeDict] = {
    f"{_ROLLOUT}.multi_turn": FreeDict(switch="enable"),
    **{f"{_ROLLOUT}.{name}": FreeDict() for name in ("engine_kwargs", "engine_kwargs.vllm", "engine_kwargs.sglang")},
    f"{_ROLLOUT}.agent": FreeDict(named_by="path"),
}

RENAMED: dict[str, str] = {
    "algorithm.name": "algorithm.adv_estimator",
    "algorithm.group_size": f"{_ROLLOUT}.n",
    "algorithm.clip_range": f"{_ACTOR}.clip_ratio",
    "algorithm.clip_ratio": f"{_ACTOR}.clip_ratio",
    f"{_ACTOR}.clip_range": f"{_ACTOR}.clip_ratio",
    "algorithm.entropy_coef": f"{_ACTOR}.entropy_coeff",
    "algorithm.entropy_coeff": f"{_ACTOR}.entropy_coeff",
    f"{_ACTOR}.entropy_coef": f"{_ACTOR}.entropy_coeff",
    f"{_ACTOR}.model_name": f"{_MODEL}.path",
    f"{_ACTOR}.learning_rate": f"{_ACTOR}.optim.lr",
    f"{_ACTOR}.weight_decay": f"{_ACTOR}.optim.weight_decay",
    f"{_ACTOR}.warmup_ratio": f"{_ACTOR}.optim.lr_warmup_steps_ratio",
    f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size": f"{_ACTOR}.ulysses_sequence_parallel_size",
    f"{_ACTOR}.max_grad_norm": f"{_ACTOR}.grad_clip",
    f"{_ACTOR}.policy_loss_fn": f"{_ACTOR}.policy_loss.loss_mode",
    f"{_ACTOR}.tau_pos": f"{_ACTOR}.policy_loss.tau_pos",
    f"{_ACTOR}.tau_neg": f"{_ACTOR}.policy_loss.tau_neg",
    f"{_ACTOR}.peft_config.lora_r": f"{_MODEL}.lora_rank",
    f"{_ACTOR}.peft_config.lora_rank": f"{_MODEL}.lora_rank",
    f"{_ACTOR}.peft_config.lora_alpha": f"{_MODEL}.lora_alpha",
    f"{_ACTOR}.peft_config.target_modules": f"{_MODEL}.target_modules",
    f"{_ACTOR}.peft_config.exclude_modules": f"{_MODEL}.exclude_modules",
    f"{_MODEL}.lora.type": f"{_ACTOR}.peft_config.peft_type",
    f"{_MODEL}.lora.rank": f"{_MODEL}.lora_rank",
    f"{_MODEL}.lora.alpha": f"{_MODEL}.lora_alpha",
    f"{_MODEL}.lora.target_modules": f"{_MODEL}.target_modules",
    f"{_MODEL}.lora.exclude_modules": f"{_MODEL}.exclude_modules",
    f"{_MODEL}.lora.adapter_path": f"{_MODEL}.lora_adapter_path",
    f"{_ROLLOUT}.engine": f"{_ROLLOUT}.name",
    f"{_ROLLOUT}.max_new_tokens": "data.max_response_length",
    f"{_ROLLOUT}.max_turns": f"{_ROLLOUT}.multi_turn.max_assistant_turns",
    f"{_ROLLOUT}.tools": f"{_ROLLOUT}.multi_turn.tools",
    f"{_ROLLOUT}.tensor_parallel_size": f"{_ROLLOUT}.tensor_model_parallel_size",
    "critic.learning_rate": "critic.optim.lr",
    "reward_model.micro_batch_size": "reward_model.micro_batch_size_per_gpu",
    "reward.reward_fn": "custom_reward_function.path",
    "trainer.reward_fn.path": "custom_reward_function.path",
    "trainer.reward_fn.name": "custom_reward_function.name",
    "data.train_path": "data.train_files",
    "data.val_path": "data.val_files",
    "data.tool_config_path": f"{_ROLLOUT}.multi_turn.tool_config_path",
    "trainer.save_steps": "trainer.save_freq",
    "trainer.n_workers": "trainer.n_gpus_per_node",
    "trainer.micro_batch_size": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    "trainer.gradient_accumulation_steps": "trainer.gradient_accumulation",
}

DERIVED: dict[str, Any] = {
    **OF_THE_COMMAND,
    TOGETHER: bool,
    ROLLOUT_MACHINES: int,
    ROLLOUT_EACH: int,
    "algorithm.kl_coef": float,
    "trainer.gradient_accumulation": int,
    "reward.type": str,
    "trainer.reward_fn.type": str,
    f"{_ACTOR}.peft_config.peft_type": str,
    f"{_ROLLOUT}.enable_lora": bool,
    **dict.fromkeys(AS_THE_ACTOR, int),
}
"""Keys that set or check other settings, with their type; `derived.py` says how."""

_SFT = "these are settings of supervised training (`posttrain sft`)"
NOT_BUILT: dict[str, str] = {
    "training.learning_rate": f"{_SFT}; here the learning rate is {_ACTOR}.optim.lr",
    "training.num_train_epochs": f"{_SFT}; here the number of epochs is trainer.total_epochs",
    "training.": _SFT,
    "fsdp.": f"{_SFT}; here the engine is {_ACTOR}.strategy",
}
"""Key, or prefix that ends in a dot -> what is said about it."""


class Canonical(NamedTuple):
    """What a spelling means."""

    key: str | None
    """Canonical or derived key; None if unknown or not built."""
    note: str = ""
    """A sentence to print, for a spelling that is a slip."""
    not_built: str = ""
    """Why the key cannot be used, if its feature is not built."""
    answer: Any = None
    """What the dialect says about a key of another system that is no setting here."""
    spelled: str = ""
    """The key that it answers, in its own section."""


_ROLES = ("actor_rollout_ref", "critic", "reward_model")
_PROGRAMS: dict[type[Section], tuple[str, str]] = {
    PPOConfig: ("`posttrain.trainer.main_ppo` (RL)", "posttrain config"),
    SFTConfig: ("`posttrain sft`", "posttrain config sft"),
    RewardTrainerConfig: ("`posttrain reward-model`", "posttrain config reward-model"),
}
"""Settings -> (their program, the command that lists them)."""


@dataclass(frozen=True)
class Spellings:
    """What the settings of one tree are called: their keys, the other spellings of the tables above, and those of other
    systems."""

    root: type[Section]
    program: str
    """Name of the tree's main file."""
    own_moved: Mapping[str, str] = field(default_factory=dict)
    own_renamed: Mapping[str, str] = field(default_factory=dict)
    derived: Mapping[str, Any] = field(default_factory=dict)
    not_built: Mapping[str, str] = field(default_factory=dict)
    free_dicts: Mapping[str, FreeDict] = field(default_factory=dict)

    @property
    def leaves(self) -> dict[str, Leaf]:
        return leaves(self.root)

    @property
    def sections(self) -> dict[str, type[Section]]:
        return sections(self.root)

    @property
    def dialect(self) -> Dialect:
        return dialect(self.program)

    @cached_property
    def moved(self) -> Mapping[str, str]:
        return {**self.own_moved, **self.dialect.moved}

    @cached_property
    def renamed(self) -> Mapping[str, str]:
        return {**self.own_renamed, **self.dialect.renamed}

    def leaf_of(self, key: str) -> Leaf | None:
        """The setting that a key names: itself, or the free-form dict that it lies in."""
        return leaf_of(self.root, key)

    def flatten(self, tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        """Nested mappings as dotted keys; free-form dict settings and empty mappings stay whole."""
        flat: dict[str, Any] = {}
        for name, value in tree.items():
            key = f"{prefix}{name}"
            leaf = self.leaves.get(key)
            if isinstance(value, dict) and value and not (leaf is not None and leaf.free_keys):
                flat.update(self.flatten(value, f"{key}."))
            else:
                flat[key] = value
        return flat

    def canonical(self, spelling: str) -> Canonical:
        """What a spelling means."""
        key, note = spelling, ""
        if key not in self.leaves and key not in self.renamed and key not in self.derived:
            for old, new in self.moved.items():
                if key.startswith(old):
                    key = new + key[len(old) :]
                    if old == "actor_rollout.ref.":
                        note = f"`{spelling}` is read as `{key}` (an underscore, not a dot, before `ref`)."
                    break
        key = self.renamed.get(key, key)
        if key in self.derived or key in self.leaves:
            return Canonical(key, note)
        if (answer := self.dialect.answer(key)) is not None:
            return Canonical(None, answer=answer, spelled=key)
        if self.leaf_of(key) is not None:
            return Canonical(key, note)
        for prefix, reason in self.not_built.items():
            if key == prefix.rstrip(".") or (prefix.endswith(".") and key.startswith(prefix)):
                return Canonical(None, not_built=reason)
        return Canonical(None)

    def nearest(self, spelling: str) -> str:
        """Advice for an unknown key: the program that has it, what a name of another system is here, the known spelling
        closest to it, or the sections."""
        if others := [name for root, (name, _) in _PROGRAMS.items() if spelling in leaves(root)]:
            same = [f"`{key}`" for key in self.leaves if key.endswith(f".{spelling}")]
            here = f"; did you mean {' or '.join(same)}?" if same else ", not of this program"
            return f"it is a key of {' and '.join(others)}{here}"
        if f"training.{spelling}" in {**self.renamed, **self.derived}:
            return f"did you mean {self._meaning(f'training.{spelling}')}?"
        if advice := self.dialect.advice(spelling):
            return advice
        if found := self._likely(spelling):
            return "did you mean " + " or ".join(self._meaning(key) for key in found[:3]) + "?"
        tops = ", ".join(f"`{name}`" for name in self.sections if "." not in name)
        return f"the sections are {tops}; `{_PROGRAMS[self.root][1]}` lists every key"

    def _likely(self, spelling: str) -> list[str]:
        """Keys that a spelling is likely to stand for, by the first rule that gives some.

        One part misspelt; the right name in another section; a name with words left out or added; a misspelt name in
        another section. Another role's setting is never meant: an actor's batches are not those of the reward model.
        """
        known = list(dict.fromkeys([*self.leaves, *self.renamed, *self.derived, *self.dialect.keys()]))
        if found := [key for key in known if same_key(spelling, key)]:
            return sorted(found, key=lambda key: slips(spelling, key))[:1]
        path, _, last = spelling.rpartition(".")
        top = path.split(".")[0]
        strangers = tuple(f"{role}." for role in _ROLES if role != top) if top in _ROLES else ()
        names = {key: key.rsplit(".", 1)[-1] for key in self.leaves if not key.startswith(strangers)}
        same = [key for key, name in names.items() if name == last]
        near = [key for key in same if top and key.startswith(f"{top}.")] or same
        if near and (not path or len(last) > 3) and len(near) <= 3:
            return near
        if found := [
            key for key in known if key.rpartition(".")[0] == path and longer_or_shorter(last, names.get(key, ""))
        ]:
            return found
        name = closest(last, names.values())
        found = [key for key, other in names.items() if other == name]
        return found if len(found) <= 3 else []

    def _meaning(self, key: str) -> str:
        target = self.canonical(key).key
        return f"`{key}`" if target in (None, key) else f"`{key}` (that is `{target}`)"


PPO_SPELLINGS = Spellings(PPOConfig, "ppo_trainer", MOVED_SECTIONS, RENAMED, DERIVED, NOT_BUILT, FREE_DICTS)
