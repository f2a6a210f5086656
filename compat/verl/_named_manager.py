"""A reward manager of one's own, named on the command line: `reward_model.reward_manager=mine`, or a class of a file by
`reward_manager.name` and `reward_manager.module.path`. verl's own managers are left to posttrain's settings."""

from __future__ import annotations

from typing import Any

BUILT_IN = ("naive", "batch", "prime", "dapo", "naive_reward_loop", "limited", "rate_limited", "remote", "gdpo")
_NAME = ("reward_model.reward_manager", "reward_manager.name", "reward.reward_manager.name")
_FILE = ("reward_manager.module.path", "reward.reward_manager.module.path")
_SOURCE = ("reward_manager.source", "reward.reward_manager.source")


class NamedManager:
    """The manager that a command names."""

    def __init__(self, name: str, file: str | None) -> None:
        self.name, self.file = name, file

    @classmethod
    def taken_from(cls, args: list[str]) -> tuple[NamedManager | None, list[str]]:
        """(the manager if the command names one of its own, the arguments without it)."""
        pairs = {arg.lstrip("+").partition("=")[0]: arg.partition("=")[2] for arg in args}
        name = next((pairs[key] for key in _NAME if key in pairs), None)
        if name is None or name in BUILT_IN:
            return None, args
        file = next((pairs[key] for key in _FILE if key in pairs), None)
        taken = {*_NAME, *_FILE, *_SOURCE}
        return cls(name, file), [arg for arg in args if arg.lstrip("+").partition("=")[0] not in taken]

    def train(self, resolved: Any) -> Any:
        """The whole run, its responses scored by the manager."""
        from posttrain.trainer.constants_ppo import apply_environment

        apply_environment()
        from posttrain.trainer.run.external import import_external
        from verl._trainer import RayPPOTrainer

        external = resolved.value("actor_rollout_ref.model.external_lib")
        if external:
            import_external(external)
        self.config, self.cls = resolved.config, self._class()
        return RayPPOTrainer(resolved, reward_fn=self).fit()

    def _class(self) -> Any:
        from posttrain.errors import UserError
        from verl.utils.import_utils import load_extern_object
        from verl.workers.reward_manager import get_reward_manager_cls

        try:
            return load_extern_object(self.file, self.name) if self.file else get_reward_manager_cls(self.name)
        except ValueError as error:
            raise UserError(
                f"{error}. Yours is found when its file is loaded: actor_rollout_ref.model.external_lib=FILE, "
                f"or reward_manager.source=importlib reward_manager.name={self.name} reward_manager.module.path=FILE."
            ) from None

    def with_tokenizer(self, tokenizer: Any) -> Any:
        """The manager itself, made as verl makes it."""
        from verl.trainer.ppo.reward import get_custom_reward_fn
        from verl.utils.reward_score import default_compute_score

        score = get_custom_reward_fn(self.config) or default_compute_score
        return self.cls(tokenizer=tokenizer, num_examine=0, compute_score=score, reward_fn_key="data_source")
