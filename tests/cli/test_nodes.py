"""Healing over several nodes: which launcher makes an epoch, who follows it, and that nobody else writes.

In most tests launchers are objects without threads, whose clock is a number; a run with real ones is at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_megatron.cli import nodes
from grpo_megatron.cli.failures import Cause
from grpo_megatron.cli.healing import RESUME, Healing
from grpo_megatron.cli.nodes import NODE_ADDRESS, NODE_RANK, Launcher, NodeHealer
from grpo_megatron.cli.ranks import STOP_NAME, Restart
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.report.metrics import JsonlSink
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.files import (
    EPOCH,
    MEMORY_FOLDER,
    FolderLock,
    clear_leftovers,
    newest_epoch,
    partial_of,
    publish_folder,
)
from grpo_megatron.storage.run_files import read_events
from grpo_megatron.training.stopping import EXIT_STOPPED, EXIT_TO_GROW, GROWTH, OUTCOME
from tests.cli.test_healing import exact_run, root  # noqa: F401 - a fixture
from tests.soak.soak import ROOT
from tests.stored import TIMES, rows_without

LOST_S = 10.0
LATER = 3.0  # all run


class Planned:
    """Layouts for any number of three nodes of two ranks."""

    world_size, unit, has_nodes = 6, 2, True

    def restart(self, num_devices: int) -> Restart | None:
        size = min(num_devices, 3)
        return Restart(2 * size, [RESUME, f"trainer.nnodes={size}"]) if size else None


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[NodeHealer]]]:
    """Starts launchers; `looks` in the order of their numbers until all have their answer."""
    monkeypatch.setenv(NODE_ADDRESS, "127.0.0.1")
    made: list[NodeHealer] = []

    def build(*numbers: int, spares: int = 0) -> list[NodeHealer]:
        healing = {"layouts": "auto", "node_timeout_s": LOST_S, "spares": spares}
        trainer = {"output_dir": str(tmp_path), "nnodes": 3, "n_gpus_per_node": 2, "healing": healing}
        config = Config.model_validate({"model": {"path": "m"}, "trainer": trainer})
        found = [NodeHealer(config, Healing(config, Planned()), number) for number in numbers]  # type: ignore[arg-type]
        for node in found:
            node.folder.mkdir(exist_ok=True)
            node._waits = True
        made.extend(found)
        return found

    yield build
    for node in made:
        node._door.close()
        node._store.close()


def look(now: float, *launchers: NodeHealer) -> None:
    for node in launchers:
        node._update(now)


def settle(now: float, *launchers: NodeHealer) -> None:
    """Looks for two seconds: each sees the others' state, one makes the epoch, all follow."""
    for number in range(5):
        look(now + number / 2, *launchers)


def trains(node: NodeHealer) -> Restart:
    """The node's ranks start, as it was told."""
    answer, node._answer = node._answer, None
    assert isinstance(answer, Restart), answer
    folder = node.folder / f"ranks_{node.node}"
    folder.mkdir(exist_ok=True)
    node.watch(folder)
    return answer


def ends(node: NodeHealer, cause: Cause) -> None:
    node._cause, node._waits = node.ended(cause), True


def running(launchers: list[NodeHealer]) -> None:
    settle(0.5, *launchers)
    for node in launchers:
        trains(node)


LOST = Cause(1, "lost a connection", is_loss=True, is_final=False)


