"""Digests of what a run reads: data files, model folders, tokenizer, the user's own code. A resumed run compares them.

Every checkpoint has them in its trainer.json, under run.inputs: key of the config -> file -> size and sha256 (the one that
`sha256sum` prints). A file that is named by a key of the resume class `fixed` must not change. A change of the user's code,
and of a file that a resumed run may exchange (`data.val_files`), is printed, and the run goes on. Of the code, the file of
the named module is compared, and not the modules that it imports. The images that the rows of a data file name by path are
one entry, if the model reads images.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.checks.resume import Difference
from grpo_megatron.config import Config, ConfigError, Section
from grpo_megatron.config.problems import Problems, marked
from grpo_megatron.data.images import image_files
from grpo_megatron.data.rows import FORMATS, files_of_split, open_rows
from grpo_megatron.models.families import read_config
from grpo_megatron.report.progress import awaited
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.files import sha256_of
from grpo_megatron.storage.run_files import WARM_UP_FOLDER, on_disk, read_step
from grpo_megatron.untrusted import ReadError

# At a first start, threads of rank 0 hash the files while the run goes on. At a resume, the process that checks the config
# hashes them again before any rank meets another. One thread hashes 1.8 GB/s in memory, and 0.4 GB/s from a file on a busy
# machine of two cores (measured): THREADS hash 140 GB of weights in half a minute at 5 GB/s (estimated). With
# trainer.verify_checkpoints=sizes only the sizes of weights are compared.
THREADS = 8
OF_WEIGHTS = (".safetensors",)
OF_A_MODEL = (*OF_WEIGHTS, ".json", ".jinja", ".model", ".txt", ".py")  # weights, configs, tokenizer
START = 4
FUNCTION = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")  # my.module:function
ACCEPTING = (
    "put the old one back; start a new run in another trainer.output_dir; or set trainer.accept_changed_inputs=true"
)
Recorded = dict[str, dict[str, dict[str, Any]]]  # key of the config -> file, or module:function -> {size, sha256}


@dataclass(frozen=True)
class InputFile:
    """A file that a run reads. `name`: in a checkpoint, as the config has it.

    `images`: these are the images of its rows, whose paths are relative to this folder.
    """

    key: str
    name: str
    path: Path
    images: Path | None = None


def input_files(config: Config) -> Iterator[InputFile]:
    """Lists the files that the config names, in its order. Those that are missing are left to other checks."""
    reads_images = False
    with contextlib.suppress(ValueError):  # reported by another check
        reads_images = "vision_config" in read_config(config.model.path)
    for key, value in _values(config, ""):
        if key.startswith("trainer.") or key == "data.val_data":  # what the run writes; benchmarks of validations
            continue
        if isinstance(value, Path):
            for path in _files_at(key, value):
                if path.is_file():
                    yield InputFile(key, str(path), path)
                    if reads_images and path.suffix in FORMATS:
                        folder = value if value.is_dir() else value.parent
                        yield InputFile(key, f"{path} (its images)", path, folder)
        elif value.endswith((".yaml", ".yml")) and Path(value).is_file():  # a task
            yield InputFile(key, value, Path(value))
        elif (match := FUNCTION.fullmatch(value)) and (source := _source(match[1])) is not None:
            yield InputFile(key, value, source)


def _values(value: Any, key: str) -> Iterator[tuple[str, Path | str]]:
    """Paths and texts of a config with their keys. The items of a list have the key of the list."""
    if isinstance(value, Section):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _values(inner, f"{key}.{name}".removeprefix("."))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _values(item, key)
    elif isinstance(value, Path | str):
        yield key, value


def _files_at(key: str, path: Path) -> list[Path]:
    if key.startswith(("data.", "sft.")):
        with contextlib.suppress(ConfigError, ReadError, OSError):
            return files_of_split(path)
        return []
    return sorted(p for p in path.iterdir() if p.suffix in OF_A_MODEL) if path.is_dir() else [path]


def _source(module: str) -> Path | None:
    """Finds the file of a module, which may be imported for it. None: there is none, as for a name that only looks like one."""
    try:
        spec = importlib.util.find_spec(module)
    except Exception:  # noqa: BLE001 - whatever the user's package raises while it is imported: reported by another check
        return None
    return Path(spec.origin) if spec is not None and spec.origin and spec.has_location else None


class InputDigests:
    """Hashes the files that a run reads, in threads. Weights that `known` has, with the size of now, are taken from there."""

    def __init__(self, config: Config, known: Recorded | None = None) -> None:
        self.files = list(input_files(config))
        self._pool = ThreadPoolExecutor(THREADS, "input digests")
        self._entries: dict[tuple[Path, Path | None], Future[dict[str, Any]] | dict[str, Any]] = {}
        for file in self.files:
            old = (known or {}).get(file.key, {}).get(file.name)
            place = file.path, file.images
            if place in self._entries:
                continue
            if old and file.path.suffix in OF_WEIGHTS and old["size"] == file.path.stat().st_size:
                self._entries[place] = old
            elif file.images:
                self._entries[place] = self._pool.submit(_image_entry, file.path, file.images)
            else:
                self._entries[place] = self._pool.submit(_entry, file.path)

    def state(self) -> Recorded:
        """Returns plain JSON for a checkpoint. Waits for the threads. A file that cannot be read any more is left out."""
        recorded: Recorded = {}
        for file in self.files:
            entry = self._entries[file.path, file.images]
            with contextlib.suppress(OSError, ValueError):
                entry = entry if isinstance(entry, dict) else entry.result()
                recorded.setdefault(file.key, {})[file.name] = entry
        return recorded

    def close(self) -> None:
        """End the threads after the files that they are reading."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _entry(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": sha256_of(path)}


