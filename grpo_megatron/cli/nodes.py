"""Healing over several nodes: a launcher per node, and epochs in the output folder, which is the arbiter (docs/design.md).

healing/node_00001.json     of a launcher, rewritten every SIGN_S: who and where it is, and how its ranks have ended
healing/leave_NAME          made by the operator: the node of this address is to leave; its launcher removes it at its end
healing/epoch_000003.json   made once, by a hard link: who trains, in which layout, where rank 0 is; or how the run ends

A launcher that makes an epoch has decided, and all others follow it. Ranks of an older epoch write nothing (storage/files.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_megatron.cli.failures import END_FILE, Cause
from grpo_megatron.cli.healing import MAX_LOSSES, Fallbacks, Healing
from grpo_megatron.cli.ranks import STOP_NAME, Healer, Restart
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.planning.gpus import GPUS, REFERENCE
from grpo_megatron.storage.files import EPOCH, epoch_file, newest_epoch, write_file
from grpo_megatron.storage.pieces import DOORS, PieceServer
from grpo_megatron.training.stopping import EXIT_STOPPED, EXIT_TO_GROW, GROWTH, is_done

if TYPE_CHECKING:
    from grpo_megatron.checks.validate import Checked

FOLDER = "healing"
NODE_RANK, NODE_ADDRESS = "GRPO_MEGATRON_NODE_RANK", "GRPO_MEGATRON_NODE_ADDRESS"  # set by slurm/ranks.sh
SIGN_S = 0.5
START_S = 600.0  # for all nodes to be there at the start; then the run begins with fewer
REPORT_S = 2.0  # from the first lost connection until the cause of it is known, on the node of the cause
SAVED_S = 30.0  # from the first to the last rank that ends on request
MOST_LOOKS = 4  # of a pause between two of them, that count
ANSWER_S = 1.0
TURN_S = 2.0  # more than two launchers differ in when they see the same
KILLED = 128 + signal.SIGKILL


def node_problem(config: Config) -> str:
    """Says why this launcher cannot be that of a node; "": it can."""
    most = config.trainer.nnodes + config.trainer.healing.spares
    number = os.environ.get(NODE_RANK, "")
    if number.isdecimal() and int(number) < most:
        return ""
    return (
        f"each of {most} nodes (nnodes + spares) starts its ranks itself, and {NODE_RANK}={number!r} says which it is; start the"
        f" command on each node with {NODE_RANK}=0 to {most - 1} and {NODE_ADDRESS}=its host name (Slurm: HEALING=1 sbatch"
        " --no-kill slurm/train_70b.sh), or set trainer.nnodes=1"
    )


def build_healer(config: Config, checked: Checked) -> Healer:
    """Returns what decides how ranks start. Without `trainer.healing.layouts` they start once. Raises ConfigError."""
    if not config.trainer.healing.is_on:
        return Healer()
    healing = Healing(config, Fallbacks(config, checked.models, GPUS[REFERENCE]))
    return NodeHealer(config, healing, int(os.environ[NODE_RANK])) if config.trainer.nnodes > 1 else healing


class Launcher(NamedTuple):
    """The state of a launcher, as it has written it for the others."""

    id: str  # of the process: one that is started again is another launcher
    beat: int
    address: str
    door: int  # the port that shows that it lives
    port: int  # for the store of rank 0
    epoch: int  # its ranks' last one
    ended: list[Any] | None  # their Cause, once they have ended
    leaving: str  # the signal that asked this node to leave
    pieces: int = 0  # the port at which its states in memory are; 0: none are kept


class NodeHealer(Healer):
    """The launcher of one node of a run.

    A thread writes and reads the folder, and decides. Another one ends the ranks, so that it can where the folder hangs.
    """

    def __init__(self, config: Config, healing: Healing, node: int) -> None:
        self.node, self.healing, self.per_node = node, healing, config.trainer.n_gpus_per_node
        self.trainer = config.trainer
        self.expected = config.trainer.nnodes + config.trainer.healing.spares
        self.timeout_s = config.trainer.healing.node_timeout_s
        self.folder = (config.trainer.output_dir / FOLDER).absolute()
        self.id, self.epoch, self.leaving, self._count = uuid.uuid4().hex, 0, "", 0
        self.address = os.environ.get(NODE_ADDRESS) or socket.gethostname()
        self._leave = self.folder / f"leave_{self.address}"
        self._door, self._store = socket.create_server(("", 0), backlog=64), socket.socket()
        self._store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # rank 0 listens there, this process does not
        self._store.bind(("", 0))
        self._pieces: PieceServer | None = None
        self._last_look = time.monotonic()
        self._clock = 0.0  # seconds since the start
        self._seen: dict[int, tuple[Launcher, float]] = {}  # by node, with the time of the last change; 0: of none
        self._dead: set[str] = set()
        self._since: dict[tuple[str, int], float] = {}  # when this launcher first saw it
        self._state = threading.Condition()
        self._ranks: Path | None = None  # the folder of those that run
        self._cause: Cause | None = None  # of those that have ended
        self._why = ""  # they are ended by this launcher
        self._is_asked = False  # they are to stop after their step
        self._waits = False  # the main thread, for an answer
        self._answer: Restart | int | None = None
        self._error: Exception | None = None
        self._is_over = threading.Event()

    # -- the main thread -----------------------------------------------------------------------------------------------

    def first(self, world_size: int) -> Restart | None:
        """Waits until this node is to train; None: the run is over."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._take_place()
        self._leave.unlink(missing_ok=True)  # of an earlier start
        if self.memory is not None:
            self._pieces = PieceServer(self.memory)
        for run in (self._look, self._guard, self._show_life):
            threading.Thread(target=run, name=f"node: {run.__name__}", daemon=True).start()
        return self._wait()

    def watch(self, folder: Path) -> None:
        with self._state:
            self._ranks, self._why, self._is_asked = folder, "", False

    def ended(self, cause: Cause) -> Cause:
        with self._state:
            self._ranks = None
            if self._why:
                return Cause(KILLED, f"healing: node {self.node} has ended its ranks: {self._why}\n", True, (), False)
            return cause

    def after(self, cause: Cause) -> Restart | None:
        with self._state:
            self._cause = cause
        return self._wait()

    def request(self, name: str) -> bool:
        self.leaving = name  # no lock: this is a signal's handler
        return True

    def _wait(self) -> Restart | None:
        with self._state:
            self._waits = True
            while self._answer is None and self._error is None:
                self._state.wait(SIGN_S)
            answer, self._answer = self._answer, None
        if isinstance(answer, Restart):
            return answer
        self._is_over.set()
        if self._error is not None:
            raise self._error
        self._leave.unlink(missing_ok=True)
        self.code = answer
        return None

    def _take_place(self) -> None:
        """Raises ConfigError while another launcher of this node lives."""
        deadline = time.monotonic() + self.timeout_s
        if (found := self._read(self.node)) is None:
            return
        while (lives := _answers(found)) is None and time.monotonic() < deadline:
            time.sleep(SIGN_S)
        if lives:
            raise ConfigError(
                f"{self.folder}: the launcher of node {self.node} lives on {found.address}; wait for its end, or use another"
                " trainer.output_dir"
            )

    # -- the threads ---------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        while not self._is_over.is_set():
            began = time.monotonic()
            try:
                self._update(self._tick(began))
                self._last_look = began
            except OSError:
                pass  # `_guard` ends the ranks where this lasts
            except Exception as error:  # noqa: BLE001 - the main thread raises it
                self._error = error
                self._end(f"{type(error).__name__}: {error}")
            self._is_over.wait(SIGN_S)

    def _tick(self, now: float) -> float:
        """Returns this launcher's clock. Of a pause little counts: others may have been stopped, too."""
        self._clock += min(now - self._last_look, MOST_LOOKS * SIGN_S)
        return self._clock

    def _guard(self) -> None:
        while not self._is_over.wait(0.1):
            silent = time.monotonic() - self._last_look
            if silent > self.timeout_s / 2 and self._ranks is not None and not self._why:
                self._end(f"{self.folder} could not be read for {silent:.0f} s")
            folder = self._ranks
            if self._why and folder is not None:
                with contextlib.suppress(OSError):
                    (folder / END_FILE).touch()
                for file in folder.glob("*/*/*/pid"):
                    with contextlib.suppress(OSError, ValueError):
                        os.kill(int(file.read_text()), signal.SIGKILL)

    def _show_life(self) -> None:
        """Accepts connections, which say nothing."""
        while True:
            self._door.accept()[0].close()

    def _end(self, why: str) -> None:
        with self._state:
            if self._ranks is not None and not self._why:
                self._why = why

    def _update(self, now: float) -> None:
        """Writes this launcher's state, reads that of the others, and follows or makes an epoch."""
        with self._state:
            cause = self._cause
        if not self.leaving and self._leave.exists():
            self.leaving = signal.SIGUSR1.name
        self._count += 1
        local = Launcher(
            *(self.id, self._count, self.address, self._door.getsockname()[1], self._store.getsockname()[1]),
            *(self.epoch, None if cause is None else list(cause), self.leaving),
            0 if self._pieces is None else self._pieces.port,
        )
        if self._count > 1 and (found := self._read(self.node)) is not None and found.id != self.id:
            raise ConfigError(
                f"{self.folder}: another launcher has taken the place of node {self.node}, on {found.address}"
            )
        partial = self.folder / f".node.{self.id}"
        partial.write_text(json.dumps(local))
        partial.replace(self.folder / f"node_{self.node:05d}.json")
        for node in range(self.expected):
            if (found := local if node == self.node else self._read(node)) is not None:
                last, changed = self._seen.get(node, (found, 0.0))
                self._seen[node] = (found, changed if last == found and node != self.node else now)
        number = newest_epoch(self.folder)
        epoch = json.loads(epoch_file(self.folder, number).read_text()) if number else None
        if epoch is not None and self._pieces is not None:
            self._pieces.token = epoch["token"]
        if epoch is not None and number > self.epoch:
            if self._ranks is not None:
                self._end(f"epoch {number} has begun")
            if not self._waits or self._follow(epoch, number):
                return
        self._decide(epoch, number, cause, now)

    def _read(self, node: int) -> Launcher | None:
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
            return Launcher(*json.loads((self.folder / f"node_{node:05d}.json").read_text()))
        return None

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _follow(self, epoch: dict[str, Any], number: int) -> bool:
        """Gives the main thread what a newer epoch says of this node. False: nothing; it waits as a spare."""
        if self.id not in epoch["ids"]:
            if self.leaving:
                self._give(0)
            return bool(self.leaving)
        if epoch["code"] is not None:
            self._give(epoch["code"])
            return True
        from grpo_megatron.parallel.control import RUN_ID

        first = epoch["ids"].index(self.id) * self.per_node
        variables = {"WORLD_SIZE": str(epoch["world_size"]), RUN_ID: epoch["token"]}
        variables |= {"MASTER_ADDR": epoch["address"], "MASTER_PORT": str(epoch["port"])}
        variables |= {EPOCH: str(epoch_file(self.folder, number)), DOORS: json.dumps(epoch["pieces"])}
        self.epoch = number
        restart = Restart(
            self.per_node, epoch["settings"], None, epoch["lost_at"], None, epoch["ended_at"], variables, first
        )
        self._give(restart)
        return True

    def _give(self, answer: Restart | int) -> None:
        with self._state:
            self._answer, self._waits = answer, False
            if isinstance(answer, Restart):
                self._cause = None
            self._state.notify()

    def _decide(self, epoch: dict[str, Any] | None, number: int, cause: Cause | None, now: float) -> None:
        members = _members(epoch)
        was_here = any(self._seen[n][0].id == name and self._seen[n][1] for n, name in members if n in self._seen)
        if epoch is None or not was_here:  # it is of an earlier start
            self._begin(now)
            return
        self._find_dead([node for node, _ in members], now)
        causes: dict[int, Cause] = {}  # by place in the epoch
        gone = []
        seen_at = self._since.setdefault(("epoch", number), now)  # from then on its members' signs are waited for
        for index, (node, name) in enumerate(members):
            launcher, changed = self._seen.get(node, (None, 0.0))
            if launcher is not None and launcher.id == name and launcher.epoch == number and launcher.ended is not None:
                causes[index] = _cause(launcher.ended)
            elif (launcher is not None and launcher.id != name) or self._is_gone(node, max(changed, seen_at), now):
                gone.append(index)
        if len(causes) == len(members) and not any(cause.code for cause in causes.values()):
            self._give(0)
        elif gone or any(cause.code for cause in causes.values()):
            since = now - self._since.setdefault(("failed", number), now)
            if self._ranks is not None:
                self._end_failed(gone, list(causes.values()), since)
            if len(causes.keys() | gone) == len(members) and self._waits:
                self._make_in_turn(epoch, number, gone, causes, now)
        elif self._ranks is not None:
            self._ask_first(members[0][0], now)
            self._look_for_others(epoch, now)

    def _is_gone(self, node: int, changed: float, now: float) -> bool:
        """Says if a node gives no sign of life; one that was never seen to change has as long as the others."""
        launcher = self._seen.get(node)
        is_dead = launcher is not None and launcher[0].id in self._dead
        return is_dead or now - changed > self.timeout_s

    def _alive(self, now: float) -> dict[int, Launcher]:
        found = {
            n: launcher
            for n, (launcher, changed) in self._seen.items()
            if changed and not self._is_gone(n, changed, now)
        }
        return dict(sorted(found.items()))

    def _find_dead(self, nodes: Sequence[int], now: float) -> None:
        """Asks the machines of silent launchers. One whose process has ended is lost at once."""
        for launcher, changed in (self._seen[node] for node in nodes if node in self._seen):
            if changed and now - changed > 4 * SIGN_S and launcher.id not in self._dead and _answers(launcher) is False:
                self._dead.add(launcher.id)

    def _ask_first(self, node: int, now: float) -> None:
        """Ends the ranks where the node of rank 0 cannot be reached: a collective of theirs would wait for long."""
        if node == self.node or now < self._since.get(("asks", 0), 0.0):
            return
        self._since["asks", 0] = now + self.timeout_s / 8
        if _answers(self._seen[node][0]):
            self._since["reached", self.epoch] = now
        elif now - self._since.setdefault(("reached", self.epoch), now) > self.timeout_s / 2:
            self._end(f"node {node} cannot be reached")

    def _end_failed(self, gone: Sequence[int], causes: Sequence[Cause], since: float) -> None:
        """Ends this node's ranks, once those that end by themselves had the time for it."""
        if gone:
            wait_s = 0.0
        elif any(cause.code and cause.is_final for cause in causes):  # saved, or an error that all ranks report
            wait_s = SAVED_S
        else:
            wait_s = REPORT_S if all(cause.is_loss and not cause.ranks for cause in causes) else 0.0
        if since >= wait_s:
            self._end("a node was lost" if gone else "ranks of another node have ended")

    def _begin(self, now: float) -> None:
        """Makes the first epoch, once all nodes are there. This launcher may have been started at the end of the run."""
        if is_done(self.trainer):
            self._give(0)
            return
        alive = self._alive(now)
        if (len(alive) < self.expected and now < START_S) or self.node not in alive:
            return
        place = list(alive).index(self.node)
        if now - self._since.setdefault(("begins", len(alive)), now) < place * 2 * SIGN_S:
            return
        self.healing.devices = list(alive)
        restart = self.healing.use(self.healing.usable())
        self._make(newest_epoch(self.folder) + 1, restart, 1, alive)
        if restart is None:
            print(f"error: {len(alive)} of {self.expected} nodes are there, and no layout fits them", flush=True)

    def _make_in_turn(
        self, epoch: dict[str, Any], number: int, gone: Sequence[int], causes: dict[int, Cause], now: float
    ) -> None:
        """Makes the next epoch, after launchers that reach more nodes than this one, and those of smaller numbers."""
        alive = self._alive(now)
        if self.node not in alive:
            return
        reached = {n: launcher for n, launcher in alive.items() if n == self.node or _answers(launcher)}
        order = sorted(reached, key=lambda n: (n not in epoch["nodes"], n))
        dead = {n for n, (launcher, _) in self._seen.items() if launcher.id in self._dead}
        others = {*epoch["nodes"], *alive} - reached.keys() - dead
        turn = order.index(self.node) + 2 * len(others) + (min(order) > min(others, default=self.node))
        if now - self._since.setdefault(("settled", number), now) < TURN_S * turn:
            return
        cause = _merged(epoch, gone, causes, self.per_node, self.timeout_s)
        healing, history = self.healing, epoch["history"]
        healing.losses = Counter({int(node): count for node, count in history["losses"].items()})
        healing.steps_done, healing.num_failures = history["steps_done"], history["num_failures"]
        healing.exceptions, healing.used = set(history["exceptions"]), list(epoch["nodes"])
        healing.devices = [n for n, launcher in reached.items() if not launcher.leaving]
        restart, news = healing.decide(cause)
        code = EXIT_STOPPED if cause.code == EXIT_TO_GROW else cause.code
        if self._make(number + 1, restart, code, alive) and news is not None:
            healing.tell(*news)

    def _make(self, number: int, restart: Restart | None, code: int | None, alive: dict[int, Launcher]) -> bool:
        """Makes an epoch; False: another launcher has. All follow the one that is there, this launcher too."""
        healing = self.healing
        nodes = list(alive) if restart is None or restart.devices is None else restart.devices
        first = alive[nodes[0]]
        content = {
            "nodes": nodes,
            "ids": [alive[node].id for node in nodes],
            "code": None if restart is not None else code,
            "world_size": None if restart is None else restart.world_size,
            "settings": [] if restart is None else list(restart.settings),
            "address": first.address,
            "port": first.port,
            "pieces": [(alive[n].address, alive[n].pieces) for n in [*nodes, *sorted(alive.keys() - set(nodes))]],
            "token": secrets.token_hex(16),  # of the store's keys, and of the pieces
            "lost_at": restart and restart.lost_at,
            "ended_at": 0.0 if restart is None else restart.ended_at,
            "made_by": self.node,
            "history": {
                "steps_done": healing.steps_done,
                "num_failures": healing.num_failures,
                "losses": dict(healing.losses),
                "exceptions": sorted(healing.exceptions),
            },
        }
        partial = self.folder / f".epoch.{self.id}"
        write_file(partial, json.dumps(content))
        try:
            os.link(partial, epoch_file(self.folder, number))
        except FileExistsError:
            return False
        finally:
            partial.unlink(missing_ok=True)
        return True

    def _look_for_others(self, epoch: dict[str, Any], now: float) -> None:
        """Asks the ranks to stop after their step where nodes leave, or where more nodes make a larger layout."""
        alive, losses = self._alive(now), {int(n): count for n, count in epoch["history"]["losses"].items()}
        stay = [n for n, launcher in alive.items() if not launcher.leaving and losses.get(n, 0) < MAX_LOSSES]
        members = [n for n in epoch["nodes"] if n in alive]
        restart, key = self.healing.fallbacks.restart(len(stay)), ("others", self.epoch)
        if leaving := [n for n in members if alive[n].leaving]:
            key = ("leaving", self.epoch)
        elif restart is None or restart.world_size <= epoch["world_size"]:
            self._since.pop(key, None)
            return
        if now - self._since.setdefault(key, now) < 4 * SIGN_S or self._is_asked:  # all nodes may be asked to leave
            return
        if leaving and restart is None:
            request = self.leaving
        else:
            request = GROWTH if self.node == min(members) else ""
            if request and not leaving and not all(_answers(alive[n]) for n in stay):
                self._since[key] = now + self.timeout_s  # they cannot be reached now
                return
        if request and self._ranks is not None:
            write_file(self._ranks / STOP_NAME, request)
            self._is_asked = True


