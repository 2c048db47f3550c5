"""Models of the Hugging Face Hub by their ids: huggingface_hub fetches them, and finds what it has in its cache."""

from __future__ import annotations

import contextlib
import functools
import re
from pathlib import Path

from grpo_megatron.untrusted import ReadError, cut, read_json

INDEX = "model.safetensors.index.json"
OF_CONFIG = ("*.json", "*.model", "*.txt", "*.jinja")  # with the tokenizer's files


@functools.cache
def model_folder(path: Path, *, weights: bool = True) -> Path:
    """Find `path`, or the folder in the Hub's cache if there is no such folder and `path` is an id such as Qwen/Qwen2.5-7B.

    What the cache has is taken as it is, whatever the Hub has by now; else it is fetched, without `weights` only the
    files beside them. Raises ReadError.
    """
    if path.exists() or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(path)):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name, wanted = str(path), [*OF_CONFIG, *(["*.safetensors"] if weights else [])]
    with contextlib.suppress(LocalEntryNotFoundError, HFValidationError):
        folder = Path(snapshot_download(name, local_files_only=True))
        if not weights or _has_weights(folder):
            return folder
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))  # without a network, what the cache has of it
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = cut(" ".join(str(error).split()))
        raise ReadError(f"it is not a folder, and as an id of the Hub it cannot be fetched: {reason}") from error


def _has_weights(folder: Path) -> bool:
    """Tell whether every weight file is in the cache. An interrupted download leaves some out."""
    files = {"model.safetensors"}
    if (folder / INDEX).exists():
        files = set(read_json(folder / INDEX)["weight_map"].values())
    return all((folder / file).exists() for file in files)
