"""Environments in worker processes: replay, and what hostile ones can do to the run and to their neighbours: nothing.

Nothing here depends on time but that a hang is ended: TIMEOUT_S is long for what is done, and no test measures it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config import ConfigError, MultiTurnConfig
from grpo_megatron.environments.environment import Outcome, Step
from grpo_megatron.environments.pool import EnvironmentPool, try_episode
from grpo_megatron.processes.process import MARK
from tests.environments.games import Guess
from tests.environments.hostile import FATAL, HARMLESS
from tests.rewards.waiting import processes_with, wait_until

TIMEOUT_S = 6.0
GUESSES = ["5", "no number", "2", "8"]


def make_pool(name: str, **settings: Any) -> EnvironmentPool:
    return EnvironmentPool(
        f"tests.environments.{name}", **{"timeout_s": TIMEOUT_S, "max_characters": 100_000, **settings}
    )


def played(seed: int, guesses: list[str]) -> list[Step]:
    """Returns the game's answers, without any process."""
    game = Guess()
    game.reset({}, seed)
    return [game.step(guess) for guess in guesses]


def steps(pool: EnvironmentPool, completions: dict[str, str]) -> dict[str, Outcome]:
    for key, completion in completions.items():
        pool.step(key, completion)
    return pool.wait(completions)


def living() -> list[int]:
    """Lists the processes that a worker of this process has started."""
    return processes_with(f"{MARK}={os.getpid()}.")


@pytest.mark.parametrize("name", ["games:Guess", "games:AsyncGuess"])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_many_environments_answer_as_one_would(name: str, num_workers: int) -> None:
    """Keys are asked for in another order than they were started; the number of workers changes nothing."""
    keys = [str(seed) for seed in range(60)]
    with make_pool(name, num_workers=num_workers) as pool:
        for key in keys:
            pool.start(key, {}, int(key))
        assert {outcome.step.messages[0]["role"] for outcome in pool.wait(keys).values() if outcome.step} == {"user"}
        answers: dict[str, list[Step | None]] = {key: [] for key in keys}
        for guess in GUESSES:
            for key in reversed(keys):
                pool.step(key, guess)
            for key, outcome in pool.wait(keys).items():
                answers[key].append(outcome.step)
        assert answers == {key: played(int(key), GUESSES) for key in keys}
        pool.end(keys)
        pool.start("0", {}, 0, GUESSES)  # the state is that of the seed and the completions
        assert pool.wait(["0"])["0"].step == played(0, GUESSES)[-1]


@pytest.mark.slow
@pytest.mark.soak
def test_one_worker_serves_hundreds_at_once() -> None:
    """With two descriptors each, more than select(2) can wait for, and more than the usual limit of 1024."""
    keys = [str(seed) for seed in range(520)]
    with make_pool("hostile:Hostile", timeout_s=60.0) as pool:
        workers = list(pool._processes._hosts)
        for key in keys:
            pool.start(key, {}, int(key))
        pool.wait(keys)
        outcomes = steps(pool, {key: "5" if int(key) % 100 else "exit" for key in keys})
        assert [key for key in keys if outcomes[key].status == "died"] == [str(number) for number in range(0, 520, 100)]
        assert all(outcomes[key].step == played(int(key), ["5"])[0] for key in keys if int(key) % 100)
        assert pool._processes._hosts == workers  # nothing was saved by a replay


@pytest.fixture(scope="module")
def hostile() -> Iterator[tuple[EnvironmentPool, dict[str, Outcome]]]:
    """Yields a pool of one worker after a turn in which every act was played at once, with neighbours between them."""
    acts = [*FATAL, *HARMLESS]
    neighbours = [f"neighbour {number}" for number in range(len(acts))]
    with make_pool("hostile:Hostile", memory_gib=0.5) as pool:
        workers = list(pool._processes._hosts)
        for number, (act, neighbour) in enumerate(zip(acts, neighbours, strict=True)):
            pool.start(act, {"secret": 5}, 0)
            pool.start(neighbour, {}, number)
        assert {outcome.status for outcome in pool.wait([*acts, *neighbours]).values()} == {"ok"}
        first = steps(pool, dict.fromkeys(neighbours, GUESSES[0]))
        outcomes = steps(pool, {act: act for act in acts})
        second = steps(pool, dict.fromkeys(neighbours, GUESSES[1]))
        for number, neighbour in enumerate(neighbours):
            seen = [one[neighbour].step for one in (first, second)]
            assert seen == played(number, GUESSES[:2]), f"{neighbour}: {first[neighbour]}, {second[neighbour]}"
        yield pool, outcomes
        assert pool._processes._hosts == workers  # nothing was saved by a replay
        pool.end([*acts, *neighbours])
        wait_until(lambda: len(living()) == 1)  # the worker; whatever the acts have started is gone
    assert living() == []