def _answers(launcher: Launcher) -> bool | None:
    """Says if a launcher lives; None: its machine does not answer."""
    try:
        socket.create_connection((launcher.address, launcher.door), ANSWER_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True


def _members(epoch: dict[str, Any] | None) -> list[tuple[int, str]]:
    """Lists the nodes that train in an epoch, and their launchers."""
    return [] if epoch is None or epoch["code"] is not None else list(zip(epoch["nodes"], epoch["ids"], strict=True))


def _cause(fields: Sequence[Any]) -> Cause:
    cause = Cause(*fields)
    return cause._replace(ranks=tuple(cause.ranks))


def _merged(
    epoch: dict[str, Any], gone: Sequence[int], causes: dict[int, Cause], per_node: int, timeout_s: float
) -> Cause:
    """Returns why an epoch has ended, with the places of lost nodes in it as `ranks`."""
    ended = [causes[index] for index in sorted(causes)]
    for cause in ended:
        if cause.is_final and cause.code not in (0, EXIT_TO_GROW):
            return cause
    if not gone and any(cause.code == EXIT_TO_GROW for cause in ended):
        return Cause(EXIT_TO_GROW, "")
    lost = {*gone, *(rank // per_node for cause in ended if cause.is_loss for rank in cause.ranks)}
    if lost:
        texts = [f"node {epoch['nodes'][i]} has ended, or gave no sign of life for {timeout_s:g} s" for i in gone]
        texts += [cause.text.strip() for cause in ended if cause.ranks]
        return Cause(KILLED, "; ".join(texts), is_loss=True, ranks=tuple(sorted(lost)), is_final=False)
    failed = [cause for cause in ended if cause.code]
    return next((cause for cause in failed if not cause.is_loss), failed[0])._replace(ranks=())
