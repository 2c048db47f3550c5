"""Changes of a resumed run: the differences between its config and inputs and the checkpoint's, and which may be made.

The class of a key is part of its type in config/. Keys that the checkpoint's config lacks are of a newer program version, and
are not compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.checks.methods import is_uncorrected
from grpo_megatron.config import Config, ConfigError, Section
from grpo_megatron.config.problems import Problems, counted, keys_of, marked
from grpo_megatron.config.section import ResumeClass, config_keys
from grpo_megatron.data.images import image_files
from grpo_megatron.data.rows import FORMATS, files_of_split, is_stream, open_rows
from grpo_megatron.models.families import read_config
from grpo_megatron.registry import FUNCTION
from grpo_megatron.report.progress import awaited
from grpo_megatron.rewards.teacher_server import ServerError, TeacherServer, identity_changes, teacher_server
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.files import sha256_of
from grpo_megatron.storage.run_files import STEP_FILE, WARM_UP_FOLDER, on_disk, read_step, steps_of
from grpo_megatron.untrusted import ReadError, redacted

RESUME_CLASSES = {key.name: key.resume for key in config_keys(Config)}
LONGEST_VALUE = 80  # characters of a value in a message
REMEDY = (
    "start a new run in another trainer.output_dir (with these weights: `grpo-megatron convert to-hf` makes a folder for"
    " model.path of a checkpoint), or put the old value back"
)


@dataclass(frozen=True)
class Difference:
    """A key with another value than in the checkpoint's config. `old` and `new` are plain JSON; None: null, or no such key."""

    key: str
    old: Any
    new: Any

    @property
    def resume_class(self) -> ResumeClass:
        """Returns the class of the longest part of the key that has one: a mapping's keys have that of the mapping."""
        names = self.key.split(".")
        candidates = (".".join(names[:end]) for end in range(len(names), 0, -1))
        return next(RESUME_CLASSES[name] for name in candidates if name in RESUME_CLASSES)

    def __str__(self) -> str:
        return f"{self.key} {_shown(self.old)} -> {_shown(self.new)}"

    def __format__(self, form: str) -> str:
        """Formats it with the key marked, for a message."""
        return f"{marked(self.key)} {_shown(self.old)} -> {_shown(self.new)}" if form == "marked" else str(self)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}... ({len(text)} characters)"


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[Difference]:
    """Lists the keys of `new` with another value, in the order of the config. Both are configs as plain JSON."""
    for name, value in new.items():
        key = f"{prefix}{name}"
        if key in RESUME_CLASSES:
            yield from _value_differences(key, old.get(name, value), value)
        elif isinstance(value, Mapping):
            yield from differences(old.get(name, {}), value, f"{key}.")


def _value_differences(key: str, old: Any, new: Any) -> Iterator[Difference]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted({*old, *new}):
            yield from _value_differences(f"{key}.{name}", old.get(name), new.get(name))
    elif old != new:
        yield Difference(key, old, new)


def resume_problems(config: Config) -> Problems:
    """Yields what the newest checkpoint on disk refuses, before ranks start. A damaged one is left to training/checkpoint.py."""
    checkpoints = on_disk(config.trainer.output_dir) if config.trainer.resume_mode == "auto" else []
    if checkpoints:
        try:
            saved = read_step(checkpoints[-1], "step", "config")
        except StorageError:
            return
        yield from refusals(checkpoints[-1], saved, config)


def check_resume(checkpoint: Path, config: Config) -> list[Difference]:
    """Returns the differences from the checkpoint's config. Raises ConfigError if one of them cannot be made."""
    saved = read_step(checkpoint, "step", "config")
    if problems := list(refusals(checkpoint, saved, config)):
        raise ConfigError(*problems)
    return list(differences(redacted(saved["config"]), config.record()))


def refusals(checkpoint: Path, content: Mapping[str, Any], config: Config) -> Problems:
    """Yields why the run cannot continue from `checkpoint`, whose trainer.json has this content."""
    done, total, saved = steps_of(checkpoint), config.trainer.total_training_steps, content["config"]
    if (written := content["step"]) != done:
        yield (
            f"{checkpoint} is the checkpoint after step {written}, by its {STEP_FILE}, under another step's name; rename it to"
            f" step_{written:06d}, or remove it"
        )
    if total < done:
        yield (
            f"{keys_of(config).trainer.total_training_steps} is less than the {done} steps that {checkpoint} has done; set it to"
            f" {done} or more, or another trainer.output_dir"
        )
    ahead = len((content.get("run", {}).get("collector") or {}).get("ahead", ()))
    if ahead and is_uncorrected(config):
        yield (
            f"{checkpoint} holds {counted(ahead, 'step')} that earlier weights have sampled (rollout.lag), and"
            f" {keys_of(config).algorithm.rollout_correction:key} has neither rollout_is nor rollout_rs, so that they would count"
            " as the policy's own; set rollout_is=token"
        )
    estimators = [saved.get("algorithm", {}).get("adv_estimator"), config.algorithm.adv_estimator]
    had_critic, has_critic = (advantage_estimators.facts(str(name)).needs_values for name in estimators)
    if has_critic and not had_critic:
        yield (
            f"{marked('algorithm.adv_estimator')} {estimators[0]} -> {estimators[1]}: {checkpoint} has no critic; put the"
            " old value back, or start a new run"
        )
    fixed = [d for d in differences(redacted(saved), config.record()) if d.resume_class == "fixed"]
    for difference in fixed:
        remedy = f"; {REMEDY}" if difference is fixed[-1] else ""
        yield f"{difference:marked}: cannot change when a run resumes, here from {checkpoint}{remedy}"


