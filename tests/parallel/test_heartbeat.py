"""A rank that does not go on is named with node, phase and step, all ranks end, and a slow rank is left alone.

The rules of a stall are tested without processes, on a clock of the test. Real ranks are stopped, sleep for ever, and hang in
C code that keeps Python's lock; the time of a stall is a few seconds there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_megatron.device import Device
from grpo_megatron.parallel import heartbeat as module
from grpo_megatron.parallel.heartbeat import Beat, Heartbeat, LauncherWatch, StalledRank, Watch, behind, table
from grpo_megatron.parallel.mesh import build_mesh
from tests.runs import make_run, stand_in_trainer
from tests.worlds import ranks

ROOT = Path(__file__).resolve().parents[2]


# -- the rules ---------------------------------------------------------------------------------------------------------


def beats(number: int = 0, **of_rank_1: Any) -> dict[int, Beat]:
    """Beat `number` of two ranks in step 3; rank 0 waits in a collective, which is not idle."""
    beat = Beat(0, "node-a", 11, 1, number, 3, "step/gen", 40, 0.0, 0.0, "all_reduce (distributed_c10d.py:1)")
    return {0: beat, 1: replace(beat, rank=1, node="node-b", pid=12, **of_rank_1)}


def first_alarm(of_rank_1: Any, *, until: float = 600.0, pauses: dict[int, float] | None = None) -> Any:
    """Returns (seconds, ranks) of the first alarm of a watch with 45 s and looks every 5 s; None: there is none.

    `of_rank_1(seconds)` is what the last beat of rank 1 says. `pauses`: at these looks, the watcher itself was not
    running.
    """
    watch, now = Watch(45.0, 5.0, now=0.0), 0.0
    for look in range(int(until // 5)):
        now += 5.0 + (pauses or {}).get(look, 0.0)
        if stalled := watch.update(beats(look, **of_rank_1(now)), now):
            return now, [beat.rank for beat in stalled]
    return None


def test_a_silent_rank_is_found_within_a_minute() -> None:
    alarm = first_alarm(lambda now: {"count": 7})
    assert alarm is not None and alarm[1] == [1] and 45 < alarm[0] < 60


def test_an_idle_rank_is_found_within_a_minute_inside_a_step_only() -> None:
    assert first_alarm(lambda now: {"idle_s": now, "phase": "step/update_actor"}) == (50.0, [1])
    for phase in ("", "save_checkpoint", "step/renew_reference", "finish"):
        assert first_alarm(lambda now, phase=phase: {"idle_s": now, "phase": phase}) is None


@pytest.mark.parametrize(
    "of_rank_1",
    [
        lambda now: {},  # beats, and works: a generation of ten minutes
        lambda now: {"count": 7, "changes": int(now // 40)},  # its beats cannot be read, but the run goes on
        lambda now: {"idle_s": now % 40},  # waits for a tool now and then
        lambda now: {"count": 7, "ended": True},
    ],
)
def test_what_is_no_stall(of_rank_1: Any) -> None:
    assert first_alarm(of_rank_1) is None


def test_a_pause_of_the_watcher_is_no_silence() -> None:
    """The whole machine was suspended for an hour, or all its ranks were stopped and continued."""
    assert first_alarm(lambda now: {"count": 1 if now < 3700 else 2}, pauses={1: 3600.0}, until=30.0) is None
    watch = Watch(45.0, 5.0, now=0.0)
    watch.update(beats(1), 5.0)
    assert watch.update(beats(1), 3600.0) == [] and watch.silent_s[1] == 10.0


@pytest.mark.parametrize(("stopped", "least"), [(frozenset[int](), 450), (frozenset([1]), 45)])
def test_a_rank_may_be_silent_for_longer_while_a_checkpoint_is_saved(stopped: frozenset[int], least: int) -> None:
    """10 x 45 s, also where only one rank has been able to say that it saves, or saves beside the step; not if stopped."""
    watch, alarms = Watch(45.0, 5.0, now=0.0), []
    for look in range(1, 120):
        seen = beats(look, count=7)
        seen[0] = replace(seen[0], is_saving=True)
        if watch.update(seen, 5.0 * look, stopped=stopped):
            alarms.append(5.0 * look)
    assert least < alarms[0] < least + 20


def fake(folder: Path, size: int = 2) -> Any:
    """Makes the heartbeat of rank 0 without a world."""
    return Heartbeat(folder, SimpleNamespace(run_rank=0, run_size=size, role=""), 45.0)  # type: ignore[arg-type]


def looks(seen: Any, number: int = 20, files_s: float = 0.1) -> tuple[list[Any], float]:
    """Returns (alarms, `files_stall_s`) of rank 0's watch after looks every 5 s; `seen(look)` is what it reads."""
    watch, alarms = Watch(45.0, 5.0, now=0.0), []
    for look in range(1, number + 1):
        alarms += watch.update(seen(look), 5.0 * look, beats(look)[0], files_s)
    return alarms, watch.files_stall_s


