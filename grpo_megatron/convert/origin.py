"""Origin: the training step that a checkpoint belongs to, and which of its models the checkpoint holds.

step_000020/state                 policy          beside trainer.json
step_000020/critic/state          critic          beside critic.json
step_000020/reward_model/state    reward_model    beside pairs.json
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grpo_megatron.convert import ConvertError
from grpo_megatron.models.heads.folder import HEAD, HEAD_BIAS, HeadKind
from grpo_megatron.reading.json_text import read_json
from grpo_megatron.storage.step_folders import CRITIC_FILE, PAIRS_FILE, STEP_FILE

PartName = Literal["policy", "critic", "reward_model"]
MARK_FILES: dict[PartName, str] = {"policy": STEP_FILE, "critic": CRITIC_FILE, "reward_model": PAIRS_FILE}


@dataclass(frozen=True)
class Origin:
    """`folder` is the part's. `config` is the run's; empty where trainer.json cannot be read."""

    folder: Path
    part: PartName | None
    config: dict[str, Any]

    def start(self) -> Path | None:
        """The Hugging Face folder that the model started from. None: the config does not say."""
        keys = {"critic": "critic", "reward_model": "reward_model"}
        path = self._path(keys[self.part], "path") if self.part in keys else None
        return path or (None if self.part == "reward_model" else self._path("model", "path"))

    def tokenizer(self) -> Path | None:
        """The folder whose tokenizer the run exports. None: the config does not say."""
        return self._path("model", "tokenizer_path") or self._path("model", "path")

    def family(self) -> str | None:
        """`model.family`. None: the key is not set."""
        family = self._value("model", "family")
        return family if isinstance(family, str) else None

    def head(self, keys: set[str]) -> HeadKind | None:
        """The kind of scalar head of a checkpoint with these tensors. None: a language model. Raises ConvertError."""
        if self.part == "critic":
            return "value"
        if self.part == "reward_model":
            return "outcome"
        if HEAD not in keys:
            return None
        if HEAD_BIAS not in keys:
            return "outcome"
        if self.part == "policy":
            return "process"
        raise ConvertError(
            f"{self.folder} has neither {CRITIC_FILE} nor {STEP_FILE}: its scalar head may be of a critic or of a process"
            " reward model, which are exported differently; put back the file that the run wrote beside state/"
        )

    def _value(self, section: str, key: str) -> Any:
        values = self.config.get(section)
        return values.get(key) if isinstance(values, dict) else None

    def _path(self, section: str, key: str) -> Path | None:
        value = self._value(section, key)
        return self._resolved(Path(value)) if isinstance(value, str) else None

    def _resolved(self, path: Path) -> Path:
        """A relative path belongs to the folder that the run was started in, which may not be the current one.

        That folder is found where `trainer.output_dir` is relative too: it is above the checkpoint.
        """
        output_dir = self._value("trainer", "output_dir")
        if path.is_absolute() or not isinstance(output_dir, str) or Path(output_dir).is_absolute():
            return path
        for folder in self.folder.resolve().parents:
            if (started_in := _without_end(folder, Path(output_dir))) is not None and (started_in / path).is_dir():
                return Path(os.path.relpath(started_in / path))
        return path


def _without_end(folder: Path, end: Path) -> Path | None:
    """`folder` without its last parts, if they are those of `end`."""
    parts = [part for part in end.parts if part != "."]
    if not parts or ".." in parts or list(folder.parts[-len(parts) :]) != parts:
        return None
    return Path(*folder.parts[: -len(parts)])


def read_origin(data_folder: Path) -> Origin:
    """Of a checkpoint whose files are in `data_folder`."""
    folder = data_folder.parent if data_folder.name == "state" else data_folder
    part = next((part for part, mark in MARK_FILES.items() if (folder / mark).exists()), None)
    step = folder.parent if part in ("critic", "reward_model") else folder
    try:
        config = read_json(step / STEP_FILE)["config"]
    except (OSError, ValueError, KeyError, TypeError):
        config = None
    return Origin(folder, part, config if isinstance(config, dict) else {})
