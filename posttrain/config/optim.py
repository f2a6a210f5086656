"""Section `optim` of the actor and of the critic: optimizer and learning-rate schedule."""

from __future__ import annotations

from posttrain.config.parallel import ON_CPU, UNSHARDED
from posttrain.config.schema import Section, section
from posttrain.settings import BETAS, COUNT_OR_ALL, COUNT_OR_UNSET, POSITIVE, SCHEDULES, SHARE, ZERO_OR_MORE, setting


@section
class OptimConfig(Section):
    """AdamW and its schedule. Example: `actor_rollout_ref.actor.optim.lr=1e-6`."""

    lr: float = setting(1e-6, range=POSITIVE)
    """Learning rate after warm-up."""
    weight_decay: float = setting(0.01, range=ZERO_OR_MORE)
    """Decoupled weight decay, on matrices only (not on norms and biases)."""
    betas: list[float] = setting(factory=lambda: [0.9, 0.999], range=BETAS)
    """Decay of the two moment estimates."""
    eps: float = setting(1e-8, range=POSITIVE)
    """Added to the denominator of the update."""
    lr_warmup_steps: int = setting(-1, range=COUNT_OR_UNSET)
    """Updates (optimizer steps, of which a training step makes one per mini-batch and pass) of linear warm-up; -1 takes
    `lr_warmup_steps_ratio` of all of them."""
    lr_warmup_steps_ratio: float = setting(0.0, range=SHARE, idle=".lr_warmup_steps is set")
    """Share of all updates (optimizer steps) spent on warm-up."""
    lr_scheduler_type: str = setting("constant", choices=SCHEDULES)
    """After warm-up: `constant`, `linear` or `cosine`."""
    min_lr_ratio: float = setting(0.0, range=SHARE, idle=".lr_scheduler_type is constant")
    """`linear` and `cosine` end at this share of `lr`."""


@section
class FSDPConfig(Section):
    """Where weights and optimizer state lie between stages."""

    param_offload: bool = setting(False, idle=ON_CPU)
    """Keep the weights in host memory outside the stages that need them."""
    optimizer_offload: bool = setting(False, idle=ON_CPU)
    """Keep the optimizer state in host memory outside the update."""
    fsdp_size: int = setting(-1, range=COUNT_OR_ALL, idle=UNSHARDED)
    """Workers that weights and optimizer are cut over; where the run has more, groups of so many hold copies. -1 is all
    of them."""


@section
class RefFSDPConfig(Section):
    """Where the reference's weights lie between its passes."""

    param_offload: bool = setting(False, idle=ON_CPU)
    """Keep the reference's weights in host memory outside its pass."""
