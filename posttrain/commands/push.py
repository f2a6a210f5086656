"""`posttrain push`: a checkpoint on the Hugging Face hub, with a model card made from its run."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import UserError, first_line
from posttrain.texts import redact
from posttrain.tracking.curve import write_chart
from posttrain.tracking.loggers import main_metric, metrics_of_run
from posttrain.tracking.progress import waiting
from posttrain.tracking.rundir import flatten
from posttrain.tracking.safe_files import DamagedFile, read_settings
from posttrain.tracking.status import read_origin
from posttrain.yaml_text import dump_yaml

_REPO = re.compile(r"[\w.-]+/[\w.-]+")
_STEP = re.compile(r"global_step_(\d+)")


class PushError(UserError):
    """A model could not be published; the text says why and what to do."""


def main(args: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="posttrain push", description="Publish a checkpoint on the Hugging Face hub, with a model card of its run."
    )
    parser.add_argument("checkpoint", type=Path, help="a folder .../checkpoints/global_step_N")
    parser.add_argument("repo", help="OWNER/NAME on the hub; it is created if it does not exist")
    parser.add_argument("--private", action="store_true", help="create it as a private repository")
    parser.add_argument("--adapter", action="store_true", help="of a LoRA run: the adapter alone, in peft's format")
    parser.add_argument("--base", metavar="FOLDER", help="of a LoRA run: where the base model is, if it was moved")
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="write the files here and upload nothing")
    options = parser.parse_args(args)
    step = _checked(options.checkpoint, options.repo)
    # Everything is written locally first: an export that fails leaves no half-filled repository on the hub.
    with tempfile.TemporaryDirectory(prefix="posttrain-push-") as scratch:
        folder = options.folder or Path(scratch) / "model"
        with waiting():
            from posttrain.commands.export import export_checkpoint
        export_checkpoint(options.checkpoint, folder, adapter=options.adapter, base=options.base)
        write_card(folder, options.repo, options.checkpoint.resolve().parents[1], step)
        if options.folder:
            print(f"written: {folder}; nothing was uploaded")
        else:
            print(f"published: {_upload(folder, options.repo, private=options.private, step=step)}")
    return 0


def _checked(checkpoint: Path, repo: str) -> int:
    # Returns the step. Wrong arguments are reported before torch is imported, which takes seconds.
    if not _REPO.fullmatch(repo):
        raise PushError(f"`{repo}` is not a repository on the hub: give OWNER/NAME, for example me/my-model.")
    found = _STEP.fullmatch(checkpoint.resolve().name)
    if found is None or not checkpoint.is_dir():
        raise PushError(f"{checkpoint} is not a checkpoint. Name a folder .../checkpoints/global_step_N.")
    return int(found[1])


def _upload(folder: Path, repo: str, *, private: bool, step: int) -> str:
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    if get_token() is None:
        raise PushError("There is no token for the hub: run `hf auth login`, or set HF_TOKEN. Nothing was uploaded.")
    hub = HfApi()
    try:
        hub.create_repo(repo, private=private, exist_ok=True)
        hub.upload_folder(repo_id=repo, folder_path=folder, commit_message=f"Checkpoint of step {step}")
    except (HfHubHTTPError, OSError) as error:
        raise PushError(
            f"The hub did not take {repo}: {first_line(error)} Check the name, the token's right to write, and the "
            "connection; `--folder FOLDER` writes the files without uploading them."
        ) from error
    return f"{hub.endpoint}/{repo}"


# The README.md of a published model, made from its run directory: what it is, how it learnt, and how it was made.


CURVE = "curve.svg"
_MODEL_KEYS = ("actor_rollout_ref.model.path", "model.path", "model.partial_pretrain")
# What a reader asks first. All settings are in the published config.yaml.
_SHOWN = (
    *("algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode", "actor_rollout_ref.model.lora_rank"),
    *("actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.actor.use_kl_loss", "actor_rollout_ref.rollout.n"),
    *("actor_rollout_ref.rollout.temperature", "actor_rollout_ref.actor.ppo_mini_batch_size", "optim.lr"),
    *("model.lora_rank", "data.train_batch_size", "data.max_prompt_length", "data.max_response_length"),
    *("data.train_files", "trainer.seed"),
)


def write_card(folder: Path, repo: str, run: Path, step: int) -> Path:
    """Write README.md, the curve and the settings of `run` into the model folder; `step` is the checkpoint's."""
    settings = _settings(run)
    lines = [line for line in metrics_of_run(run) if line["step"] <= step]
    metric = main_metric(lines, least=2)  # one value makes no curve
    if metric is not None:
        points = [(line["step"], line[metric]) for line in lines if metric in line]
        series = {metric: ([x for x, _ in points], [y for _, y in points])}
        write_chart(folder / CURVE, series, title=f"{metric} by step", y_label=metric)
    if settings:
        (folder / "posttrain_config.yaml").write_text(dump_yaml(settings), encoding="utf-8")
    card = folder / "README.md"
    parts = (_front_matter(settings), _summary(repo, settings, step), _results(lines, metric), _usage(repo, folder))
    card.write_text("\n".join((*parts, _origin(run, flatten(settings)))), encoding="utf-8")
    return card


