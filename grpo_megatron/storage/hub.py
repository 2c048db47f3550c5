"""Models and data sets by name: ids of the Hugging Face Hub, which are fetched or in its cache, and shapes for plans."""

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


# -- Data sets ---------------------------------------------------------------------------------------------------------

HUB_SET = "hub:"
_SET_FORM = f"{HUB_SET}OWNER/NAME/SPLIT@COMMIT or {HUB_SET}OWNER/NAME/CONFIG/SPLIT@COMMIT"
_SET = re.compile(rf"{HUB_SET}([\w.-]+/[\w.-]+)(?:/([\w.-]+))?/([\w.-]+)@(.+)")


@functools.cache
def data_files(name: str) -> list[Path]:
    """Find the Arrow files of `hub:OWNER/NAME[/CONFIG]/SPLIT@COMMIT`, which the package `datasets` fetches or has in its cache.

    Raises ReadError: another form, no commit, no package, no such set or split, no network and another commit in the cache.
    """
    match = _SET.fullmatch(name)
    if match is None or not re.fullmatch("[0-9a-f]{40}", match[4]):
        why = "has another form" if match is None else f"names {match[4]!r}, which may move"
        raise ReadError(f"{why}; write {_SET_FORM}, with the 40 hexadecimal digits of a commit of the data set")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ReadError("is read by the package datasets, which is not installed; pip install datasets") from error
    there = f"run it once where the network is, and bring its cache (HF_HOME), or `hf download {match[1]} --repo-type dataset"
    there = f"{there} --revision {match[4]} --local-dir FOLDER`, and name FOLDER/SPLIT"
    try:
        found = load_dataset(match[1], match[2], split=match[3], revision=match[4]).cache_files
    except Exception as error:
        raise ReadError(
            f"cannot be fetched: {cut(' '.join(str(error).split()))}; without a network, {there}"
        ) from error
    files = [Path(file["filename"]) for file in found]
    if not files or not all(
        match[4] in file.parts for file in files
    ):  # without a network: the latest commit in the cache
        raise ReadError(f"is of another commit in the cache ({', '.join(map(str, files[:1])) or 'in memory'}); {there}")
    return files
