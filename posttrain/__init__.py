"""posttrain: RL post-training of language models. `posttrain.train(...)` does what the `posttrain` command does."""

from typing import TYPE_CHECKING, Any

from posttrain import moved, plugins
from posttrain.version import __version__

plugins.dialect = "posttrain.other_systems"
plugins.checks = (
    "posttrain.data.own_dataset",
    "posttrain.data.rows",
    "posttrain.engine.megatron.entry",  # it registers its engine
    "posttrain.engine.settings",
    "posttrain.rollout.engine_kwargs",
    "posttrain.rollout.server.settings",
    "posttrain.conversations.settings",
    "posttrain.models.folders",
)

__all__ = ["DataProto", "__version__", "train"]

if TYPE_CHECKING:
    from posttrain.api import train
    from posttrain.protocol import DataProto

moved.install()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # what is imported only when it is asked for can be found, too


def __getattr__(name: str) -> Any:
    """Heavy parts are imported when they are first asked for, so that `import posttrain` is instant."""
    if name == "train":
        from posttrain.api import train

        return train
    if name == "DataProto":
        from posttrain.protocol import DataProto

        return DataProto
    raise AttributeError(f"module 'posttrain' has no attribute {name!r}")