def test_a_stalled_file_system_is_not_the_ranks() -> None:
    old = beats(0)
    other = old[1]
    assert looks(lambda look: old) == ([], 100.0)  # full, or stale: the watcher's own beat does not come back
    assert looks(lambda look: {1: other}) == ([], 100.0)
    assert looks(lambda look: {**beats(look), 1: other}, files_s=11.0) == ([], 220.0)  # or much too late
    assert looks(lambda look: beats(look))[1] == 0.0

    # Of three nodes both others are silent at once; then one of them is back, and the other one is a rank that has stalled.
    third = replace(other, rank=2, node="node-c", pid=13)
    alarms, stall_s = looks(lambda look: {**beats(look), 1: other, 2: third})
    assert alarms == [] and 90 < stall_s <= 100
    alarms, stall_s = looks(lambda look: {**beats(look), 1: other, 2: replace(third, count=look)})
    assert {beat.rank for beat in alarms} == {1} and stall_s == 0.0


def test_a_stalled_file_system_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heartbeat = fake(tmp_path)
    watch, is_named = Watch(45.0, 5.0, now=0.0), False
    for stall_s in (40.0, 50.0, 60.0, 0.0, 45.0):
        watch.files_stall_s = stall_s
        is_named = heartbeat._name_stalled_files(watch, is_named)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"warning: the file system of {tmp_path} has stalled, as node ") and "for 50 s" in first
    assert "for 45 s" in second


def test_a_timeout_while_the_thread_waits_for_the_file_system_names_it(tmp_path: Path) -> None:
    heartbeat = fake(tmp_path)
    heartbeat._files_since = time.monotonic() - 100.0
    with pytest.raises(StalledRank, match=f"the file system of {tmp_path} has stalled"), heartbeat.naming_timeouts():
        raise RuntimeError("the collective timed out")


def test_who_is_behind_and_the_table() -> None:
    both = list(beats(1, changes=39, phase="step/reward", phase_s=17.2).values())
    assert [beat.rank for beat in behind(both)] == [1]
    assert behind(list(beats().values())) == []
    sending = replace(beats()[0], phase="")  # a rollout rank that sends a step's samples
    assert (sending.place, replace(sending, step=None).place) == ("between phases of step 3", "phase start")
    roles = [replace(beat, role=("training", "rollout")[beat.rank], changes=beat.rank) for beat in beats().values()]
    assert behind(roles) == []  # each role has phases of its own
    assert roles[1].name == "rank 1 (rollout, node node-b, process 12)"
    assert table(both).splitlines() == [
        "rank  node    process  step  phase        for   main thread",
        "0     node-a  11       3     step/gen     0 s   all_reduce (distributed_c10d.py:1)",
        "1     node-b  12       3     step/reward  17 s  all_reduce (distributed_c10d.py:1)",
    ]


def test_the_launcher_may_write_its_beat_while_the_folder_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat = fake(tmp_path)
    heartbeat.folder.mkdir()
    (heartbeat.folder / "stalled.json").touch()

    def interrupted(folder: Path, **_: Any) -> None:
        (folder / "stalled.json").unlink()
        (folder / "launcher.json").touch()  # so that the folder cannot be removed

    monkeypatch.setattr("shutil.rmtree", interrupted)
    heartbeat._clear()
    assert [path.name for path in heartbeat.folder.iterdir()] == ["launcher.json"]


