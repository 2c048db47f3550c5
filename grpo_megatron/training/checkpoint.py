"""Checkpoints: one directory a step, complete or absent, and believed only when it is what it was when written.

    output_dir/checkpoints/step_000020/
        state/          Megatron-Core distributed checkpoint: policy, optimizer, random state of every rank
        trainer.json    step, schedule, config, world
        manifest.json   size and sha256 of every file above; written last

Everything is written to a hidden sibling that is renamed when every rank is done, so a directory with the final name is
complete. The data position is the step: samplers are pure functions of it.

Damage (a lost, short or changed file) is looked for before a run resumes. A damaged checkpoint is renamed to
step_000020.damaged, with a warning, and the one before it is taken. Hashing is shared: a rank hashes the files that it
has written, which are still in its page cache, and at a resume every n-th file. sha256 does about 1.5 GB/s a core: of the 1 TB
of a 70B model with Adam (2 + 12 bytes a parameter) each of 64 ranks has 15 GB, some 10 s at a save, and at a resume the
file system's time to read the checkpoint once more. trainer.verify_checkpoints=sizes spares the latter.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from grpo_megatron.config import Config, ConfigError
from grpo_megatron.models import state as model_state
from grpo_megatron.models.policy import Policy
from grpo_megatron.parallel.disk import on_every_rank, on_first_rank
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.atomic import PARTIAL, REPLACED, partial_of, publish_folder, write_file
from grpo_megatron.storage.manifest import MANIFEST_FILE, check_sizes, read_manifest, sha256_of, write_manifest

STEP_FILE = "trainer.json"
NAME = re.compile(r"step_\d+")
DAMAGED = ".damaged"
log = logging.getLogger(__name__)


class Part(Protocol):
    """Something beside the policy that has a folder of its own in a checkpoint. Both methods are collective."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path, *, same_world: bool) -> None: ...


