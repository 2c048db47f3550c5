"""Folders of Hugging Face data sets: which files hold the rows of a split.

    FOLDER of `Dataset.save_to_disk`        state.json names its .arrow files; it is one split
    FOLDER of `DatasetDict.save_to_disk`    one such folder per split: FOLDER/train
    FOLDER as on the Hub                    train-00000-of-00002.parquet, ..., there or in FOLDER/data: FOLDER/train

`FOLDER/train` names a split in all of them. `FOLDER` alone is enough where there is one split only.
"""

from __future__ import annotations

import glob
import re
from pathlib import Path

from grpo_megatron.config import ConfigError
from grpo_megatron.reading import ReadError, path_problem, read_json, shown

SHARD = re.compile(r"(?P<split>[A-Za-z0-9_.]+?)(-\d{5}-of-\d{5}(-[0-9a-f]+)?)?\.(parquet|arrow|jsonl|json|csv)")
FILES = (".parquet", ".arrow", ".jsonl", ".json", ".csv")
STATE, SPLITS = "state.json", "dataset_dict.json"
OTHER_FILES = ("dataset_info", "dataset_infos", "state", "dataset_dict")  # .json files that hold no rows


def files_of_split(path: Path) -> list[Path]:
    """The files with the rows of `path`: itself, or those of a folder's only split, or of the split that it names.

    Raises ConfigError: no such file or folder, or a folder with several splits. Raises ReadError, OSError.
    """
    if path_problem(path) or path.suffix in FILES or path.is_file() or not (path.is_dir() or path.parent.is_dir()):
        return [path]
    if not path.exists():
        found = _splits_of(path.parent)
        if path.name in found:
            return found[path.name]
        if not found:
            return [path]  # reported where it is opened
        raise ConfigError(
            f"data folder {shown(str(path.parent))} has no split {path.name!r}; it has {', '.join(sorted(found))}"
        )
    splits = _splits_of(path)
    if not splits:
        raise ConfigError(
            f"data folder {shown(str(path))} holds no data set: neither {STATE} or {SPLITS} of `datasets`, nor files such as"
            " train-00000-of-00001.parquet; name a file, or a pattern"
        )
    if len(splits) > 1:
        names = ", ".join(str(path / name) for name in sorted(splits))
        raise ConfigError(f"data folder {shown(str(path))} has several splits; name one of {names}")
    return next(iter(splits.values()))


def is_there(path: Path) -> bool:
    """Whether the file, folder or split exists."""
    if path_problem(path):
        return False
    return path.exists() or (path.parent.is_dir() and path.name in _splits_of(path.parent))


def _splits_of(folder: Path) -> dict[str, list[Path]]:
    """Split -> its files, in order."""
    if (folder / STATE).is_file():
        state = read_json(folder / STATE)
        names = [entry.get("filename") for entry in state.get("_data_files") or []] if isinstance(state, dict) else []
        if not names or not all(isinstance(name, str) for name in names):
            raise ReadError(f"holds a {STATE} without _data_files, so it is no data set that was saved whole")
        return {folder.name: [folder / name for name in names]}
    if (folder / SPLITS).is_file():
        names = read_json(folder / SPLITS).get("splits", [])
        present = {name: _splits_of(folder / name) for name in names if (folder / name).is_dir()}
        return {name: splits[name] for name, splits in present.items() if name in splits}
    found: dict[str, list[Path]] = {}
    for place in (folder / "data", folder):
        for file in sorted(place.glob(f"*{glob.escape('.')}*")) if place.is_dir() else []:
            match = SHARD.fullmatch(file.name)
            if match and match["split"] not in OTHER_FILES and file.is_file():
                found.setdefault(match["split"], []).append(file)
        if found:
            break
    return found
