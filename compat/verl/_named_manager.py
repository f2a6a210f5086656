"""A reward manager of one's own, named on the command line: `reward_model.reward_manager=mine`, or a class of a file by
`reward_manager.name` and `reward_manager.module.path`. verl's own managers are left to posttrain's settings."""

from __future__ import annotations

import copy
from typing import Any

BUILT_IN = ("naive", "prime", "dapo", "naive_reward_loop", "limited", "rate_limited", "remote", "gdpo")
"""Left to posttrain; `batch`, which calls one's function with lists, is ours as verl has it."""
_NAME = ("reward_model.reward_manager", "reward_manager.name", "reward.reward_manager.name")
_FILE = ("reward_manager.module.path", "reward.reward_manager.module.path")
_KWARGS = ("reward_model.reward_kwargs.", "reward.reward_kwargs.", "reward.reward_manager.reward_kwargs.")
_SOURCE = ("reward_manager.source", "reward.reward_manager.source")


class NamedManager:
    """The manager that a command names."""

    def __init__(self, name: str, file: str | None, kwargs: dict[str, Any]) -> None:
        self.name, self.file, self.kwargs = name, file, kwargs

    @classmethod
    def taken_from(cls, args: list[str]) -> tuple[NamedManager | None, list[str]]:
        """(the manager if the command names one of its own, the arguments without it)."""
        pairs = {arg.lstrip("+").partition("=")[0]: arg.partition("=")[2] for arg in args}
        name = next((pairs[key] for key in _NAME if key in pairs), None)
        if name is None or name in BUILT_IN:
            return None, args
        file = next((pairs[key] for key in _FILE if key in pairs), None)
        kwargs = {key: value for key, value in pairs.items() if key.startswith(_KWARGS)}
        taken = {*_NAME, *_FILE, *_SOURCE, *kwargs}
        rest = [arg for arg in args if arg.lstrip("+").partition("=")[0] not in taken]
        return cls(name.strip("\"'"), file, _nested(kwargs)), rest

    def train(self, resolved: Any) -> Any:
        """The whole run, its responses scored by the manager."""
        from posttrain.trainer.constants_ppo import apply_environment

        apply_environment()
        from posttrain.external import import_external
        from verl._trainer import RayPPOTrainer

        external = resolved.value("actor_rollout_ref.model.external_lib")
        if external:
            import_external(external)
        self.config, self.cls = copy.deepcopy(resolved.config), self._class()
        own = resolved.config.custom_reward_function  # the manager calls it, not posttrain's reward workers
        if own.path:
            print(f"note: the reward manager {self.name} calls {own.name or 'compute_score'} of {own.path}.")
            own.path = own.name = None
        return RayPPOTrainer(resolved, reward_fn=self).fit()

    def _class(self) -> Any:
        from posttrain.errors import UserError
        from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
        from verl.utils.import_utils import load_extern_object
        from verl.workers.reward_manager import get_reward_manager_cls

        try:
            if self.file:
                return load_extern_object(self.file, self.name)
            return REWARD_MANAGER.get(self.name) or get_reward_manager_cls(self.name)
        except ValueError as error:
            raise UserError(
                f"{error}. Yours is found when its file is loaded: actor_rollout_ref.model.external_lib=FILE, "
                f"or reward_manager.source=importlib reward_manager.name={self.name} reward_manager.module.path=FILE."
            ) from None

    def with_tokenizer(self, tokenizer: Any) -> Any:
        """The manager itself, made as verl makes it."""
        from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase, WholeBatch
        from verl.trainer.ppo.reward import get_custom_reward_fn
        from verl.utils.reward_score import default_compute_score

        score = get_custom_reward_fn(self.config) or default_compute_score
        if issubclass(self.cls, RewardManagerBase):
            return WholeBatch(self.cls(self._settings(), tokenizer, score))
        return self.cls(
            tokenizer=tokenizer, num_examine=0, compute_score=score, reward_fn_key="data_source", **self.kwargs
        )

    def _settings(self) -> Any:
        """The run's settings with `reward.reward_kwargs`, as managers of single responses read them."""
        from omegaconf import OmegaConf

        tree = self.config.to_dict()
        return OmegaConf.create(tree | {"reward": tree["reward"] | {"reward_kwargs": self.kwargs}})


def _nested(settings: dict[str, str]) -> dict[str, Any]:
    """`reward_kwargs.a.b=1` as verl hands it over: {"a": {"b": 1}}, readable by attribute too."""
    from omegaconf import OmegaConf

    dotted = [f"{key.partition('reward_kwargs.')[2]}={value}" for key, value in settings.items()]
    return dict(OmegaConf.from_dotlist(dotted))  # pyright: ignore