def announcement(changed: list[Difference], updates_done: int, total_updates: int) -> str:
    """Lines for the console: each applied difference, and where the policy is in a rebuilt schedule."""
    lines = ["changed since the checkpoint:", *(f"  {difference}" for difference in changed)]
    if any(d.resume_class == "schedule" and not d.key.startswith(("reward_model.", "critic.")) for d in changed):
        lines.append(f"  the policy's learning-rate schedule continues after update {updates_done} of {total_updates}")
    return "\n".join(lines)


# -- Digests of what a run reads: data files, model folders, tokenizer, the user's own code ----------------------------
# Every checkpoint has them in its trainer.json, under run.inputs: key of the config -> file -> size and sha256 (the one that
# `sha256sum` prints). A file that is named by a key of the resume class `fixed` must not change. A change of the user's code,
# and of a file that a resumed run may exchange (`data.val_files`), is printed, and the run goes on. Of the code, the file of
# the named module is compared, and not the modules that it imports. The images that the rows of a data file name by path are
# one entry, if the model reads images. So is a teacher's server: its version, and log-probabilities of fixed tokens.
#
# At a first start, threads of rank 0 hash the files while the run goes on. At a resume, the process that checks the config
# hashes them again before any rank meets another. One thread hashes 1.8 GB/s in memory, and 0.4 GB/s from a file on a busy
# machine of two cores (measured): THREADS hash 140 GB of weights in half a minute at 5 GB/s (estimated). With
# trainer.verify_checkpoints=sizes only the sizes of weights are compared.
THREADS = 8
OF_WEIGHTS = (".safetensors",)
OF_A_MODEL = (*OF_WEIGHTS, ".json", ".jinja", ".model", ".txt", ".py")  # weights, configs, tokenizer
START = 4
BACK = "put the old one back, or start a new run in another trainer.output_dir"
ACCEPTING = f"{BACK}; or go on with it: trainer.accept_changed_inputs=true"
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
    server: TeacherServer | None = None  # no file: the weights that it serves


def input_files(config: Config) -> Iterator[InputFile]:
    """Lists the files that the config names, in its order. Those that are missing are left to other checks."""
    for name, teacher in config.teachers.items():
        if teacher.url is not None and teacher.model is not None:
            with contextlib.suppress(ValueError):  # without its key, which another check reports
                server = teacher_server(name, teacher.model_copy(update={"retries": 2, "timeout_s": 60.0}), 0)
                yield InputFile(f"teachers.{name}", teacher.model, Path(teacher.url), server=server)
    reads_images = False
    with contextlib.suppress(ValueError):  # reported by another check
        reads_images = "vision_config" in read_config(config.model.path)
    for key, value in _values(config, ""):
        if key.startswith(("trainer.", "reward.budget.")) or key == "data.val_data":  # what the run writes; benchmarks
            continue
        if isinstance(value, Path) and not is_stream(value):
            for path in _files_at(key, value):
                if path.is_file():
                    yield InputFile(key, str(path), path)
                    if reads_images and path.suffix in FORMATS:
                        folder = value if value.is_dir() else value.parent
                        yield InputFile(key, f"{path} (its images)", path, folder)
        elif (text := str(value)).endswith((".yaml", ".yml")) and Path(text).is_file():  # a task
            yield InputFile(key, text, Path(text))
        elif (match := FUNCTION.fullmatch(text)) and (source := _source(match[1])) is not None:
            yield InputFile(key, text, source)


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
            if file.server is not None:
                self._entries[place] = self._pool.submit(file.server.identity)
            elif old and file.path.suffix in OF_WEIGHTS and old["size"] == file.path.stat().st_size:
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
            with contextlib.suppress(OSError, ValueError, ServerError):
                entry = entry if isinstance(entry, dict) else entry.result()
                recorded.setdefault(file.key, {})[file.name] = entry
        return recorded

    @property
    def is_complete(self) -> bool:
        """Returns True if `state` does not wait."""
        return all(isinstance(entry, dict) or entry.done() for entry in self._entries.values())

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


def input_problems(config: Config, *, prints: bool, is_right: bool = True) -> Problems:
    """Yields inputs that are not those of the newest checkpoint, before ranks start. `prints` what has changed and may.

    `is_right`: nothing else is wrong, so that the changed inputs can be accepted.

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
    refused, printed, may_accept = [], [], is_right
    files = {(file.key, file.name): file for file in digests.files}
    for key, name, text in _changes(old, new, files):
        is_fixed = Difference(key, None, None).resume_class == "fixed" and not FUNCTION.fullmatch(name)
        if is_fixed and not trainer.accept_changed_inputs:
            refused.append(f"{marked(key)}: {name} {text} since {checkpoint}")
            may_accept &= not name.endswith(OF_WEIGHTS) or "bytes as before" in text  # else probably of other shapes
        else:
            printed.append(f"changed since {checkpoint}: {key}: {name} {text}{' (accepted)' if is_fixed else ''}")
    if prints and printed:
        print("\n".join(printed), flush=True)
    yield from refused[:-1]
    yield from (f"{problem}; {ACCEPTING if may_accept else BACK}" for problem in refused[-1:])


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
            elif "logprobs" in before and "logprobs" in now:
                yield from ((key, name, text) for text in identity_changes(before, now))
            elif before["sha256"] != now["sha256"]:
                facts = f"{before['size']:,} bytes -> {now['size']:,} bytes"
                if before["size"] == now["size"]:
                    facts = (
                        f"sha256 {before['sha256'][:12]}... -> {now['sha256'][:12]}..., {now['size']:,} bytes as before"
                    )
                yield key, name, f"has changed ({facts}){_changed_images(before, now, files[key, name])}"