@pytest.mark.parametrize("act", FATAL)
def test_a_hostile_environment_ends_its_own_trajectory(hostile: Any, act: str) -> None:
    pool, outcomes = hostile
    status, message, _ = FATAL[act]
    assert (outcomes[act].status, outcomes[act].step) == (status, None), outcomes[act]
    assert message in outcomes[act].message
    assert len(outcomes[act].message) < 1000
    assert steps(pool, {act: "5"})[act].status == status  # whoever asks again is told again


@pytest.mark.parametrize("act", HARMLESS)
def test_what_an_environment_may_do_to_itself(hostile: Any, act: str) -> None:
    pool, outcomes = hostile
    message = {"role": "user", "content": "done \ufffd", "name": "\ufffd"}
    assert outcomes[act].step == Step([message], metrics={"_" + "x" * 96: 1.0}), outcomes[act]
    again = steps(pool, {act: "change the folder"})[act]  # it still answers
    assert again.step == outcomes[act].step, again


@pytest.mark.parametrize("act", ["raise", "exit", "no Step", "hang"])
def test_a_reset_can_fail_too(act: str) -> None:
    with make_pool("hostile:Hostile", timeout_s=2.0) as pool:
        pool.start("x", {"act": act}, 0)
        assert pool.wait(["x"])["x"].status == FATAL[act][0]