def test_the_first_epoch_waits_for_all_nodes_and_says_who_is_which_rank(start: Callable[..., list[NodeHealer]]) -> None:
    two = start(0, 2)
    settle(0.5, *two)
    assert newest_epoch(two[0].folder) == 0
    three = [two[0], *start(1), two[1]]
    settle(3.0, *three)
    starts = [trains(node) for node in three]
    assert [restart.first_rank for restart in starts] == [0, 2, 4] and newest_epoch(two[0].folder) == 1
    assert {restart.world["WORLD_SIZE"] for restart in starts} == {"6"} and starts[0].world_size == 2
    assert len({restart.world["MASTER_PORT"] for restart in starts}) == 1
    assert start(0)[0].id != three[0].id


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_node_without_a_sign_of_life_is_lost_and_the_others_go_on(
    start: Callable[..., list[NodeHealer]], tmp_path: Path, is_killed: bool
) -> None:
    """Its machine refuses a connection to the port of a launcher that was killed: then it is lost at once."""
    first, second, third = launchers = start(0, 1, 2)
    running(launchers)
    look(LATER, first, second)
    if is_killed:
        third._door, door = socket.create_server(("", 0)), third._door
        door.close()
    look(LATER + LOST_S - 1, first, second)
    assert bool(first._why) == bool(second._why) == is_killed
    look(LATER + LOST_S + 0.5, first, second)
    assert first._why == second._why == "a node was lost"
    for node in (first, second):
        ends(node, LOST)
    for seconds in range(1, 10, 2):
        settle(LATER + LOST_S + seconds, first, second)
    assert trains(first).world["WORLD_SIZE"] == trains(second).world["WORLD_SIZE"] == "4"
    (event,) = read_events(tmp_path)
    assert event["kind"] == "lost" and "lost node 2 after 0 steps, with 6 ranks; goes on with 4" in event["text"]
    look(LATER + LOST_S + 12, third)  # it was stopped: it learns that others have gone on
    assert third._why == "epoch 2 has begun" and third._answer is None