class Checkpoints:
    """The checkpoints of one output folder. `keep`: how many of the newest to keep, None for all."""

    def __init__(
        self, output_dir: Path, mesh: Mesh, keep: int | None, verify: Literal["full", "sizes"] = "full"
    ) -> None:
        self.root, self.mesh, self.keep, self.verify = output_dir / "checkpoints", mesh, keep, verify
        self.last: Path | None = None  # that this run has saved or loaded

    # -- looking -------------------------------------------------------------------------------------------------------

    def newest(self) -> Path | None:
        """Collective: the newest undamaged checkpoint, None without any. Raises ConfigError when all are damaged."""
        for path in self._seen_by_first_rank(lambda: on_disk(self.root.parent)[::-1]):
            problems = self._damage(path)
            if not problems:
                return path
            if self.mesh.rank == 0:
                self._set_aside(path, problems)
        if damaged := self._seen_by_first_rank(lambda: sorted(self.root.glob(f"*{DAMAGED}"))):
            raise ConfigError(
                f"no undamaged checkpoint is left in {self.root}, only {', '.join(p.name for p in damaged)}; put one"
                " back, or remove them (or set trainer.resume_mode=disable) to start from the beginning"
            )
        return None

    def _damage(self, path: Path) -> list[str]:
        """Collective: what differs from the manifest, on every rank the same list; empty when nothing does."""
        mine: list[str] = []
        try:
            files = read_manifest(path) or {}
            if self.mesh.rank == 0 and not check_sizes(path):
                mine.append(f"it has no {MANIFEST_FILE}")
            if self.verify == "full":
                for name, entry in sorted(files.items())[self.mesh.rank :: self.mesh.world_size]:
                    if sha256_of(path / name) != entry["sha256"]:
                        mine.append(f"{name} has changed since it was written (sha256)")
        except (StorageError, OSError) as error:
            mine.append(str(error))
        return list(dict.fromkeys(problem for part in self.mesh.all_gather(mine) for problem in part))

    def _set_aside(self, path: Path, problems: list[str]) -> None:
        aside = path.with_name(path.name + DAMAGED)
        log.warning("checkpoint is damaged, renamed to %s, and the one before it is tried: %s", aside, problems[0])
        for problem in problems[1:]:
            log.warning("  %s", problem)
        with contextlib.suppress(OSError):
            shutil.rmtree(aside, ignore_errors=True)  # one that was set aside before
            path.rename(aside)

    def _seen_by_first_rank(self, look: Callable[[], list[Path]]) -> list[Path]:
        return self.mesh.broadcast(look() if self.mesh.rank == 0 else [])

    # -- writing -------------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        policy: Policy,
        config: Config,
        run: dict[str, Any] | None = None,
        parts: Sequence[Part] = (),
    ) -> Path:
        """Collective: write the state after `step` steps, once. Raises RankError on every rank when the disk refuses.

        `run` is plain JSON that `run_state` gives back; each of `parts` writes a folder of its own into the checkpoint.
        """
        final = self.root / f"step_{step:06d}"
        if final == self.last:
            return final
        partial, task = partial_of(final), f"cannot write checkpoint {final}"
        on_first_rank(self.mesh, task, lambda: self._start(partial))
        model_state.save(policy, partial / "state")
        for part in parts:
            part.save(partial)
        own_hashes = on_every_rank(self.mesh, task, lambda: self._own_hashes(partial))
        hashes = {name: sha for rank_hashes in self.mesh.all_gather(own_hashes) for name, sha in rank_hashes.items()}
        content = {
            "step": step,
            "policy": policy.state(),
            "world_size": self.mesh.world_size,
            "config": config.model_dump(mode="json"),
            "run": run or {},
        }
        on_first_rank(self.mesh, task, lambda: self._publish(partial, final, content, hashes))
        self.last = final
        return final

    def _own_hashes(self, partial: Path) -> dict[str, str]:
        """File -> sha256 of the files that this rank has written; they are still in its page cache."""
        files = partial.rglob(f"__{self.mesh.rank}_*.distcp")
        return {file.relative_to(partial).as_posix(): sha256_of(file) for file in files}

    def _start(self, partial: Path) -> None:
        for ending in (PARTIAL, REPLACED):  # what a run leaves that is killed while it saves
            for leftover in self.root.glob(f".step_*{ending}"):
                shutil.rmtree(leftover, ignore_errors=True)
        (partial / "state").mkdir(parents=True)

    def _publish(self, partial: Path, final: Path, content: dict[str, Any], known: dict[str, str]) -> None:
        write_file(partial / STEP_FILE, json.dumps(content, indent=2) + "\n")
        write_manifest(partial, "training-step", known)  # hashes what is not known: the few small files of rank 0
        publish_folder(partial, final)
        if self.keep is not None:
            for old in on_disk(self.root.parent)[: -self.keep]:
                shutil.rmtree(old)

    # -- reading -------------------------------------------------------------------------------------------------------

    def load(self, path: Path, policy: Policy, parts: Sequence[Part] = ()) -> int:
        """Collective: restore the policy and the parts. Returns the number of steps it has done."""
        content = json.loads((path / STEP_FILE).read_text())
        same_world = content["world_size"] == self.mesh.world_size
        model_state.load(policy, path / "state", same_world=same_world)
        policy.load_state(content["policy"])
        for part in parts:
            part.load(path, same_world=same_world)
        self.last = path
        return int(content["step"])


def run_state(path: Path) -> dict[str, Any]:
    """What `save` was given as `run`."""
    return json.loads((path / STEP_FILE).read_text()).get("run", {})  # type: ignore[no-any-return]


def on_disk(output_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = (p for p in (output_dir / "checkpoints").glob("step_*") if NAME.fullmatch(p.name))
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def check_same_model(path: Path, config: Config) -> None:
    """Raise ConfigError when the checkpoint was written for another model folder."""
    theirs = json.loads((path / STEP_FILE).read_text())["config"]["model"]["path"]
    if Path(theirs) != config.model.path:
        raise ConfigError(
            f"{path} was written by a run with model.path={theirs}, this one has model.path={config.model.path}; "
            "set another trainer.output_dir or trainer.resume_mode=disable"
        )
