"""Push: uploads a finished result to the hub, and nothing else of the output folder.

Owns the upload; promises that only names that a run itself writes go out, no checkpoint, optimizer state, summary or
log of a tracker among them, and that a failure is one line with the command to try again. `train.run` calls it when
everything is on the disk.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from coop.errors import CoopError, RecipeError
from train.saving.export import MERGED_NAME
from train.saving.output import RESULT_NAMES
from train.schema import HubSection


def check_login(hub: HubSection) -> None:
    """Raise RecipeError before training if an upload is asked for and nobody is logged in."""
    from huggingface_hub import get_token

    if hub.push and not get_token():
        raise RecipeError(
            "hub.push: nobody is logged in: type `hf auth login`, set HF_TOKEN, or hub.push=false"
        )


def list_files(output: Path) -> dict[str, Path]:
    """What is uploaded, by its name there: the merged model if there is one, else the folder's own weights."""
    merged = output / MERGED_NAME
    folder = merged if merged.is_dir() else output
    return {p.name: p for p in sorted(folder.iterdir()) if RESULT_NAMES.fullmatch(p.name) and p.is_file()}


def push_result(hub: HubSection, output: Path, say: Callable[[str], None]) -> None:
    """Upload the result of a finished run. Raises CoopError, and nothing here is changed."""
    from huggingface_hub import CommitOperationAdd, HfApi

    assert hub.repo_id is not None
    files = list_files(output)
    say(f"uploading {len(files)} files to {hub.repo_id}; if it is cut off: {upload_command(hub, output)}")
    try:
        api = HfApi()
        api.create_repo(hub.repo_id, private=hub.private, exist_ok=True)
        operations = [CommitOperationAdd(name, str(path)) for name, path in files.items()]
        commit = api.create_commit(hub.repo_id, operations, commit_message="fine-tuned with coop")
    except Exception as exc:  # whatever a network and its library raise, the result is whole here
        reason = (str(exc).strip().splitlines() or [type(exc).__name__])[0][:200]
        raise CoopError(
            f"the result is whole in {output}, but it could not be uploaded to {hub.repo_id}: {reason}; "
            f"try again with: {upload_command(hub, output)}"
        ) from exc
    say(f"uploaded to {commit.repo_url}")


def upload_command(hub: HubSection, output: Path) -> str:
    """What uploads the same files later."""
    weights = output / MERGED_NAME if (output / MERGED_NAME).is_dir() else output
    includes = [part for name in sorted(list_files(output)) for part in ("--include", name)]
    private = ["--private"] if hub.private else []
    return shlex.join(["hf", "upload", str(hub.repo_id), str(weights), ".", *private, *includes])