def test_two_halves_that_do_not_see_each_other_make_one_epoch(
    start: Callable[..., list[NodeHealer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeats of each half are hidden from the other one, and no connection passes."""
    launchers = start(0, 1, 2)
    first = launchers[0]
    running(launchers)
    read = NodeHealer._read
    hidden = {0: {1, 2}, 1: {0}, 2: {0}}
    old = {n: read(first, n) for n in range(3)}
    monkeypatch.setattr(NodeHealer, "_read", lambda self, n: old[n] if n in hidden[self.node] else read(self, n))
    update, looks = NodeHealer._update, [0]

    def updated(self: NodeHealer, now: float) -> None:
        looks[0] = self.node
        update(self, now)

    names = {node.id: node.node for node in launchers}
    monkeypatch.setattr(NodeHealer, "_update", updated)
    monkeypatch.setattr(nodes, "_answers", lambda other: None if names[other.id] in hidden[looks[0]] else True)
    look(LATER, *launchers)
    late = LATER + LOST_S + 1
    look(late, *launchers)
    for node in launchers:
        assert node._why == "a node was lost"
        ends(node, LOST)
    for seconds in range(1, 10, 2):
        settle(late + seconds, *launchers)
    assert newest_epoch(first.folder) == 2, "both halves have gone on"
    assert [isinstance(node._answer, Restart) for node in launchers] == [False, True, True]  # the larger half
    for seconds in range(0, 8, 2):
        settle(late + LOST_S + seconds, *launchers)
    assert newest_epoch(first.folder) == 2  # its members have had no time for a sign of life
    for seconds in range(8, 24, 2):  # the other half hears nothing of the epoch's members: it goes on in their place
        settle(late + LOST_S + seconds, *launchers)
    assert newest_epoch(first.folder) == 3


def test_a_launcher_that_was_stopped_does_not_take_the_others_for_lost(start: Callable[..., list[NodeHealer]]) -> None:
    """Its own pause counts for MOST_LOOKS looks: a machine that was suspended wakes all of them at once."""
    (node,) = start(0)
    began = node._last_look
    assert node._tick(began + 100) == nodes.MOST_LOOKS * nodes.SIGN_S < LOST_S / 2
    node._last_look = began + 100
    assert node._tick(began + 100.5) == node._clock == nodes.MOST_LOOKS * nodes.SIGN_S + 0.5


def test_losses_exceptions_and_requests_of_any_node_decide_for_all(start: Callable[..., list[NodeHealer]]) -> None:
    first, second, third = launchers = start(0, 1, 2)
    running(launchers)
    killed = Cause(137, "rank 3 was ended by SIGKILL", is_loss=True, ranks=(3,), is_final=False)
    ends(second, killed)
    look(3.0, second, first, third)
    assert first._why == third._why == "ranks of another node have ended"
    ends(first, LOST)
    ends(third, LOST)
    settle(4.0, *launchers)
    assert trains(first).world["WORLD_SIZE"] == "6"  # the node lives: its rank starts again in its place
    epoch = json.loads((first.folder / "epoch_000002.json").read_text())
    assert epoch["history"]["losses"] == {"1": 1} and epoch["history"]["num_failures"] == 1
    trains(second)
    trains(third)
    ends(third, Cause(2, "error: trainer.output_dir is full"))
    look(7.0, third, first, second)
    assert not first._why  # all ranks report such an error
    ends(first, Cause(2, ""))
    ends(second, Cause(2, ""))
    settle(8.0, *launchers)
    assert [node._answer for node in launchers] == [2, 2, 2]


def test_a_node_that_returns_is_taken_at_the_next_step_and_one_that_leaves_is_left_out(
    start: Callable[..., list[NodeHealer]],
) -> None:
    first, second, third = launchers = start(0, 1, 2)
    running(launchers)
    third._leave = third.folder / "leave_node3"  # these three have one address
    third._leave.touch()
    for now in (3.0, 6.0):
        look(now, third, first, second)
    stop = first.folder / "ranks_0" / STOP_NAME
    assert stop.read_text() == GROWTH and not (second.folder / "ranks_1" / STOP_NAME).exists()
    for node in launchers:
        ends(node, Cause(EXIT_TO_GROW, ""))
    settle(7.0, *launchers)
    assert third._answer == 0 and trains(first).world["WORLD_SIZE"] == trains(second).world["WORLD_SIZE"] == "4"
    stop.unlink()
    (again,) = start(2)
    for now in (10.0, 11.0, 12.0, 15.0):
        again._update(now)
        look(now, first, second)
    assert again._answer is None and stop.read_text() == GROWTH


def test_all_nodes_that_are_asked_to_stop_end_the_run(start: Callable[..., list[NodeHealer]]) -> None:
    launchers = start(0, 1, 2)
    running(launchers)
    for node in launchers:
        node.request("SIGTERM")
    for now in (3.0, 6.0):
        look(now, *launchers)
    assert {(node.folder / f"ranks_{node.node}" / STOP_NAME).read_text() for node in launchers} == {"SIGTERM"}
    for node in launchers:
        ends(node, Cause(EXIT_STOPPED, ""))
    settle(7.0, *launchers)
    assert {node._answer for node in launchers} == {EXIT_STOPPED}


def test_a_finished_run_ends_all_launchers_and_a_spare(start: Callable[..., list[NodeHealer]]) -> None:
    *launchers, spare = start(0, 1, 2, 3, spares=1)
    settle(0.5, *launchers, spare)
    for node in launchers:
        trains(node)
        ends(node, Cause(0, ""))
    look(3.0, *launchers[:2])
    assert launchers[0]._answer is None  # the third one still writes, perhaps
    look(4.0, *launchers, spare)
    look(4.5, *launchers)
    assert {node._answer for node in (*launchers, spare)} == {0}


def test_an_epoch_is_made_once(start: Callable[..., list[NodeHealer]]) -> None:
    first, second = start(0, 1)
    alive = {node.node: Launcher(node.id, 1, "here", 1, 2, 0, None, "") for node in (first, second)}
    assert first._make(7, Restart(4, devices=[0, 1]), None, alive)
    content = (first.folder / "epoch_000007.json").read_text()
    assert not second._make(7, None, 1, alive) and (first.folder / "epoch_000007.json").read_text() == content


def test_an_epoch_of_an_earlier_start_is_none_of_this_one(start: Callable[..., list[NodeHealer]]) -> None:
    """The earlier run was stopped. Its launchers' files are still there while a node of the new start is late."""
    old = start(0, 1, 2)
    running(old)
    for node in old:
        ends(node, Cause(EXIT_STOPPED, ""))
        look(LATER, node)
        node._door.close()
    first, second = start(0, 1)
    for now in range(1, 9, 2):
        settle(now, first, second)
    assert newest_epoch(first.folder) == 1 and first._answer is None
    (third,) = start(2)
    settle(9.5, first, second, third)
    assert newest_epoch(first.folder) == 2 and trains(third).world["WORLD_SIZE"] == "6"


def test_a_launcher_that_is_started_at_the_end_of_a_run_ends(
    start: Callable[..., list[NodeHealer]], tmp_path: Path
) -> None:
    """It has not seen the others live."""
    old = start(0, 1, 2)
    running(old)
    for node in old:
        ends(node, Cause(0, ""))
    settle(LATER, *old)
    assert [node._answer for node in old] == [0, 0, 0]
    steps = old[0].trainer.total_training_steps
    (tmp_path / OUTCOME).write_text(json.dumps({"state": "done", "steps_done": steps}))
    for folder in (f"checkpoints/step_{steps:06d}", "hf"):
        (tmp_path / folder).mkdir(parents=True)
    (again,) = start(1)
    settle(9.0, again)
    assert again._answer == 0 and newest_epoch(again.folder) == 1


def test_a_launcher_that_was_started_again_is_another_one(start: Callable[..., list[NodeHealer]]) -> None:
    """Its ranks have ended with the first one, which the others notice at once."""
    first, second, _ = launchers = start(0, 1, 2)
    running(launchers)
    (again,) = start(2)
    look(LATER, again)
    look(LATER + 0.5, first, second)
    assert first._why == second._why == "a node was lost"


def test_one_launcher_of_a_node_at_a_time(start: Callable[..., list[NodeHealer]]) -> None:
    (first,) = start(0)
    look(0.0, first)
    (second,) = start(0)
    with pytest.raises(ConfigError, match=r"the launcher of node 0 lives on 127\.0\.0\.1"):
        second._take_place()
    first._door, door = socket.create_server(("", 0)), first._door
    door.close()
    second._take_place()
    look(0.0, second)
    with pytest.raises(ConfigError, match="another launcher has taken the place of node 0"):
        look(1.0, first)


def test_a_folder_that_hangs_ends_the_ranks(
    start: Callable[..., list[NodeHealer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that stands for a rank is killed by the thread that does not touch the folder."""
    launchers = start(0, 1, 2)
    running(launchers)
    node = launchers[0]
    rank = subprocess.Popen(["sleep", "100"])
    (pid := node._ranks / "run/attempt_0/0/pid").parent.mkdir(parents=True)  # type: ignore[operator]
    pid.write_text(str(rank.pid))
    node._last_look = time.monotonic() - LOST_S / 2 - 1
    monkeypatch.setattr(node._is_over, "wait", lambda seconds: rank.poll() is not None)
    node._guard()
    assert rank.wait() == -signal.SIGKILL
    assert "could not be read for 6 s" in node.ended(Cause(137, "")).text


def test_a_rank_of_an_older_epoch_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a row nor a checkpoint, whether it looks before it writes or was stopped after it has looked."""
    healing, target = tmp_path / "healing", tmp_path / "checkpoints" / "step_000003"
    healing.mkdir()
    (healing / "epoch_000009.json").touch()
    monkeypatch.setenv(EPOCH, str(healing / "epoch_000009.json"))
    old_lock, sink = FolderLock(tmp_path), JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(0, {"a": 1.0})
    (old := partial_of(target)).mkdir(parents=True)

    (healing / "epoch_000010.json").touch()
    with pytest.raises(StorageError, match=r"epoch_000010\.json has replaced the epoch of this rank"):
        sink.log(1, {"a": 2.0})
    with pytest.raises(StorageError, match=r"epoch_000010\.json has replaced"):
        publish_folder(old, target)

    monkeypatch.setenv(EPOCH, str(healing / "epoch_000010.json"))  # what the newer epoch does at its start
    FolderLock(tmp_path).close()  # though a stopped rank has it
    clear_leftovers(target.parent)
    new = JsonlSink(tmp_path / "metrics.jsonl", first_step=0)
    sink.log(0, {"a": 3.0})  # it has looked before there was a newer epoch
    new.log(0, {"a": 4.0})
    assert partial_of(target) != old
    with pytest.raises(FileNotFoundError):
        publish_folder(old, target)
    assert [json.loads(line)["a"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [4.0]

    monkeypatch.delenv(EPOCH)
    with pytest.raises(StorageError, match="in use by"):  # by another run
        FolderLock(tmp_path)
    old_lock.close()


# -- real launchers -----------------------------------------------------------------------------------------------------


class Nodes:
    """Two launchers of one rank each, or more, on this machine, in sessions of their own."""

    def __init__(self, raw: dict[str, Any], folder: Path, number: int = 2, **environment: str) -> None:
        self.folder, self.output = folder, Path(raw["trainer"]["output_dir"])
        (folder / "run.yaml").write_text(yaml.safe_dump(raw))
        common = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", NODE_ADDRESS: "127.0.0.1", **environment}
        command = [sys.executable, "-m", "tests.soak.command", "train", str(folder / "run.yaml")]
        self.launchers = []
        for node in range(number):
            with (folder / f"out_{node}.txt").open("w") as out:
                variables = {**os.environ, **common, NODE_RANK: str(node)}
                process = subprocess.Popen(
                    command, cwd=folder, env=variables, stdout=out, stderr=out, start_new_session=True
                )
            self.launchers.append(process)

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *exception: object) -> None:
        for node in range(len(self.launchers)):
            self.send(node, signal.SIGKILL)
            self.launchers[node].wait()

    def text(self, node: int) -> str:
        return (self.folder / f"out_{node}.txt").read_text()

    def send(self, node: int, number: int) -> None:
        """Sends a signal to all processes of a node at once."""
        for pid in self.processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def processes(self, node: int) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                fields = (path / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == self.launchers[node].pid and fields[0] not in "ZX":
                found.append(int(path.name))
        return found

    def after(self, steps: int) -> None:
        deadline = time.monotonic() + 300
        while not (file := self.output / "heartbeat").exists() or int(file.read_text() or 0) < steps:
            assert time.monotonic() < deadline, self.text(0) + self.text(1)
            time.sleep(0.05)


def same_as_undisturbed(folder: Path, healed: dict[str, Any]) -> None:
    """Weights, and rows but for times and what counts ranks."""
    raw = json.loads(json.dumps(healed))
    raw["trainer"] |= {"output_dir": str(folder / "undisturbed"), "nnodes": 1}
    del raw["trainer"]["healing"]
    (folder / "undisturbed.yaml").write_text(yaml.safe_dump(raw))
    command = [sys.executable, "-m", "grpo_megatron", "train", str(folder / "undisturbed.yaml")]
    subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    one, other = Path(healed["trainer"]["output_dir"]), folder / "undisturbed"
    names = (*TIMES, "global_seqlen/", "sync/", "rollout/prefix_cache")
    assert rows_without(one, names) == rows_without(other, names)
    assert [row["step"] for row in rows_without(one)] == list(range(raw["trainer"]["total_training_steps"]))
    name = "hf/model.safetensors"
    assert (one / name).read_bytes() == (other / name).read_bytes()


HEALING = {"layouts": "auto", "node_timeout_s": 20.0}


@pytest.mark.parametrize("spares", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_a_node_dies_and_the_others_go_on_from_its_pieces_in_memory_with_the_bits_of_an_undisturbed_run(
    root: Path,  # noqa: F811
    tmp_path: Path,
    spares: int,
) -> None:
    """Launcher, fork server and rank of node 1 are killed at once in the update of the third step.

    No checkpoint was saved: node 0 has the pieces of node 1's rank in memory. A spare has nothing, and reads from node 0.
    """
    raw = exact_run(root, tmp_path / "healed", 1, nnodes=2, healing=HEALING | {"spares": spares}, save_freq=100)
    fault = {"point": "update_actor", "count": 3, "rank": 1, "action": "kill all", "once": str(tmp_path / "lost")}
    with Nodes(raw, tmp_path, 2 + spares, SOAK_FAULT=json.dumps(fault)) as run:
        assert run.launchers[1].wait(300) == -signal.SIGKILL, run.text(1)
        assert run.launchers[0].wait(300) == 0, run.text(0)
        out = run.text(0)
    assert f"resumed from {MEMORY_FOLDER}" in out, out
    goes_on = f"goes on with {1 + spares}, in the layout of the config"
    assert f"healing: lost node 1 after 2 steps, with 2 ranks; {goes_on}" in out, out
    assert [event["kind"] for event in read_events(tmp_path / "healed") if event["kind"] != "failed"] == [
        *("started", "lost", "resumed", "healed", "done")
    ]
    same_as_undisturbed(tmp_path, raw)


@pytest.mark.soak
@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_of_two_roles_dies_and_a_spare_takes_its_place(
    root: Path,  # noqa: F811
    tmp_path: Path,
    lost: int,
) -> None:
    """Node 0 trains, node 1 samples. What node 0 had in memory is lost with it, and read from a checkpoint."""
    raw = exact_run(root, tmp_path / "healed", 1, nnodes=2, healing=HEALING | {"spares": 1}, save_freq=(1, 100)[lost])
    raw["rollout"] |= {"placement": "separate", "num_nodes": 1}
    point = ("update_actor", "gen")[lost]
    fault = {"point": point, "count": 3, "rank": lost, "action": "kill all", "once": str(tmp_path / "lost")}
    with Nodes(raw, tmp_path, 3, SOAK_FAULT=json.dumps(fault)) as run:
        assert run.launchers[lost].wait(300) == -signal.SIGKILL, run.text(lost)
        for node in {0, 1, 2} - {lost}:
            assert run.launchers[node].wait(300) == 0, run.text(node)
        out = run.text(1 - lost) + run.text(2)
    assert f"resumed from {MEMORY_FOLDER if lost else raw['trainer']['output_dir']}" in out, out
    assert f"healing: lost node {lost} after 2 steps, with 2 ranks; goes on with 2, in the layout of the config" in out
    raw["trainer"]["n_gpus_per_node"] = 2
    raw["rollout"] |= {"num_nodes": None, "num_ranks": 1}
    same_as_undisturbed(tmp_path, raw)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("half", [0, 1])
def test_a_node_that_was_cut_off_finds_another_epoch_and_joins_it_at_the_next_step(
    root: Path,  # noqa: F811
    tmp_path: Path,
    half: int,
) -> None:
    """All processes of a node are stopped in a step, the other node goes on, then they continue: both are alive then."""
    allowed, output = tmp_path / "allowed", tmp_path / "healed"
    raw = exact_run(
        root,
        output,
        1,
        nnodes=2,
        healing={**HEALING, "node_timeout_s": 8.0},
        save_freq=1,
        total_training_steps=6,
        stall_timeout_s=None,
    )
    raw["reward"] = {
        "function": "tests.slurm.gate:gated_reward",
        "kwargs": {"heartbeat": str(output / "heartbeat"), "allowed": str(allowed)},
        "timeout_s": 600.0,
    }
    allowed.write_text("2")
    with Nodes(raw, tmp_path) as run:
        run.after(2)
        run.send(half, signal.SIGSTOP)
        allowed.write_text("4")
        run.after(4)
        run.send(half, signal.SIGCONT)
        time.sleep(10)  # the other one sees it, and asks its ranks to stop after the step
        allowed.write_text("6")
        for launcher in run.launchers:
            assert launcher.wait(300) == 0, run.text(0) + run.text(1)
        assert f"healing: node {half} has ended its ranks: " in run.text(half)
    kinds = [event["kind"] for event in read_events(output) if event["kind"] != "failed"]
    assert kinds == ["started", "lost", "resumed", "healed", "grown", "resumed", "done"]
    raw["reward"]["kwargs"]["allowed"] = str(tmp_path / "all")
    (tmp_path / "all").write_text("99")
    same_as_undisturbed(tmp_path, raw)