def test_a_beat_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    heartbeat = fake(tmp_path, 5)
    heartbeat.folder.mkdir()
    text = json.dumps(asdict(beats()[0]))
    for rank, content in enumerate((text, "", text[:40], "[]")):
        heartbeat._file(rank, "json").write_text(content)
    assert heartbeat._read() == {0: beats()[0]}


@pytest.mark.parametrize(
    ("states", "nodes", "says", "ended"),
    [
        (
            "sleeps stopped",
            1,
            r"process \d+ of a rank has stalled before its first heartbeat: .* is stopped, by SIGSTOP",
            [1],
        ),
        (
            "sleeps sleeps",
            1,
            "all ranks have stalled before their first heartbeat: for 0.6 s none has used a processor",
            [0, 1],
        ),
        ("sleeps sleeps", 2, "", []),  # they may wait for another node
        ("sleeps busy", 1, "", []),
        ("sleeps held", 1, r"process \d+ of a rank has stalled: for 0.6 s the process is stopped", [1]),
        ("beats beats", 1, r"rank 0 .* has stalled in phase start: no sign of life for \d s", [0, 1]),
    ],
)
def test_the_launcher_ends_ranks_that_no_rank_can_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: str, nodes: int, says: str, ended: list[int]
) -> None:
    """Ranks are processes that sleep; "beats" have written one beat before, "held" are then stopped, and the run heals."""
    monkeypatch.setattr(module, "STACKS_S", 0.1)
    folder = tmp_path / module.FOLDER
    folder.mkdir()
    processes = []
    with LauncherWatch(tmp_path, 0.6, os.getpid(), nodes, heals="held" in states) as watch:
        for rank, state in enumerate(states.split()):
            body = "while True: pass" if state == "busy" else "import time; time.sleep(60)"
            processes.append(process := subprocess.Popen([sys.executable, "-S", "-c", body]))
            if state in ("stopped", "held"):
                process.send_signal(signal.SIGSTOP)
            beat = replace(beats()[0], rank=rank, pid=process.pid, node=socket.gethostname(), step=None, phase="")
            if state in ("beats", "held"):
                (folder / f"rank_{rank:05d}.json").write_text(json.dumps(asdict(beat)))
        with contextlib.suppress(subprocess.TimeoutExpired):
            processes[-1].wait(60 if ended else 2)
        lost = [rank for rank, process in enumerate(processes) if process.pid in watch.ended]
        for process in processes:
            process.kill()
            process.wait()
    assert lost == ended and re.match(says or "$", watch.text), watch.text


# -- real ranks --------------------------------------------------------------------------------------------------------

