"""The reward `programs`: answers that are Python programs, run in the sandbox of the tool `python` against a row's tests.

rows of                              the program is right if
evalplus/humanevalplus, mbppplus     the row's `test` runs to its end behind it, then `check(entry_point)` if there is one
livecodebench/code_generation_lite   `testtype` stdin: each run prints the output of the test, line by line as text or as
                                     decimals; functional: `Solution().f(...)` equals it, f as `metadata` says

The program is the last block in backticks behind the thought, or the whole answer; one without the function that the row names
continues the prompt, as those of base models do. Departures from the public graders are in docs/evaluation.md.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import pickle
import re
import secrets
import time
import zlib
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from grpo_megatron.environments.tools.isolation import ProgramLimits, find_isolation, run_program
from grpo_megatron.rewards.reward import rewards

TESTED_S, TEST_S, TOTAL_S = 10.0, 6.0, 60.0  # a row's `test`; one test of LiveCodeBench, as there; all of its tests
MEMORY_MIB = 4096  # as evalplus and LiveCodeBench
_BLOCK = re.compile(r"^[ \t]*```[\w+-]*[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_STARS = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json"
)
PRELUDE = "".join(f"from {name} import *\n" for name in [*_STARS.split(), "builtins", "typing"]) + (
    f"import {_STARS.replace(' ', ', ')}\nsys.setrecursionlimit(50000)\n"  # LiveCodeBench's own
)
# The program's own output goes nowhere. What the tests find is printed behind a mark that is drawn for each run, so a program
# that ends early, or prints, has no result. One that searches the frames of its own process could forge it.
HARNESS = """import os, sys
shown, sys.stdout = sys.stdout, open(os.devnull, "w")
space = {{"__name__": "solution"}}
exec({code!r}, space)
space["__found__"] = None
exec({tests!r}, space)
print({mark!r} + repr(space["__found__"]), file=shown)
"""
CALLS = """import json
one = Solution() if "Solution" in globals() else None
call = getattr(one, {name!r}) if hasattr(one, {name!r}) else globals()[{name!r}]
__found__ = [call(*map(json.loads, lines.split("\\n"))) for lines in {inputs!r}]
__found__ = [list(value) if isinstance(value, tuple) else value for value in __found__]
"""


def program_of(completion: str, prompt: str = "", entry_point: str = "") -> str:
    """Returns the program of an answer."""
    text = completion.rpartition("</think>")[2]
    if blocks := _BLOCK.findall(text):
        return str(blocks[-1])
    if not entry_point or re.search(rf"def\s+{re.escape(entry_point)}\b", text):
        return text
    return str([prompt, *_BLOCK.findall(prompt)][-1]) + text


def check_isolation(*, unsafe: bool = False, **_: object) -> None:
    """Raises ValueError where nothing isolates programs."""
    find_isolation(unsafe)


@rewards.register("programs", check=check_isolation, least_timeout_s=TOTAL_S + TESTED_S)
def programs_reward(
    completion: str,
    answer: str,
    *,
    prompt: str = "",
    test: str = "",
    entry_point: str = "",
    public_test_cases: str = "[]",
    private_test_cases: str = "[]",
    metadata: str | Mapping[str, Any] = "{}",
    unsafe: bool = False,
) -> dict[str, float]:
    """Returns 1 for a program that passes all tests, else 0. `answer` is not used. Raises ValueError: no tests, or wrong ones."""
    code, kind = program_of(completion, prompt, entry_point), find_isolation(unsafe)
    if test:
        tests = f"{test}\n\ncheck({entry_point})\n" if "def check(" in test else test
        passed = _found(code, tests, kind, TESTED_S) == "None"
    else:
        tests = [*read_tests(public_test_cases), *read_tests(private_test_cases)]
        if not tests:
            raise ValueError("the row has no tests: neither `test` nor `public_test_cases` and `private_test_cases`")
        if tests[0]["testtype"] == "functional":
            about = json.loads(metadata) if isinstance(metadata, str) else metadata
            passed = _passes_calls(code, tests, str(about.get("func_name")), kind)
        else:
            passed = _passes_runs(code, tests, kind)
    return {"score": float(passed), "acc": float(passed)}


def _found(code: str, tests: str, kind: str, seconds: float) -> str:
    """Runs `tests` behind the program; returns what they found, "" where either failed."""
    mark = secrets.token_hex(16)
    text, problem = run_program(HARNESS.format(code=code, tests=tests, mark=mark), _limits(seconds), kind)
    return "" if problem else text.rpartition(mark)[2].strip() if mark in text else ""


def _limits(seconds: float) -> ProgramLimits:
    return ProgramLimits(seconds, MEMORY_MIB)


def _passes_calls(code: str, tests: Sequence[Mapping[str, str]], name: str, kind: str) -> bool:
    calls = CALLS.format(name=name, inputs=[test["input"] for test in tests])
    try:
        found = ast.literal_eval(_found(f"{PRELUDE}\n{code}", calls, kind, min(TEST_S * len(tests), TOTAL_S)) or "None")
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # a value that is no plain data
        return False
    return bool(found == [json.loads(test["output"]) for test in tests])


def _passes_runs(code: str, tests: Sequence[Mapping[str, str]], kind: str) -> bool:
    left = TOTAL_S
    for test in tests:
        began = time.monotonic()
        text, problem = run_program(f"{PRELUDE}\n{code}", _limits(min(TEST_S, left)), kind, test["input"])
        left -= time.monotonic() - began
        if problem or left <= 0 or not same_output(text, test["output"]):
            return False
    return True


def same_output(printed: str, expected: str) -> bool:
    """Compares line by line, without white space around it: equal texts, or equal decimals in equal number."""
    lines, wanted = ([line.strip() for line in text.strip().split("\n")] for text in (printed, expected))
    return len(lines) == len(wanted) and all(
        one == other or _decimals(one) == _decimals(other) is not None for one, other in zip(lines, wanted, strict=True)
    )


def _decimals(line: str) -> list[Decimal] | None:
    try:
        return [Decimal(word) for word in line.split()]
    except InvalidOperation:
        return None


class _TextOnly(pickle.Unpickler):
    """Reads a pickled text; the files are others', and a pickle could name any function."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"the tests are a pickle that names {module}.{name}; only a text is read")


def read_tests(cases: str | Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Reads tests {"input", "output", "testtype"}: JSON, or its text as a pickle, in zlib and base64. Raises ValueError."""
    if isinstance(cases, str):
        try:
            cases = json.loads(cases)
        except json.JSONDecodeError:
            packed = zlib.decompress(base64.b64decode(cases))
            cases = json.loads(_TextOnly(io.BytesIO(packed)).load())
    return [dict(case) for case in cases]
