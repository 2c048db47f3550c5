"""Models by name: ids of the Hugging Face Hub, which huggingface_hub fetches or has in its cache, and shapes for plans."""

from __future__ import annotations

import contextlib
import functools
import re
from pathlib import Path

from grpo_megatron.untrusted import ReadError, cut, read_json

INDEX = "model.safetensors.index.json"
PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
OF_CONFIG = ("*.json", "*.model", "*.txt", "*.jinja")  # with the tokenizer's files


def examples_folder(name: str = "examples") -> Path:
    """Finds `examples` or `slurm`: a wheel has them inside the package, a checkout beside it."""
    packaged = PACKAGE_FOLDER / name
    return packaged if packaged.is_dir() else PACKAGE_FOLDER.parent / name


def known_shapes() -> list[str]:
    """Lists the models whose config.json comes with the package, by name."""
    return sorted(path.parent.name for path in (examples_folder() / "models").glob("*/config.json"))


def known_shape(path: Path) -> Path | None:
    """Finds the folder with the config.json of the model that `path` names, where `path` itself is missing."""
    folder = examples_folder() / "models" / path.name
    return folder if not path.exists() and path.name in known_shapes() else None


@functools.cache
def model_folder(path: Path, *, weights: bool = True) -> Path:
    """Find `path`, or the folder in the Hub's cache if there is no such folder and `path` is an id such as Qwen/Qwen2.5-7B.

    What the cache has is taken as it is, whatever the Hub has by now; else it is fetched, without `weights` only the
    files beside them. Raises ReadError.
    """
    if path.exists() or path.parent.is_dir() or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(path)):
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
        if isinstance(error, LocalEntryNotFoundError) and "HF_HUB_OFFLINE" not in reason:
            reason = f"the Hub cannot be reached from here, and its cache lacks it; `hf download {name}` where the network is"
        raise ReadError(f"it is not a folder, and as an id of the Hub it cannot be fetched: {reason}") from error


def _has_weights(folder: Path) -> bool:
    """Tell whether every weight file is in the cache. An interrupted download leaves some out."""
    files = {"model.safetensors"}
    if (folder / INDEX).exists():
        files = set(read_json(folder / INDEX)["weight_map"].values())
    return all((folder / file).exists() for file in files)
