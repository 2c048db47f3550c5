"""The pool against rewards that raise, hang, print, exit and crash: the other results stay right and in order.

A slow or busy machine does not fail these tests. Good samples may take PATIENCE_S, or TIMEOUT_S in tests where other
samples must hang; they need microseconds. No test sleeps for a fixed time: it waits for a condition, up to PATIENCE_S.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.processes.pool import ProcessPool
from grpo_megatron.processes.process import MARK, new_mark
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rewards.reward import RewardResult
from tests.rewards.waiting import PATIENCE_S, processes_with, wait_until

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 3.0

MODULE = '''
import os, re, signal, sys, threading, time

def reward(completion, answer, **kwargs):
    """Number -> that reward; a word -> that misbehaviour."""
    match completion:
        case "raise": raise KeyError("gone")
        case "unprintable": raise Unprintable()
        case "exit": sys.exit(2)
        case "os._exit": os._exit(3)
        case "segfault": os.kill(os.getpid(), signal.SIGSEGV)
        case "sleep": time.sleep(600)
        case "spin":
            while True: pass
        case "regex": re.match(r"(a+)+$", "a" * 60 + "b")  # hangs in C and keeps the interpreter lock
        case "print for ever":
            while True: print("x" * 1000)
        case "nan": return float("nan")
        case "huge message": raise ValueError("x" * 10**7)
        case "huge print": print("x" * 10**7)
        case "forge": print('{"id": 0, "reward": 99.0, "metrics": {}, "steps": []}')
        case "read stdin": assert sys.stdin.read() == ""
        case "close": os.close(0); os.close(1)
        case "pipes":
            for fd in range(3, 20):
                try: os.write(fd, b"not json\\n")
                except OSError: pass
            time.sleep(600)
        case "alarm":  # the main thread, so that signals of the user's own work
            signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 0.05); signal.pause()
        case "daemon" | "naked daemon" | "daemon, then exit":
            environment = {} if completion == "naked daemon" else os.environ
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0: os.execve("/bin/sleep", ["sleep", "601.375"], environment)
                os._exit(0)
            os.wait()
            if completion == "daemon, then exit": os._exit(3)
            time.sleep(600)
        case "escapes": print("\\033[2J\\033]0;title\\007a\\rb\\tc\\x9b5m", file=sys.stderr); raise ValueError("\\033[31mred")
        case "announced regex": print("it hangs now", flush=True); re.match(r"(a+)+$", "a" * 60 + "b")
        case "bonus": return kwargs["bonus"]
        case "steps": return {"score": 1, "steps": [(2, 0.5), (len(completion), 1)]}
        case "late step": return {"score": 1, "steps": [(len(completion) + 1, 1)]}
        case "gives up": raise TimeoutError("enough")
        case _: return {"score": float(completion), "pid": os.getpid()}
    return 1.0

class Unprintable(Exception):
    def __str__(self): raise RuntimeError
'''


@pytest.fixture(scope="module")
def user_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("user")
    (folder / "user_reward.py").write_text(MODULE)
    (folder / "dying_import.py").write_text("import os; os.kill(os.getpid(), 9)")
    sys.path.insert(0, str(folder))
    yield str(folder)
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def pool(user_module: str) -> Iterator[RewardPool]:
    with RewardPool(2, PATIENCE_S, {"bonus": 7.0}) as pool:
        yield pool


@pytest.fixture(scope="module")
def impatient_pool(user_module: str) -> Iterator[RewardPool]:
    with RewardPool(2, TIMEOUT_S) as pool:
        yield pool


def _grade_among_good(pool: RewardPool, *completions: str) -> list[RewardResult]:
    """Grades completions in the middle of 40 good ones, whose rewards must be their numbers, in order."""
    names = [*map(str, range(20)), *completions, *map(str, range(20, 40))]
    results = pool.grade([("user_reward:reward", name, "") for name in names])
    odd = results[20 : 20 + len(completions)]
    good = results[:20] + results[20 + len(completions) :]
    assert [result.reward for result in good] == list(range(40))
    assert {result.status for result in good} == {"ok"}
    return odd


def _worker_pids(pool: RewardPool, count: int) -> set[int]:
    """Returns the ids of `count` workers, once each of them has started and answered."""
    pids: set[int] = set()

    def has_all() -> bool:
        results = pool.grade([("user_reward:reward", "1", "")] * 20)
        pids.update(int(result.metrics["pid"]) for result in results)
        return len(pids) >= count

    wait_until(has_all)
    return pids


@pytest.mark.parametrize(
    ("completion", "status", "message"),
    [
        ("raise", "error", "KeyError: 'gone'"),
        ("unprintable", "error", "Unprintable"),
        ("exit", "error", "SystemExit: 2"),
        ("os._exit", "error", "process has ended: exit code 3"),
        ("segfault", "error", "process has ended: signal SIGSEGV"),
        ("nan", "error", "nan, not a finite number"),
        ("late step", "error", "step 0 ends at 10; ends are integers above 0 and at most the completion's 9"),
        ("gives up", "timeout", "TimeoutError: enough"),
        ("huge message", "error", "ValueError: xxx"),
        ("pipes", "error", "wrote to its connection"),
    ],
)
def test_a_misbehaving_reward_costs_its_sample_only(
    pool: RewardPool, completion: str, status: str, message: str
) -> None:
    before = pool.counts[status]
    (result,) = _grade_among_good(pool, completion)
    _check_failure(result, status, message)
    assert pool.counts[status] == before + 1


def test_rewards_that_never_return_cost_their_samples_only(user_module: str) -> None:
    with RewardPool(4, TIMEOUT_S) as pool:
        _worker_pids(pool, 4)  # all have started, so that each hangs in one sample
        pool.counts.clear()
        for result in _grade_among_good(pool, "sleep", "spin", "regex", "print for ever"):
            _check_failure(result, "timeout", "no result after 3 s (reward.timeout_s)")
        assert pool.counts == {"ok": 40, "timeout": 4}


def _check_failure(result: RewardResult, status: str, message: str) -> None:
    assert (math.isnan(result.reward), result.metrics, result.status) == (True, {}, status)
    assert message in result.message and result.message.startswith("reward 'user_reward:reward': ")
    assert len(result.message) < 1000


@pytest.mark.parametrize("completion", ["huge print", "forge", "read stdin", "alarm", "close"])
def test_prints_signals_and_closed_streams_do_not_disturb(pool: RewardPool, completion: str) -> None:
    (result,) = _grade_among_good(pool, completion)
    assert (result.reward, result.status, result.message) == (1.0, "ok", "")


def test_kwargs_reach_the_reward_steps_the_caller_and_names_may_be_mixed(pool: RewardPool) -> None:
    bonus, steps = _grade_among_good(pool, "bonus", "steps")
    assert (bonus.reward, steps.reward, steps.metrics, steps.steps) == (7.0, 1.0, {}, ((2, 0.5), (5, 1.0)))
    with RewardPool(2) as plain:
        results = plain.grade([("gsm8k", "#### 42", "42"), ("format", "42", ""), ("arithmetic", "", "x")])
    assert [result.reward for result in results[:2]] == [1.0, 0.0]
    assert results[0].metrics == {"acc": 1.0, "extracted": 1.0}
    assert results[2].status == "error" and "invalid literal for int()" in results[2].message


def test_printing_is_passed_on_up_to_a_limit(user_module: str, capfd: pytest.CaptureFixture[str]) -> None:
    with RewardPool(1, PATIENCE_S) as pool:  # its host writes to the stderr of this test
        _grade_among_good(pool, "forge")
        assert '"reward": 99.0' in capfd.readouterr().err
        _grade_among_good(pool, "huge print")
        error = capfd.readouterr().err
        assert "further output of reward workers is not shown" in error and len(error) < 100_000
    with RewardPool(1, PATIENCE_S) as pool:
        (result,) = _grade_among_good(pool, "escapes")
    assert "ValueError: red" in result.message
    error = capfd.readouterr().err
    assert "a\nb\tc5m\n" in error and "\033" not in error  # nothing that a terminal would obey


def test_a_large_text_arrives_whole_and_nothing_is_nothing(pool: RewardPool) -> None:
    text = "\ud800 \U0001f600 \x00 \n" * 400_000 + "#### 42"
    with RewardPool(1, PATIENCE_S) as plain:
        (result,) = plain.grade([("gsm8k", text, "42")])
    assert result.reward == 1.0
    assert pool.grade([]) == []


def test_a_name_the_worker_cannot_load(pool: RewardPool, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [("no_such_module:reward", "", ""), ("user_reward:reward", "1", ""), ("no_such_module:reward", "", "")]
    results = pool.grade(items)
    assert [result.status for result in results] == ["error", "ok", "error"]
    assert "cannot import module 'no_such_module'" in results[2].message
    submit, started = ProcessPool.submit, []

    def counted(self: ProcessPool, key: str, body: dict[str, Any], *more: Any) -> None:
        started.extend([] if body["samples"] else [body["name"]])
        submit(self, key, body, *more)

    monkeypatch.setattr(ProcessPool, "submit", counted)
    results = pool.grade([("dying_import:reward", "", "")] * 50)
    assert {result.status for result in results} == {"error"}
    assert "could not be imported; the reward's process has ended: signal SIGKILL" in results[-1].message
    assert len(started) <= 2  # one import per worker, instead of one per sample


def test_arguments_are_checked_before_any_process_starts() -> None:
    with pytest.raises(ValueError, match="reward.kwargs cannot be passed to the workers as JSON: .* set is not"):
        RewardPool(1, kwargs={"names": {1}})
    with pytest.raises(ValueError, match="reward.timeout_s=0"):
        RewardPool(1, timeout_s=0)


def test_the_memory_of_a_built_in_reward_is_limited() -> None:
    script = textwrap.dedent("""
        import mmap
        from grpo_megatron.processes.process import limit_memory
        limit_memory(1 << 30)
        try:
            mmap.mmap(-1, (1 << 30) + 1)  # pages that are never touched
        except OSError:
            limit_memory(None)
            mmap.mmap(-1, (1 << 30) + 1)
            print("limited, then not")
    """)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "limited, then not\n", done.stderr


def test_workers_that_cannot_start_are_a_runtime_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with RewardPool(1) as pool, pytest.raises(RuntimeError, match="reward workers do not start: .*exit code 1"):
        pool.grade([("gsm8k", "", "1")])


def test_a_worker_lost_between_two_calls_is_replaced(pool: RewardPool) -> None:
    pids = _worker_pids(pool, 2)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(_is_alive(pid) for pid in pids))
    assert {result.status for result in pool.grade([("user_reward:reward", "1", "")] * 20)} == {"ok"}


@pytest.mark.parametrize(
    "completion", [*(pytest.param(c, marks=pytest.mark.soak) for c in ("daemon", "daemon, then exit")), "naked daemon"]
)
def test_what_a_reward_has_started_is_killed_with_it(impatient_pool: RewardPool, completion: str) -> None:
    """A daemon has its own session and has lost its parent. "naked": it has an empty environment, too."""
    (result,) = _grade_among_good(impatient_pool, completion)
    assert result.status == ("error" if completion == "daemon, then exit" else "timeout"), result
    wait_until(lambda: not processes_with("sleep\0601.375", "cmdline"))


def test_a_pool_ends_what_a_killed_run_has_left() -> None:
    """The run that owns the first process has ended. A process of a run that lives is left alone."""
    with subprocess.Popen(["true"]) as owner:
        pass
    marks = f"{owner.pid}.1.x", new_mark()
    left, living = (subprocess.Popen(["sleep", "603"], env={MARK: mark}) for mark in marks)
    try:
        RewardPool(1).close()
        assert left.wait(PATIENCE_S) == -signal.SIGKILL
        assert living.poll() is None
    finally:
        for process in (left, living):
            process.kill()
            process.wait()


def test_a_closed_pool_leaves_no_process_and_refuses_work(user_module: str) -> None:
    with RewardPool(3) as pool:
        pids = _worker_pids(pool, 3)
    wait_until(lambda: not any(_is_alive(pid) for pid in pids))
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.grade([])


@pytest.mark.parametrize("completion", [pytest.param("1", marks=pytest.mark.soak), "announced regex"])
def test_workers_die_with_a_killed_parent(user_module: str, completion: str) -> None:
    """The parent prints the id of its worker, then the worker idles or hangs; the parent's SIGKILL must end both."""
    script = textwrap.dedent("""
        import sys, time
        sys.path[:0] = [sys.argv[1], sys.argv[2]]
        from grpo_megatron.rewards.pool import RewardPool
        with RewardPool(1, 600.0) as pool:
            print(int(pool.grade([("user_reward:reward", "1", "")])[0].metrics["pid"]), flush=True)
            pool.grade([("user_reward:reward", sys.argv[3], "")])
            time.sleep(600)
    """)
    command = [sys.executable, "-u", "-c", script, str(ROOT), user_module, completion]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stderr is not None
        pid = int(parent.stdout.readline())
        if completion == "announced regex":
            assert parent.stderr.readline() == "it hangs now\n"
        assert _is_alive(pid)
        parent.kill()
        wait_until(lambda: not _is_alive(pid))


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