def _image_entry(path: Path, folder: Path) -> dict[str, Any]:
    """Returns the size of all image files that the rows name, and a digest of their digests in this order.

    `starts` has the first START hexadecimal digits of each digest, to name an image that has changed.
    """
    digest, size, starts = hashlib.sha256(), 0, []
    for _, image in _image_files(path, folder):
        digest.update((of_image := sha256_of(image)).encode())
        size += image.stat().st_size
        starts.append(of_image[:START])
    return {"size": size, "sha256": digest.hexdigest(), "starts": "".join(starts)}


def _image_files(path: Path, folder: Path) -> Iterator[tuple[int, Path]]:
    """Yields the images of a data file that are files, with the numbers of their rows."""
    rows = open_rows(path)
    for number, row in enumerate(rows.rows(0, len(rows))):
        yield from ((number, image) for image in (image_files(row, folder) if isinstance(row, dict) else ()))


def _changed_images(before: dict[str, Any], now: dict[str, Any], file: InputFile) -> str:
    """Says which images have changed, if the rows name as many as before."""
    old, new = before.get("starts", ""), now.get("starts", "")
    if file.images is None or len(old) != len(new):
        return ""
    changed = [i // START for i in range(0, len(new), START) if old[i : i + START] != new[i : i + START]]
    images = _image_files(file.path, file.images) if changed else iter(())
    named = next(itertools.islice(images, changed[0], None), None) if changed else None
    return f": {len(changed)} of its images, first {named[1]} of row {named[0]}" if named else ""


def recorded_inputs(checkpoint: Path) -> Recorded:
    """Returns the digests in a checkpoint; empty in one of an older version, and in one that cannot be read."""
    try:
        recorded: Recorded = read_step(checkpoint, "run")["run"].get("inputs", {})
    except StorageError:
        return {}
    return recorded


def input_problems(config: Config, *, prints: bool) -> Problems:
    """Yields inputs that are not those of the newest checkpoint, before ranks start. `prints` what has changed and may.

    A checkpoint whose trainer.json cannot be read is passed over: the one before it is of the same run.
    """
    trainer = config.trainer
    if trainer.resume_mode != "auto":
        return
    checkpoints = on_disk(trainer.output_dir) or on_disk(trainer.output_dir / WARM_UP_FOLDER)
    recorded = [(path, inputs) for path in reversed(checkpoints) if (inputs := recorded_inputs(path))]
    if not recorded:
        if checkpoints and prints:
            print(
                f"{checkpoints[-1]} has no digests of data, weights and code: whether they have changed is unknown",
                flush=True,
            )
        return
    checkpoint, old = recorded[0]
    with awaited(f"comparing data and weights with those of {checkpoint}", prints):
        digests = InputDigests(config, old if trainer.verify_checkpoints == "sizes" else None)
        try:
            new = digests.state()
        finally:
            digests.close()
    refused, printed = [], []
    files = {(file.key, file.name): file for file in digests.files}
    for key, name, text in _changes(old, new, files):
        is_fixed = Difference(key, None, None).resume_class == "fixed" and not FUNCTION.fullmatch(name)
        if is_fixed and not trainer.accept_changed_inputs:
            refused.append(f"{marked(key)}: {name} {text} since {checkpoint}")
        else:
            printed.append(f"changed since {checkpoint}: {key}: {name} {text}{' (accepted)' if is_fixed else ''}")
    if prints and printed:
        print("\n".join(printed), flush=True)
    yield from refused[:-1]
    yield from (f"{problem}; {ACCEPTING}" for problem in refused[-1:])


def _changes(
    old: Recorded, new: Recorded, files: Mapping[tuple[str, str], InputFile]
) -> Iterator[tuple[str, str, str]]:
    """Yields (key, name, what has changed). A key that is set for the first time, or no longer, is a change of the config."""
    for key in (key for key in new if key in old):
        may_differ = Difference(key, None, None).resume_class != "fixed"  # in their names: a change of the config
        for name in sorted({*old[key], *new[key]}):
            before, now = old[key].get(name), new[key].get(name)
            if before is None or now is None:
                if not may_differ and not FUNCTION.fullmatch(name):
                    yield key, name, "is new" if before is None else "is gone"
            elif before["sha256"] != now["sha256"]:
                facts = f"{before['size']:,} bytes -> {now['size']:,} bytes"
                if before["size"] == now["size"]:
                    facts = (
                        f"sha256 {before['sha256'][:12]}... -> {now['sha256'][:12]}..., {now['size']:,} bytes as before"
                    )
                yield key, name, f"has changed ({facts}){_changed_images(before, now, files[key, name])}"
