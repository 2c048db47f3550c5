"""Checkpoints: one folder per saved step. It is complete or absent, and it is verified before a run resumes from it.

state/                   Megatron-Core distributed checkpoint: policy, optimizer, random state of every rank
reward_model/, critic/   a model that is trained beside the policy: plain values in a JSON file, and its own state/
trainer.json             step, schedule, config, world size, data position, stored groups, KL coefficient
manifest.json            size and sha256 of every file above; written last
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from grpo_megatron.config import Config, ConfigError, LoraConfig
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import hf_shapes
from grpo_megatron.models.heads.scalar import ScalarPolicy
from grpo_megatron.models.lora.peft_folder import factor_shapes
from grpo_megatron.models.policy import Policy
from grpo_megatron.models.weights.sharded_state import Writes, load_sharded, save_sharded
from grpo_megatron.parallel.mesh import Mesh, RankError, on_every_rank, on_first_rank
from grpo_megatron.planning.parameters import DTYPE_BYTES, SAVED_OPTIMIZER_BYTES
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.files import (
    MANIFEST_FILE,
    check_sizes,
    check_space,
    clear_leftovers,
    partial_of,
    publish_folder,
    read_manifest,
    remove_folder,
    sha256_of,
    write_file,
    write_manifest,
)
from grpo_megatron.storage.run_files import IN_STEP_FILE, STEP_FILE, on_disk, read_step, read_stored, steps_of

DAMAGED = ".damaged"
log = logging.getLogger(__name__)


class TrainedModel:
    """A model that is trained beside the policy: the critic, or a reward model that learns.

    `folder_name` is its folder in a checkpoint, and `file_name` the JSON file in it.
    """

    model: ScalarPolicy
    folder_name: str
    file_name: str

    def content(self) -> Any:
        """Returns the plain values that the JSON file holds."""
        return self.model.state()

    def restore(self, content: Any) -> None:
        """Restore what `content` has returned."""
        self.model.load_state(content)

    def save(self, folder: Path, writes: Writes | None = None) -> None:
        """Write a new folder inside the existing `folder`.

        Collective. `writes`: see `save_sharded`. Raises RankError.
        """
        target, content = folder / self.folder_name, self.content()

        def write() -> None:
            target.mkdir()
            (target / self.file_name).write_text(json.dumps(content))

        on_first_rank(self.model.mesh, f"cannot write checkpoint {target}", write)
        with self.model.in_use():
            save_sharded(self.model, target / "state", writes)

    def load(self, folder: Path, *, same_world: bool) -> None:
        """Restore what `save` has written, in any layout. Collective. Raises RankError."""
        target = folder / self.folder_name
        task, file = f"cannot read checkpoint {target}", target / self.file_name
        content = on_every_rank(self.model.mesh, task, lambda: read_stored(file, {}))
        with self.model.in_use():
            load_sharded(self.model, target / "state", same_world=same_world)
        self.restore(content)

    def save_hf(self, target: Path, tokenizer_path: Path) -> None:
        """Write a Hugging Face folder, which `reward_model.path` or `critic.path` accepts. Collective."""
        with self.model.in_use():
            self.model.save_hf(target, tokenizer_path)


class PendingSave(threading.Thread):
    """A writer of this rank's files of one checkpoint from copies, while the run goes on. It does not communicate."""

    def __init__(
        self, step: int, writes: Writes, task: str, write: Callable[[], None], complete: Callable[[], None]
    ) -> None:
        super().__init__(name="checkpoint writer", daemon=True)
        self.step, self.writes, self.task, self.write, self.complete = step, writes, task, write, complete
        self.error = ""

    def run(self) -> None:
        try:
            self.write()
        except Exception as error:  # it must reach all ranks: a thread's error is only printed
            self.error = f"{self.task}: {type(error).__name__}: {error}"


