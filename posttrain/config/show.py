"""A resolved configuration as text: YAML, or every key with its value, source and sentence. Secrets are masked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from posttrain.config.schema import leaves
from posttrain.config.values import is_secret
from posttrain.masking import MASK, mask_urls

if TYPE_CHECKING:
    from posttrain.config.resolved import Resolved


def masked(value: Any, key: str = "") -> Any:
    """The value with everything under a secret's name replaced."""
    if isinstance(value, dict):
        return {name: masked(item, str(name)) for name, item in value.items()}
    if isinstance(value, list):
        return [masked(item, key) for item in value]
    if is_secret(key) and value not in (None, ""):
        return MASK
    return mask_urls(value) if isinstance(value, str) else value


def to_yaml(resolved: Resolved) -> str:
    """The tree as YAML."""
    import yaml

    tree = masked(resolved.config.to_dict())
    for key, value in resolved.extra.items():
        *path, name = key.split(".")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[name] = masked(value, name)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def show(resolved: Resolved, *, prefix: str = "", changed_only: bool = False, sentences: bool = True) -> str:
    """Every key (under `prefix`; or only those that are not at their default) with value, source and sentence."""
    lines = [f"# defaults from {resolved.main_file}"]
    for key, leaf in leaves(type(resolved.config)).items():
        source = resolved.where(key)
        if not key.startswith(prefix) or (changed_only and source == "default"):
            continue
        lines.append(f"{key}: {_one_line(masked(resolved.value(key), key))}    # {source}")
        if sentences and leaf.sentence:
            lines.append(f"    {leaf.sentence}")
    for key, value in resolved.extra.items():
        if key.startswith(prefix):
            lines.append(f"{key}: {_one_line(masked(value, key))}    # your own section")
    if resolved.notes and not prefix:
        lines += ["", *(f"note: {note}" for note in resolved.notes)]
    return "\n".join(lines) + "\n"


def _one_line(value: Any) -> str:
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, width=100_000, sort_keys=False, allow_unicode=True)
    return text.strip().removesuffix("...").strip()


HELP = """posttrain.trainer.main_ppo: trains a language model by reinforcement learning (PPO, GRPO and their family).

    python -m posttrain.trainer.main_ppo KEY=VALUE ... [GROUP=CHOICE ...] [options]

options:
  --config-path, -cp DIR    folder of your own YAML files (relative to the working folder)
  --config-name, -cn NAME   main file (default: ppo_trainer); a file without `defaults:` is laid over the built-in one
  --config-dir, -cd DIR     a further folder of group files
  --cfg job|all             print the composed tree as YAML and leave
  --resolve                 with --cfg: the tree is always printed resolved
  --help, -h                this text

often set:
  algorithm.adv_estimator=grpo   actor_rollout_ref.model.path=MODEL   data.train_files=FILE
  actor_rollout_ref.rollout.n=5  trainer.total_epochs=15              preset=embedded (the small built-in task)

`posttrain config KEY=VALUE ...` prints every key with its value, where it was set, and one sentence.
"""