@pytest.mark.parametrize("act", ["kill the worker", pytest.param("stop the worker", marks=pytest.mark.soak)])
def test_a_worker_that_is_killed_is_replaced(act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trajectories are replayed, those in execution one by one, and whoever kills the new worker too is found."""
    monkeypatch.setattr("grpo_megatron.processes.pool.GRACE_S", 1.0)
    with make_pool("hostile:Hostile", timeout_s=3.0) as pool:
        keys = [str(seed) for seed in range(6)]
        for key in keys:
            pool.start(key, {}, int(key))
        pool.wait(keys)
        idle, asked = keys[:2], keys[2:]
        for key in asked:
            pool.step(key, GUESSES[0])
        pool.wait(asked)
        outcomes = steps(pool, {"2": GUESSES[1], "3": act, "4": GUESSES[1], "5": "hang"})
        assert (outcomes["3"].status, "twice" in outcomes["3"].message) == ("died", True), outcomes["3"]
        assert outcomes["5"].status == "timeout", outcomes["5"]
        for key in ("2", "4"):
            assert outcomes[key].step == played(int(key), GUESSES)[1]
        for key, outcome in steps(pool, dict.fromkeys(idle, GUESSES[0])).items():
            assert outcome.step == played(int(key), GUESSES)[0]
        assert steps(pool, {"3": "5"})["3"].status == "died"


def test_a_turn_that_begins_while_a_new_worker_replays_the_turns_before() -> None:
    """The first trajectory is in replay when it is asked again; the replay of the last waits, and has the new turn."""
    with make_pool("hostile:Hostile") as pool:
        for number, key in enumerate(("first", "killer", "last")):
            pool.start(key, {}, number)
        pool.wait(["first", "killer", "last"])
        steps(pool, {"first": GUESSES[0], "last": GUESSES[0]})
        pool.step("killer", "kill the worker")
        assert pool.wait(["killer"])["killer"].status == "died"
        outcomes = [steps(pool, {"first": guess, "last": guess}) for guess in GUESSES[1:]]
        for number, key in ((0, "first"), (2, "last")):
            assert [one[key].step for one in outcomes] == played(number, GUESSES)[1:]


def test_what_an_environment_has_started_lives_as_long_as_its_trajectory() -> None:
    """A process that has left its session, and whose parent is gone, survives the end of a neighbour."""
    with make_pool("hostile:Hostile") as pool:
        pool.start("a", {}, 0)
        pool.start("b", {}, 0)
        pool.wait("ab")
        started = steps(pool, {"a": "daemon"})["a"].step
        assert started
        process = Path("/proc") / started.messages[0]["content"]
        for act in ("exit", "kill itself"):
            pool.end(["b"])
            pool.start("b", {}, 0)
            pool.wait("b")
            assert steps(pool, {"b": act})["b"].status == "died"
            assert process.exists()
        pool.end(["a"])
        wait_until(lambda: not process.exists())


def test_generators_are_seeded_and_sets_have_one_order() -> None:
    """A trajectory samples the same numbers in another process, after any other work of the worker."""
    runs = []
    for _ in range(2):
        with make_pool("hostile:Dice") as pool:
            for key, seed in (("a", 1), ("b", 2), ("c", 1)):
                pool.start(key, {}, seed)
            first = pool.wait("abc")
            second = steps(pool, dict.fromkeys("cba", "roll"))
            runs.append({key: (first[key].step, second[key].step) for key in "abc"})
    assert runs[0] == runs[1]
    assert runs[0]["a"] == runs[0]["c"] != runs[0]["b"]


@pytest.mark.parametrize("act", ["raise", "exit"])
def test_what_fails_once_is_tried_again_from_its_row_with_all_completions(act: str, tmp_path: Path) -> None:
    """Failures that come twice are named. Seeds and completions of the second try are those of the first."""
    with make_pool("games:Flaky") as pool:
        for key, times in (("once", 1), ("twice", 2), ("never", 0)):
            pool.start(key, {"file": str(tmp_path / f"{act} {key}"), "times": times, "act": act}, 7)
        pool.wait(["once", "twice", "never"])
        steps(pool, dict.fromkeys(("once", "twice", "never"), "5"))
        outcomes = steps(pool, dict.fromkeys(("once", "twice", "never"), "2"))
        assert outcomes["once"].step == outcomes["never"].step == played(7, ["5", "2"])[-1]
        assert outcomes["twice"].step is None
        assert outcomes["twice"].status == {"raise": "raised", "exit": "died"}[act]


def test_keys_can_be_used_again_and_ended_at_any_time() -> None:
    with make_pool("hostile:Hostile") as pool:
        pool.start("x", {}, 0)
        pool.wait(["x"])
        for act in ("hang", "5"):
            pool.step("x", act)
            pool.end(["x", "unknown"])  # its answer is under way, or never comes
            pool.start("x", {}, 1, GUESSES[:1])
            assert pool.wait(["x"])["x"].step == played(1, GUESSES)[0]


@pytest.mark.soak
def test_what_a_program_prints_is_in_its_error_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A program of the environment `command` that fails is tried twice. Its traceback is once in the error, not above it."""
    (program := tmp_path / "agent.py").write_text(
        "import sys\nprint('hello', file=sys.stderr)\nprint(1 / int(sys.argv[1]))"
    )
    for divisor, problem in (("0", "ZeroDivisionError"), ("1", "without a request")):
        kwargs = {"command": [sys.executable, str(program), divisor]}
        with pytest.raises(ConfigError, match=problem) as error:
            list(try_episode(MultiTurnConfig(environment="command", kwargs=kwargs), {"prompt": "x"}, "y"))
        assert f'{program}", line 3' in str(error.value) or divisor == "1"
        assert str(error.value).count("\n    Traceback") == (divisor == "0") and capfd.readouterr().err == ""


def test_a_request_to_stop_leaves_the_host(capfd: pytest.CaptureFixture[str]) -> None:
    """Slurm and `kill` send SIGINT and SIGUSR1 to all processes of a job. The ranks finish their step, with this host."""
    with make_pool("games:Guess") as pool:
        pool.start("x", {}, 1)
        first = pool.wait(["x"])["x"]
        [host] = pool._processes._hosts
        for request in (signal.SIGINT, signal.SIGUSR1):
            os.kill(host._process.pid, request)
        pool.step("x", GUESSES[0])
        assert first.step is not None and pool.wait(["x"])["x"].step is not None
        assert host._process.poll() is None and "Traceback" not in capfd.readouterr().err


def test_environments_that_cannot_be_loaded() -> None:
    problems = {
        "nowhere:Game": "cannot import module 'tests.environments.nowhere'",
        "games:Chess": "has no attribute 'Chess'",
        "games:re": "is no subclass",
    }
    for name, problem in problems.items():
        with make_pool(name) as pool, pytest.raises(RuntimeError, match=problem):
            pool.start("x", {}, 0)
            pool.wait("x")
    with make_pool("hostile:BadSetup") as pool:
        pool.start("x", {}, 0)
        assert pool.wait("x")["x"].message.startswith("OSError: no such game (hostile.py, line ")
    with pytest.raises(ValueError, match=r"rollout.multi_turn.kwargs cannot be passed"):
        make_pool("games:Guess", kwargs={"most": object()})