class Checkpoints:
    """The checkpoints of one output folder. The newest `keep` are kept; None keeps all.

    All ranks write into a hidden folder, which rank 0 renames when every rank is done. `in_background`: the state is copied
    to the host, and a thread of each rank writes it while the run goes on. Between steps the ranks compare whether all
    threads are done; the main threads then complete the checkpoint. At most one save is under way.

    A resume looks for lost, truncated and changed files. A damaged checkpoint is renamed to step_000020.damaged, and the one
    before it is used. The ranks share the hashing: at a save each hashes the files that it has written, at a resume every
    n-th file. sha256 reads about 1.5 GB/s per core. A 70B model with Adam has 1 TB, 15 GB for each of 64 ranks: about 10 s
    at a save. A resume reads the checkpoint once more; trainer.verify_checkpoints=sizes avoids that.
    """

    def __init__(
        self,
        output_dir: Path,
        mesh: Mesh,
        keep: int | None,
        verify: Literal["full", "sizes"] = "full",
        *,
        in_background: bool = False,
    ) -> None:
        self.root, self.mesh, self.keep, self.verify = output_dir / "checkpoints", mesh, keep, verify
        self.in_background = in_background
        self.pending: PendingSave | None = None  # the save that is under way
        self.last: Path | None = None  # the last one that this run has saved or loaded

    # -- finding -------------------------------------------------------------------------------------------------------

    def newest(self) -> Path | None:
        """Returns the newest undamaged checkpoint; None if there is none at all.

        Collective. Raises ConfigError if all are damaged.
        """
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
        """Returns the differences from the manifest that any rank has found.

        The list is the same on every rank. Collective.
        """
        found: list[str] = []
        try:
            files = read_manifest(path) or {}
            if self.mesh.rank == 0 and check_sizes(path) is None:
                found.append(f"it has no {MANIFEST_FILE}")
            read_step(path, *IN_STEP_FILE)  # a file may be whole and still be none of ours
            if self.verify == "full":
                for name, entry in sorted(files.items())[self.mesh.rank :: self.mesh.world_size]:
                    if sha256_of(path / name) != entry["sha256"]:
                        found.append(f"{name} has changed since it was written (sha256)")
        except (StorageError, OSError) as error:
            found.append(str(error))
        return list(dict.fromkeys(problem for part in self.mesh.all_gather(found) for problem in part))

    def _set_aside(self, path: Path, problems: list[str]) -> None:
        aside = path.with_name(path.name + DAMAGED)
        log.warning("checkpoint is damaged, renamed to %s, and the one before it is tried: %s", aside, problems[0])
        for problem in problems[1:]:
            log.warning("  %s", problem)
        with contextlib.suppress(OSError):
            shutil.rmtree(aside, ignore_errors=True)  # from an earlier resume
            path.rename(aside)

    def _seen_by_first_rank(self, look: Callable[[], list[Path]]) -> list[Path]:
        """Returns what rank 0 finds. A shared file system may show the other ranks an older state. Collective."""
        return self.mesh.broadcast(look() if self.mesh.rank == 0 else [])

    # -- writing -------------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        policy: Policy,
        config: Config,
        run: dict[str, Any] | None = None,
        parts: Sequence[TrainedModel] = (),
        target: Path | None = None,
    ) -> Path:
        """Write the state after `step` steps, unless this run has saved it already. Returns its folder. Collective.

        `target`: a folder elsewhere, which is written in any case and never removed.

        `run` is plain JSON, which `run_state` returns. Each of `parts` writes its own folder into the checkpoint.
        With `in_background` the folder is there after a later `poll` or `wait`.
        Raises RankError on every rank when any rank cannot write.
        """
        final = target or self.root / f"step_{step:06d}"
        if target is None and self.pending is not None and self.pending.step == step:
            return final
        self.wait()
        if final == self.last and target is None:
            return final
        partial, task = partial_of(final), f"cannot write checkpoint {final}"
        self.on_first_rank(task, lambda: self._start(partial))
        writes = Writes(in_background=self.in_background)
        save_sharded(policy, partial / "state", writes)
        for part in parts:
            part.save(partial, writes)
        content = {
            "step": step,
            "policy": policy.state(),
            "world_size": self.mesh.world_size,
            "config": config.record(),
            "run": run or {},
        }
        text = json.dumps(content, indent=2) + "\n"  # now: the run changes what is in it

        def complete() -> None:
            writes.finish()
            newest = step if target is None else None
            is_there = self._complete(task, partial, final, text, writes.hashes(partial), newest)
            self.last, self.pending = final if target is None and is_there else self.last, None

        if self.in_background:
            self.pending = PendingSave(step, writes, task, lambda: self._write(writes, partial), complete)
            self.pending.start()
        else:
            complete()
        return final

    def poll(self) -> None:
        """Complete the save that is under way, if all ranks have written their files.

        Collective. Raises as `save` does.
        """
        if self.pending is None:
            return
        is_written = not self.pending.is_alive()
        try:
            self.mesh.agree(self.pending.error or self.pending.writes.problem())
            if all(self.mesh.all_gather(is_written)):
                self.pending.complete()
        except RankError:
            self.pending.join()  # nothing is written after the error
            self.pending = None
            raise

    def wait(self) -> None:
        """Wait until no save is under way. Collective. Raises as `save` does."""
        if self.pending is not None:
            self.pending.join()
            self.poll()

    def on_first_rank(self, task: str, action: Callable[[], object]) -> None:
        """Calls `action` on one rank of each folder. Collective. Raises RankError."""
        on_first_rank(self.mesh, task, action)

    def _write(self, writes: Writes, partial: Path) -> None:
        """Writes this rank's files in the background, without communication between ranks."""
        writes.write()

    def _complete(
        self, task: str, partial: Path, final: Path, text: str, hashes: dict[str, str], newest: int | None
    ) -> bool:
        """Makes a folder that all ranks have written a checkpoint; `hashes`: of this rank's files. Collective.

        False: it is dropped.
        """
        parts = self.mesh.gather(hashes)
        hashes = {name: sha for of_rank in parts for name, sha in of_rank.items()}
        on_first_rank(self.mesh, task, lambda: self._publish(partial, final, text, hashes, newest))
        return True

    def _start(self, partial: Path) -> None:
        if self.last is not None and self.last.exists():  # the next one has about its size
            check_space(self.root, sum(file.stat().st_size for file in self.last.rglob("*")), "a checkpoint")
        clear_leftovers(partial.parent)
        (partial / "state").mkdir(parents=True)

    def _publish(self, partial: Path, final: Path, text: str, hashes: dict[str, str], newest: int | None) -> None:
        write_file(partial / STEP_FILE, text)
        write_manifest(partial, "training-step", hashes)  # `hashes` lacks only the few small files of rank 0
        publish_folder(partial, final)
        if newest is not None:
            self._prune(newest)

    def _prune(self, newest: int) -> None:
        """Keep `keep` checkpoints of this run. Later steps than its newest are not this run's."""
        own = [path for path in on_disk(self.root.parent) if steps_of(path) <= newest]
        for old in own[: -self.keep] if self.keep is not None else []:
            remove_folder(old)

    # -- reading -------------------------------------------------------------------------------------------------------

    def load(self, path: Path, policy: Policy, parts: Sequence[TrainedModel] = ()) -> int:
        """Restore the policy and the parts. Returns the number of steps that the checkpoint has done. Collective."""
        content = on_every_rank(self.mesh, f"cannot read checkpoint {path}", lambda: read_step(path, *IN_STEP_FILE))
        same_world = content["world_size"] == self.mesh.world_size
        load_sharded(policy, path / "state", same_world=same_world)
        policy.load_state(content["policy"])
        for part in parts:
            part.load(path, same_world=same_world)
        self.last = path
        return int(content["step"])


def checkpoint_bytes(arch: Architecture, dtype: str, lora: LoraConfig) -> int:
    """Returns the size of a policy's checkpoint with optimizer: 14 bytes per trained parameter in bfloat16.

    A reward model or critic is extra.
    """
    shapes = hf_shapes(arch) if lora.rank is None else factor_shapes(arch, lora)
    return sum(map(math.prod, shapes.values())) * (DTYPE_BYTES[dtype] + SAVED_OPTIMIZER_BYTES)


def run_state(path: Path) -> dict[str, Any]:
    """Returns the `run` that was passed to `Checkpoints.save`."""
    return read_step(path, "run")["run"]  # type: ignore[no-any-return]
