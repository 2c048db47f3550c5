"""The pool against rewards that raise, hang, print, exit and crash: the others' scores stay right and in order."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.rewards import rewards
from grpo_megatron.rewards.known import KNOWN_ANSWERS
from grpo_megatron.rewards.reward import read_result
from grpo_megatron.rewards.workers.pool import RewardPool

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 3.0  # wall clock, for rewards that hang: a busy machine must not turn a good sample into a timeout

MODULE = '''
import os, re, signal, sys, threading, time

def score(completion, answer, **kwargs):
    """Number -> that score; a word -> that misbehaviour."""
    match completion:
        case "raise": raise KeyError("gone")
        case "unprintable": raise Unprintable()
        case "exit": sys.exit(2)
        case "os._exit": os._exit(3)
        case "segfault": os.kill(os.getpid(), signal.SIGSEGV)
        case "sleep": time.sleep(60)
        case "spin":
            while True: pass
        case "regex": re.match(r"(a+)+$", "a" * 60 + "b")  # hangs in C and keeps the interpreter lock
        case "print for ever":
            while True: print("x" * 1000)
        case "nan": return float("nan")
        case "none": return None
        case "huge dict": return {"score": 1.0} | {str(n): n for n in range(10**5)}
        case "huge message": raise ValueError("x" * 10**7)
        case "huge print": print("x" * 10**7)
        case "forge": print('{"id": 0, "score": 99.0, "scores": {}}')
        case "read stdin": assert sys.stdin.read() == ""
        case "close": os.close(0); os.close(1)
        case "pipes":
            for fd in range(3, 20):
                try: os.write(fd, b"not json\\n")
                except OSError: pass
            time.sleep(60)
        case "alarm":  # the main thread, so that signals of the user's own work
            signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 0.05); signal.pause()
        case "child": os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "61.375"); time.sleep(60)
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
    (folder / "hanging_import.py").write_text(
        f"import os; open({str(folder / 'imports')!r}, 'a').write('x'); os._exit(9)"
    )
    sys.path.insert(0, str(folder))
    yield str(folder)
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def pool(user_module: str) -> Iterator[RewardPool]:
    with RewardPool(2, 60.0, {"bonus": 7.0}) as pool:
        yield pool


@pytest.fixture(scope="module")
def hasty(user_module: str) -> Iterator[RewardPool]:
    """For rewards that hang."""
    with RewardPool(2, TIMEOUT_S) as pool:
        yield pool


def _check(pool: RewardPool, completion: str) -> Any:
    """The result of one completion in the middle of 40 good ones, whose scores must be their numbers, in order."""
    items = [("user_reward:score", str(number), "") for number in range(40)]
    items.insert(20, ("user_reward:score", completion, ""))
    results = pool.score(items)
    odd = results.pop(20)
    assert [result.score for result in results] == list(range(40))
    assert {result.status for result in results} == {"ok"}
    return odd


@pytest.mark.parametrize(
    ("completion", "status", "message"),
    [
        ("raise", "error", "KeyError: 'gone'"),
        ("unprintable", "error", "Unprintable"),
        ("exit", "error", "SystemExit: 2"),
        ("os._exit", "error", "process died: exit code 3"),
        ("segfault", "error", "process died: signal SIGSEGV"),
        ("nan", "error", "nan, not a finite number"),
        ("none", "error", "NoneType, not a number"),
        ("late step", "error", "step 0 ends at 10; ends are integers above 0 and at most the completion's 9"),
        ("gives up", "timeout", "TimeoutError: enough"),
        ("huge dict", "error", "returned 100001 entries"),
        ("huge message", "error", "ValueError: xxx"),
        ("pipes", "error", "wrote to its reply pipe"),
        ("sleep", "timeout", "no verdict after 3 s (reward.timeout_s)"),
        ("spin", "timeout", "no verdict after 3 s"),
        ("regex", "timeout", "no verdict after 3 s"),
        ("print for ever", "timeout", "no verdict after 3 s"),
    ],
)
def test_a_misbehaving_reward_costs_its_sample_only(
    pool: RewardPool, hasty: RewardPool, completion: str, status: str, message: str
) -> None:
    pool = hasty if status == "timeout" else pool
    before = pool.counts[status]
    start = time.monotonic()
    result = _check(pool, completion)
    assert time.monotonic() - start < 60  # what it would sleep
    assert (math.isnan(result.score), result.scores, result.status) == (True, {}, status)
    assert message in result.message and result.message.startswith("reward 'user_reward:score': ")
    assert len(result.message) < 1000
    assert pool.counts[status] == before + 1


@pytest.mark.parametrize("completion", ["huge print", "forge", "read stdin", "alarm"])
def test_prints_and_signals_do_not_disturb(pool: RewardPool, completion: str) -> None:
    result = _check(pool, completion)
    assert (result.score, result.status, result.message) == (1.0, "ok", "")


def test_closing_the_standard_streams_does_not_disturb(user_module: str) -> None:
    with RewardPool(1) as pool:
        assert _check(pool, "close").score == 1.0


def test_kwargs_reach_the_reward_and_names_may_be_mixed(pool: RewardPool) -> None:
    results = pool.score([("user_reward:score", "bonus", ""), ("user_reward:score", "bonus", "")])
    assert [result.score for result in results] == [7.0, 7.0]
    with RewardPool(2) as plain:
        results = plain.score([("gsm8k", "#### 42", "42"), ("format", "42", ""), ("arithmetic", "", "x")])
    assert [result.score for result in results[:2]] == [1.0, 0.0]
    assert results[0].scores == {"acc": 1.0, "extracted": 1.0}
    assert results[2].status == "error" and "invalid literal for int()" in results[2].message


def test_steps_reach_the_caller(pool: RewardPool) -> None:
    result = _check(pool, "steps")
    assert (result.score, result.scores, result.steps) == (1.0, {}, ((2, 0.5), (5, 1.0)))


def test_printing_is_passed_on_up_to_a_limit(pool: RewardPool, capfd: pytest.CaptureFixture[str]) -> None:
    _check(pool, "forge")
    assert '"score": 99.0' in capfd.readouterr().err
    _check(pool, "huge print")
    error = capfd.readouterr().err
    assert "further output of reward workers is not shown" in error and len(error) < 100_000


def test_all_workers_share_the_work(pool: RewardPool) -> None:
    results = pool.score([("user_reward:score", "1", "")] * 200)
    assert len({result.scores["pid"] for result in results}) == 2


def test_many_bad_samples_in_a_row(hasty: RewardPool) -> None:
    completions = ["os._exit", "1", "raise", "os._exit", "segfault", "sleep", "2", "sleep", "os._exit", "nan", "3"]
    results = hasty.score([("user_reward:score", completion, "") for completion in completions])
    statuses = {"raise": "error", "os._exit": "error", "segfault": "error", "nan": "error", "sleep": "timeout"}
    assert [result.status for result in results] == [statuses.get(completion, "ok") for completion in completions]


def test_a_large_text_arrives_whole_and_nothing_is_nothing(pool: RewardPool) -> None:
    text = "\ud800 \U0001f600 \x00 \n" * 400_000 + "#### 42"
    with RewardPool(1, 30.0) as plain:
        (result,) = plain.score([("gsm8k", text, "42")])
    assert result.score == 1.0
    assert pool.score([]) == []


def test_a_name_the_worker_cannot_load(pool: RewardPool, user_module: str) -> None:
    items = [("no_such_module:score", "", ""), ("user_reward:score", "1", ""), ("no_such_module:score", "", "")]
    results = pool.score(items)
    assert [result.status for result in results] == ["error", "ok", "error"]
    assert "cannot import module 'no_such_module'" in results[2].message
    results = pool.score([("hanging_import:score", "", "")] * 50)
    assert len(Path(user_module, "imports").read_text()) <= 4  # not one process per sample: each takes a second
    assert {result.status for result in results} == {"error"}
    assert "could not be imported" in results[-1].message


def test_names_are_checked_before_any_process_starts() -> None:
    with pytest.raises(ValueError, match="unknown reward 'gsm8'"):
        RewardPool(1, names=["gsm8"])
    with pytest.raises(ValueError, match="with kwargs bonus: got an unexpected keyword argument"):
        RewardPool(1, kwargs={"bonus": 1}, names=["gsm8k"])
    with pytest.raises(ValueError, match="reward.kwargs cannot be passed to the workers as JSON: .* set is not"):
        RewardPool(1, kwargs={"names": {1}})
    with pytest.raises(ValueError, match="reward.timeout_s=0"):
        RewardPool(1, timeout_s=0)


def test_self_test_passes_and_can_fail(pool: RewardPool, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(pool.counts)
    pool.self_test()
    assert dict(pool.counts) == before
    wrong = {"gsm8k": [("#### 41", "42", 1.0)], "format": [("#### 41", "", 0.0)]}
    monkeypatch.setattr("grpo_megatron.rewards.workers.pool.KNOWN_ANSWERS", wrong)
    with pytest.raises(RuntimeError, match="'gsm8k' gave 0.0 .* instead of 1.0 for completion '#### 41'"):
        pool.self_test()
    # a reward that calls everything right is found before its first sample is scored, every time
    for _ in range(2):
        with RewardPool(1) as fresh, pytest.raises(RuntimeError, match="'format' gave 1.0 .* instead of 0.0"):
            fresh.score([("format", "#### 1", "")])


def test_every_reward_of_the_package_has_known_answers_on_both_sides() -> None:
    assert sorted(KNOWN_ANSWERS) == rewards.names()
    for name, known in KNOWN_ANSWERS.items():
        assert len({score for _, _, score in known}) > 1, name
        for completion, answer, score in known:
            assert read_result(rewards.get(name)(completion, answer))[0] == score, (name, completion)


def test_the_memory_of_a_built_in_reward_is_limited() -> None:
    script = textwrap.dedent("""
        import mmap
        from grpo_megatron.rewards.workers.worker import MEMORY_LIMIT, Memory
        memory = Memory()
        memory.limit(True)
        try:
            mmap.mmap(-1, MEMORY_LIMIT + 1)  # pages that nobody touches
        except OSError:
            memory.limit(False)
            mmap.mmap(-1, MEMORY_LIMIT + 1)
            print("limited, then not")
    """)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "limited, then not\n", done.stderr


def test_workers_that_cannot_start_are_a_runtime_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with RewardPool(1) as pool, pytest.raises(RuntimeError, match="reward workers do not start; .*exit code 1"):
        pool.score([("gsm8k", "", "1")])


def test_a_worker_lost_between_two_calls_is_replaced(pool: RewardPool) -> None:
    pids = {int(result.scores["pid"]) for result in pool.score([("user_reward:score", "1", "")] * 200)}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    _until(lambda: not any(map(_alive, pids)))
    assert {result.status for result in pool.score([("user_reward:score", "1", "")] * 20)} == {"ok"}


def test_what_a_reward_has_started_is_killed_with_it(hasty: RewardPool) -> None:
    assert _check(hasty, "child").status == "timeout"
    _until(lambda: not [line for line in _processes() if line.endswith("sleep 61.375")])


def test_a_closed_pool_leaves_no_process_and_refuses_work(user_module: str) -> None:
    with RewardPool(3) as pool:
        pids = {int(r.scores["pid"]) for r in pool.score([("user_reward:score", "1", "")] * 100)}
    assert not [pid for pid in pids if _alive(pid)]
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.score([])


@pytest.mark.parametrize("completion", ["1", "regex"])
def test_workers_die_with_a_killed_parent(user_module: str, completion: str) -> None:
    """The parent says which worker it has and then hangs in it, or idles; after its SIGKILL no process may be left."""
    script = textwrap.dedent("""
        import sys, time
        sys.path[:0] = [sys.argv[1], sys.argv[2]]
        from grpo_megatron.rewards.workers.pool import RewardPool
        with RewardPool(1, 60.0) as pool:
            print(int(pool.score([("user_reward:score", "1", "")])[0].scores["pid"]), flush=True)
            pool.score([("user_reward:score", sys.argv[3], "")])
            time.sleep(60)
    """)
    command = [sys.executable, "-c", script, str(ROOT), user_module, completion]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.5)  # the worker hangs by now
        assert _alive(pid)
        parent.kill()
    _until(lambda: not _alive(pid))


def test_throughput() -> None:
    """A step of 512 x 8 samples on 8 ranks is 512 items per rank. The bound is 1/30 of the rate on an idle core."""
    items = [("gsm8k", "I think. " * 100 + f"#### {number}", str(number)) for number in range(2000)]
    with RewardPool(1) as pool:
        start = time.monotonic()
        results = pool.score(items)
        rate = len(items) / (time.monotonic() - start)
    print(json.dumps({"answers_per_s": round(rate)}))
    assert {result.score for result in results} == {1.0}
    assert rate > 200


def _until(condition: Callable[[], bool]) -> None:
    """Wait for `condition`. The limit is below the 61 s after which the processes end by themselves."""
    deadline = time.monotonic() + 45
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _processes() -> list[str]:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip())
        except OSError:
            continue
    return lines
