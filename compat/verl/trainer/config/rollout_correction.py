"""The section `algorithm.rollout_correction`, and verl's presets of it."""

from __future__ import annotations

from typing import Any

from posttrain.config import root
from verl._config import BaseConfig

_TOKEN, _SEQUENCE, _NONE = ({"rollout_is": level} for level in ("token", "sequence", None))
_CLIP, _REINFORCE = ({"bypass_mode": True, "loss_type": loss} for loss in ("ppo_clip", "reinforce"))
_GEO, _K3 = {"rollout_rs": "seq_mean_k1"}, {"rollout_rs": "seq_mean_k3"}
_IS, _NARROW, _SMALL = (
    ("rollout_is_threshold", 2.0),
    ("rollout_rs_threshold", "0.999_1.001"),
    ("rollout_rs_threshold", 0.01),
)


def _preset(*parts: dict[str, Any], **arguments: tuple[str, Any]) -> Any:
    """A class method: these settings, and arguments with the setting and the default that each has."""

    def made(cls: type[Any], *given: Any, **named: Any) -> Any:
        values = {name: default for name, (_, default) in arguments.items()}
        values |= dict(zip(arguments, given, strict=False)) | named
        chosen = {key: value for part in parts for key, value in part.items()}
        return cls(**chosen, **{arguments[name][0]: value for name, value in values.items()})

    return classmethod(made)


class RolloutCorrectionConfig(BaseConfig):
    """Weights and rejection for the gap between the policy that sampled and the policy that is trained."""

    _section = root.RolloutCorrectionConfig
    _defaults = {  # noqa: RUF012
        "rollout_is": "sequence",
        "rollout_is_batch_normalize": False,
        "bypass_mode": False,
        "loss_type": "ppo_clip",
    }

    disabled = _preset(_NONE)
    decoupled_token_is = _preset(_TOKEN, threshold=_IS)
    decoupled_seq_is = _preset(_SEQUENCE, threshold=_IS)
    decoupled_seq_is_rs = _preset(
        _SEQUENCE, {"rollout_rs": "seq_sum_k1"}, is_threshold=_IS, rs_threshold=("rollout_rs_threshold", "0.5_2.0")
    )
    decoupled_geo_rs = _preset(_NONE, _GEO, rs_threshold=_NARROW)
    decoupled_geo_rs_seq_tis = _preset(_SEQUENCE, _GEO, is_threshold=_IS, rs_threshold=_NARROW)
    decoupled_geo_rs_token_tis = _preset(_TOKEN, _GEO, is_threshold=_IS, rs_threshold=_NARROW)
    decoupled_k3_rs = _preset(_NONE, _K3, rs_threshold=_SMALL)
    decoupled_k3_rs_seq_tis = _preset(_SEQUENCE, _K3, is_threshold=_IS, rs_threshold=_SMALL)
    decoupled_k3_rs_token_tis = _preset(_TOKEN, _K3, is_threshold=_IS, rs_threshold=_SMALL)
    bypass_ppo_clip = _preset(_NONE, _CLIP)
    bypass_ppo_clip_geo_rs = _preset(_NONE, _GEO, _CLIP, rs_threshold=_NARROW)
    bypass_ppo_clip_k3_rs = _preset(_NONE, _K3, _CLIP, rs_threshold=_SMALL)
    bypass_pg_is = _preset(_SEQUENCE, _REINFORCE, threshold=_IS)
    bypass_pg_geo_rs = _preset(_NONE, _GEO, _REINFORCE, rs_threshold=_NARROW)
    bypass_pg_geo_rs_seq_tis = _preset(_SEQUENCE, _GEO, _REINFORCE, is_threshold=_IS, rs_threshold=_NARROW)
    bypass_pg_geo_rs_token_tis = _preset(_TOKEN, _GEO, _REINFORCE, is_threshold=_IS, rs_threshold=_NARROW)

    @classmethod
    def decoupled_token_icepop(cls, threshold: float = 5.0, threshold_lower: float = 0.5) -> RolloutCorrectionConfig:
        """Weights outside the range become 0."""
        return cls(rollout_is="token", rollout_is_threshold=f"{threshold_lower}_{threshold}")

    @classmethod
    def bypass_pg_token_icepop(cls, threshold: float = 5.0, threshold_lower: float = 0.5) -> RolloutCorrectionConfig:
        return cls(rollout_is="token", rollout_is_threshold=f"{threshold_lower}_{threshold}", **_REINFORCE)
