"""The ranks' part of healing: states in memory, the seconds of a recovery (cli/healing.py decides, and starts the ranks)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.models.weights.sharded_state import Writes
from grpo_megatron.parallel.control import RUN_ID
from grpo_megatron.parallel.mesh import Mesh, on_every_rank
from grpo_megatron.report.metrics import Metrics, Sinks
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.files import (
    MANIFEST_FILE,
    MANIFEST_VERSION,
    check_space,
    publish_folder,
    remove_folder,
    sha256_of,
)
from grpo_megatron.storage.pieces import DOORS, Door, RemotePiece, get_piece, list_states, send_piece, set_remote
from grpo_megatron.storage.run_files import STEP_FILE, add_event, on_disk, steps_of
from grpo_megatron.training.checkpoint import Checkpoints
from grpo_megatron.training.stopping import read_restart


class NodeCheckpoints(Checkpoints):
    """States in the memory of several nodes: a node's folder has its ranks' files, and those of the node before it in a ring.

    The small files (table of contents, common state, manifest) are on every node. A state is there when the nodes that are left
    have all files of its manifest together; ranks read what their node lacks from the others (storage/pieces.py).
    Of two roles the ring has the nodes that train; ranks that sample only read.
    `world`: the variables of these ranks (cli/nodes.py).
    """

    def __init__(self, folder: Path, mesh: Mesh, world: Mapping[str, str]) -> None:
        super().__init__(folder, mesh, 1, "sizes", in_background=True)
        self.doors: list[Door] = [(host, port) for host, port in json.loads(world[DOORS])]
        self.token, self.not_sent = world[RUN_ID], ""
        self.num_nodes = mesh.world_size // mesh.ranks_per_node
        self.node, place = divmod(mesh.run_rank, mesh.ranks_per_node)
        self.is_first_of_node = place == 0

    def on_first_rank(self, task: str, action: Callable[[], object]) -> None:
        on_every_rank(self.mesh, task, lambda: action() if self.is_first_of_node else None)

    def _start(self, partial: Path) -> None:
        for old in set(on_disk(self.root.parent)) - {self.last}:
            remove_folder(old)  # not before: all nodes have the last one now
        super()._start(partial)

    def _write(self, writes: Writes, partial: Path) -> None:
        writes.write()
        self.not_sent = ""
        if self.num_nodes > 1:
            partner = self.doors[(self.node + 1) % self.num_nodes]
            try:
                for name, sha in writes.hashes(partial).items():
                    path = (partial / name).relative_to(self.root.parent).as_posix()
                    send_piece(partner, self.token, partial / name, path, sha)
            except (OSError, StorageError) as error:  # if the node was lost, its ranks were, too
                self.not_sent = f"{partner[0]}: {error}"

    def _complete(
        self, task: str, partial: Path, final: Path, text: str, hashes: dict[str, str], newest: int | None
    ) -> bool:
        if problems := [problem for problem in self.mesh.all_gather(self.not_sent) if problem]:
            if self.mesh.rank == 0:
                text = "the state of this step is not kept in the memory of other nodes: %s"
                logging.getLogger(__name__).warning(text, problems[0])
            return False
        own = {name: {"size": (partial / name).stat().st_size, "sha256": sha} for name, sha in hashes.items()}
        files = {name: entry for part in self.mesh.gather(own) for name, entry in part.items()}

        def small_files() -> dict[str, bytes]:
            (partial / STEP_FILE).write_text(text)
            paths = [path for path in partial.rglob("*") if path.is_file() and path.suffix != ".distcp"]
            small = {path.relative_to(partial).as_posix(): path.read_bytes() for path in paths}
            entries = {n: {"size": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in small.items()}
            manifest = {"version": MANIFEST_VERSION, "kind": "training-step", "files": files | entries}
            return small | {MANIFEST_FILE: json.dumps(manifest, indent=2, sort_keys=True).encode()}

        small = self.mesh.broadcast(on_every_rank(self.mesh, task, lambda: {} if self.mesh.rank else small_files()))

        def publish() -> None:
            _write_all(partial, small)
            publish_folder(partial, final)

        self.on_first_rank(task, publish)
        return True

    def newest(self) -> Path | None:
        doors = self.doors if self.mesh.rank == 0 else []
        states = [(door, state) for door in doors for state in list_states(door, self.token)]
        name, sha, where = self.mesh.broadcast(self._whole(states))
        if not name:
            return None
        path = self.root / name
        set_remote({path / n: RemotePiece(door, self.token, f"checkpoints/{name}/{n}") for n, door in where.items()})

        def bring_small() -> None:
            if (path / MANIFEST_FILE).exists() and sha256_of(path / MANIFEST_FILE) == sha:
                return
            if path.exists():  # of a step that was repeated, or without all small files
                remove_folder(path)
            small = sorted(
                (n for n in where if not n.endswith(".distcp")), key=lambda n: n == MANIFEST_FILE
            )  # it is last
            _write_all(path, {n: get_piece(where[n], self.token, f"checkpoints/{name}/{n}") for n in small})

        self.on_first_rank(f"cannot read the state in memory {path}", bring_small)
        self.last = path
        return path

    def _whole(self, states: Sequence[tuple[Door, dict[str, Any]]]) -> tuple[str, str, dict[str, Door]]:
        """Finds the newest state without a missing file: its name, sha256 of its manifest, a node for each file; "": none."""
        found: dict[tuple[str, str], dict[str, Door]] = {}
        for door, state in states:
            where = found.setdefault((state["name"], state["sha256"]), {})
            where.update({name: door for name in state["files"] if name not in where})
        for (name, sha), where in sorted(found.items(), key=lambda item: steps_of(Path(item[0][0])), reverse=True):
            with contextlib.suppress(OSError, StorageError):  # another node was lost
                manifest = get_piece(where[MANIFEST_FILE], self.token, f"checkpoints/{name}/{MANIFEST_FILE}")
                if json.loads(manifest)["files"].keys() <= where.keys():
                    return name, sha, where
        return "", "", {}


def _write_all(folder: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


class Mirror:
    """The state after the last steps in memory, in the files of a checkpoint, which outlive the ranks but not the launcher.

    A step's state is copied to the host after it, written beside the next one, and valid once `poll` finds it written
    on all ranks. `checkpoints` is None where nothing is mirrored. Building one of states of `size` bytes is collective. Raises
    RankError on every rank where two have no room.
    """

    def __init__(self, mesh: Mesh, size: int) -> None:
        restart = read_restart()
        self.checkpoints: Checkpoints | None = None
        if (folder := restart.get("mirror")) is None:
            return
        if restart["world"]:
            self.checkpoints = NodeCheckpoints(Path(folder), mesh, restart["world"])
            num_nodes = self.checkpoints.num_nodes
        else:
            self.checkpoints, num_nodes = Checkpoints(Path(folder), mesh, 1, "sizes", in_background=True), 1
        task = "cannot keep the state in memory; set trainer.healing.memory=false"
        needed = 2 * size * min(2, num_nodes) // num_nodes  # also those of another node
        if mesh.bridge is not None and mesh.bridge.samples_only and restart["world"]:
            needed = 0

        def check() -> None:
            if not on_disk(Path(folder)):  # else it had room for them
                check_space(Path(folder), needed, "the state of two steps")

        self.checkpoints.on_first_rank(task, check)

    def newer(self, saved: Path | None) -> Path | None:
        """Returns the newest mirrored state, or `saved` if that has as many steps. Collective."""
        mirrored = None if self.checkpoints is None else self.checkpoints.newest()
        return max((path for path in (saved, mirrored) if path is not None), key=steps_of, default=None)

    def poll(self) -> None:
        """Completes the state that is under way, if all ranks have written it. Collective."""
        if self.checkpoints is not None:
            self.checkpoints.poll()


class Recovery:
    """The seconds from the last sign of life of a lost rank to the first sample of the step that is repeated."""

    def __init__(self, lost_at: float, ended_at: float) -> None:
        self.lost_at, self.ended_at, self.built_at = lost_at, ended_at, time.time()

    @classmethod
    def of_restart(cls) -> Recovery | None:
        """Call it when all parts are built. None: the ranks of this launcher were not started again."""
        restart = read_restart()
        return cls(restart["lost_at"], restart["ended_at"]) if restart.get("lost_at") else None

    def end(self, step: int, output_dir: Path, metrics: Metrics, sinks: Sinks, *, is_first: bool) -> None:
        """Logs the seconds by phase; the engine has its weights, and generates next."""
        now = time.time()
        metrics.constant("timing_s/healing", now - self.lost_at)
        seconds = [self.ended_at - self.lost_at, self.built_at - self.ended_at, now - self.built_at]
        ended, built, synced = seconds = [round(each, 1) for each in seconds]
        text = (
            f"{now - self.lost_at:.1f} s after the last sign of the lost rank: {ended} until all ranks"
            f" had ended, {built} until all parts were built, {synced} for the sync"
        )
        if is_first:
            add_event(output_dir, "healed", step, text, seconds=seconds)
        sinks.note(f"healed: step {step} generates {text}")