RUN = """
    import ctypes, signal, time
    from pathlib import Path
    from grpo_megatron.device import Device
    from grpo_megatron.parallel.heartbeat import Heartbeat
    from grpo_megatron.parallel.mesh import build_mesh

    mesh = build_mesh(Device("cpu"), tp=1, pp=1, rollout_tp=1)
    with Heartbeat(Path.cwd(), mesh, 3.0) as heartbeat:
        heartbeat.step = 7
        with heartbeat.phase("step"), heartbeat.phase(os.environ["PHASE"]):
            mesh.barrier()
            if mesh.rank == 1:
                (Path.cwd() / "pid").write_text(str(os.getpid()))
                while os.environ["PHASE"] not in (heartbeat.folder / "rank_00001.json").read_text():
                    time.sleep(0.1)
                if os.environ["KIND"] == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif os.environ["KIND"] == "sleeps":
                    time.sleep(10**6)
                else:
                    ctypes.PyDLL(None).sleep(10**6)  # keeps Python's lock
            mesh.barrier()
"""
FOUND = {  # what is said about rank 1, and the line of its stacks, or why there are none
    "stopped": ("the process is stopped, by SIGSTOP or a debugger", "no stacks: the process is stopped"),
    "sleeps": ("it has used no processor, and it waits for no other rank; it is in Trainer.run ", "in run\n"),
    "keeps the lock": ("code in C keeps Python's lock", "in run\n"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["stopped", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("keeps the lock", "sleeps"))]
)
def test_a_stall_is_named_and_ends_all_ranks(run: Path, tmp_path: Path, kind: str) -> None:
    stand_in_trainer(tmp_path, RUN)
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "RANK", "GRPO_DEBUG")}
    phase = env["PHASE"] = "save_checkpoint" if kind == "stopped" else "update_actor"
    result = subprocess.run(
        [sys.executable, "-m", "grpo_megatron", "train", str(run / "run.yaml"), "trainer.device=cpu"],
        cwd=tmp_path,
        env=env | {"KIND": kind, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    pid = int((tmp_path / "pid").read_text())
    words, stacks = FOUND[kind]
    assert result.returncode == 1, result.stderr
    assert not Path(f"/proc/{pid}").exists()
    first, *rest = result.stderr.splitlines()
    who = f"error: rank 1 (node {socket.gethostname()}, process {pid}) has stalled in phase {phase} of step 7: "
    assert first.startswith(who) and words in first
    assert len(rest) == 1 and rest[0].startswith("  what every rank was doing, and the stacks of its threads: ")
    folder = tmp_path / "stalls" / "001"
    assert rest[0].endswith(str(folder))
    silent_s = re.search(r"no sign of life for (\d+) s", first)
    assert silent_s is None or int(silent_s[1]) < 20  # not ten times as long in a save, 30 s
    assert stacks in (folder / "rank_00001.txt").read_text()
    assert "in barrier" in (folder / "rank_00000.txt").read_text()
    assert re.search(rf"\n0 .* 7 +step/{phase} .*\n1 .* 7 +step/{phase} ", (folder / "report.txt").read_text())


@pytest.mark.soak
def test_slow_ranks_are_left_alone(tmp_path: Path) -> None:
    assert healthy(folder=tmp_path) == [["step/gen", "step/reward", "save_checkpoint"]] * 2


@pytest.mark.slow
def test_a_timeout_names_the_rank_that_is_behind(tmp_path: Path) -> None:
    (message, cause), _ = late(folder=tmp_path)
    assert re.match(
        r"a collective has timed out \(trainer.timeout_s\): rank 1 \(node .*\) is still in phase reward of step 5, ",
        message,
    )
    assert cause == "LostRank" and re.search(r"\n  1 .* step/reward ", message)


TIMEOUT_S = 1.0


@ranks(2)
def healthy(folder: Path) -> list[str]:
    """Rank 1 does slowly what a healthy rank may do, each for longer than the time of a stall; rank 0 waits for it."""
    mesh = build_mesh(Device("cpu"), tp=1, pp=1, rollout_tp=1)

    def compute() -> None:
        end = time.monotonic() + 3 * TIMEOUT_S
        while time.monotonic() < end:
            torch.ones(64, 64) @ torch.ones(64, 64)

    pause = 3 * TIMEOUT_S
    works: dict[str, Callable[[], object]] = {  # phases -> a wait for a core, a process, the disk
        "step/gen": compute,
        "step/reward": lambda: subprocess.run(["sleep", str(pause)], check=True),
        "save_checkpoint": lambda: time.sleep(pause),
    }
    with Heartbeat(folder, mesh, TIMEOUT_S) as heartbeat:
        for phases, work in works.items():
            with contextlib.ExitStack() as stack:
                for phase in phases.split("/"):
                    stack.enter_context(heartbeat.phase(phase))
                if mesh.rank == 1:
                    work()
                mesh.barrier()
    return list(works)


@ranks(2)
def late(folder: Path) -> Any:
    """Nothing is watched, and rank 1 comes too late for a collective: the error that rank 0 gets."""
    mesh = build_mesh(Device("cpu"), tp=1, pp=1, rollout_tp=1, timeout_s=4.0)
    over = folder / "over"
    with Heartbeat(folder, mesh, None) as heartbeat:
        heartbeat.step = 5
        try:
            with heartbeat.naming_timeouts(), heartbeat.phase("step"):
                with heartbeat.phase("reward"):
                    while mesh.rank == 1 and not over.exists():
                        time.sleep(0.1)
                mesh.agree(None)
        except StalledRank as error:
            over.touch()
            return str(error), type(error.__cause__).__name__
        except RuntimeError as error:  # rank 1: the other one is gone
            return type(error).__name__
    return None