def _settings(run: Path) -> dict[str, Any]:
    try:
        return redact(read_settings(run / "config.yaml"))
    except (FileNotFoundError, DamagedFile):
        return {}


def _base(settings: Mapping[str, Any]) -> str | None:
    # The model that was trained: a name on the hub, or the last part of a local path: the rest is private.
    flat = flatten(settings)
    path = next((str(flat[key]) for key in _MODEL_KEYS if flat.get(key)), None)
    return None if path is None else path if _is_hub_name(path) else Path(path).name


def _is_hub_name(path: str) -> bool:
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).exists()


def _front_matter(settings: Mapping[str, Any]) -> str:
    base, estimator = _base(settings), flatten(settings).get("algorithm.adv_estimator")
    tags = ["posttrain", *(["reinforcement-learning", str(estimator)] if estimator else ["sft"])]
    lines = ["library_name: transformers", "pipeline_tag: text-generation", f"tags: {json.dumps(tags)}"]
    if base is not None and _is_hub_name(base):
        lines.append(f"base_model: {base}")
    return "\n".join(("---", *lines, "---"))


def _summary(repo: str, settings: Mapping[str, Any], step: int) -> str:
    base, estimator = _base(settings), flatten(settings).get("algorithm.adv_estimator")
    how = f"with {str(estimator).upper()}" if estimator else "by supervised training"
    what = f"`{base}`" if base else "A model"
    return f"\n# {repo.partition('/')[2]}\n\n{what}, trained {how} for {step} steps by posttrain.\n"


def _results(lines: list[dict[str, Any]], metric: str | None) -> str:
    if metric is None:
        return ""
    watched = [name for name in dict.fromkeys(key for line in lines for key in line) if name.startswith("val/")]
    known: list[str] = [metric, *watched, *(["reward_mean"] if any("reward_mean" in x for x in lines) else [])]
    names: list[str] = list(dict.fromkeys(known))
    rows = []
    for name in names[:8]:
        found = [(line["step"], line[name]) for line in lines if isinstance(line.get(name), int | float)]
        if found:
            rows.append(
                f"| `{name}` | {found[0][1]:.4g} (step {found[0][0]}) | {found[-1][1]:.4g} (step {found[-1][0]}) |"
            )
    table = "\n".join(("| metric | first | last |", "|---|---|---|", *rows))
    return f"![{metric} by step]({CURVE})\n\n{table}\n"


def _usage(repo: str, folder: Path) -> str:
    adapter = (folder / "adapter_config.json").is_file()
    package, kind = ("peft", "AutoPeftModelForCausalLM") if adapter else ("transformers", "AutoModelForCausalLM")
    load = f'from {package} import {kind}\n\nmodel = {kind}.from_pretrained("{repo}")'
    return f"## Use\n\n```python\n{load}\n```\n"


def _origin(run: Path, flat: Mapping[str, Any]) -> str:
    text = ["## How it was made", ""]
    starts = read_origin(run)
    if starts:
        newest = starts[-1]
        text += ["```bash", _command(str(starts[0].get("command", ""))), "```", ""]
        versions = newest.get("versions")
        if isinstance(versions, dict):
            shown = ("posttrain", "python", "torch", "transformers", "vllm")
            text += [
                "Versions: " + ", ".join(f"{name} {versions[name]}" for name in shown if name in versions) + ".",
                "",
            ]
        hardware = newest.get("hardware")
        if isinstance(hardware, dict):
            text += [f"Hardware: {', '.join(hardware.get('gpus') or [str(hardware.get('cpu'))])}.", ""]
    rows = [f"| `{key}` | {_cell(flat[key])} |" for key in _SHOWN if flat.get(key) is not None]
    if rows:
        text += [
            "| setting | value |",
            "|---|---|",
            *rows,
            "",
            "All settings: [posttrain_config.yaml](posttrain_config.yaml).",
        ]
    return "\n".join(text) + "\n"


def _cell(value: Any) -> str:
    # A value in a table; of files their names only.
    values = value if isinstance(value, list) else [value]
    return ", ".join(Path(str(item)).name if "/" in str(item) else str(item) for item in values).replace("|", "\\|")


def _command(line: str) -> str:
    # Without the folder of the interpreter, which is different everywhere.
    try:
        words = shlex.split(line)
    except ValueError:
        return line
    return shlex.join([Path(words[0]).name, *words[1:]]) if words else line
