"""`posttrain push`: a checkpoint on the Hugging Face hub, with a model card made from its run."""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from posttrain.errors import UserError, first_line
from posttrain.tracking.model_card import write_card
from posttrain.tracking.row import waiting

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
