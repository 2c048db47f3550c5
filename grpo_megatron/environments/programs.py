"""The reward `programs`: answers that are Python programs, run in the sandbox of the tool `python` against a row's tests.

rows of                              the program is right if
evalplus/humanevalplus, mbppplus     the row's `test` runs to its end behind it, then `check(entry_point)` if there is one
livecodebench/code_generation_lite   `testtype` stdin: each run prints the output of the test, line by line as text or as
                                     decimals; functional: `Solution().f(...)` equals it, f as `metadata` says

The program is the last block in backticks behind the thought, or the last with the function that the row names (an example of its
use may follow). Without a block it is the whole answer; one without that function continues the prompt, as those of base
models do. Departures from the public graders are in docs/evaluation.md.
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
LIMITS = ProgramLimits(memory_mib=MEMORY_MIB, max_printed=1 << 24)  # a right output may have some MB
_BLOCK = re.compile(r"^[ \t]*```[\w+-]*[ \t\r]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_STARS = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json"
)
PRELUDE = "".join(f"from {name} import *\n" for name in [*_STARS.split(), "builtins", "typing"])  # LiveCodeBench's own
PRELUDE += f"import {_STARS.replace(' ', ', ')}\nsys.setrecursionlimit(50000)\n"
# The program's own output goes nowhere. What the tests find is printed behind a mark that is drawn for each run, so a program
# that ends early, or prints, has no result. One that searches the frames of its own process could forge it.
HARNESS = """import os, sys
shown, sys.stdout = sys.stdout, open(os.devnull, "w")
space = {{"__name__": "solution"}}
exec({code!r}, space)
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
    text, function = completion.rpartition("</think>")[2], re.compile(rf"def\s+{re.escape(entry_point)}\b")
    if blocks := _BLOCK.findall(text):
        return str(([one for one in blocks if entry_point and function.search(one)] or blocks)[-1])
    return text if not entry_point or function.search(text) else str([prompt, *_BLOCK.findall(prompt)][-1]) + text


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
    metadata: str = "{}",
    unsafe: bool = False,
) -> dict[str, float]:
    """Returns 1 for a program that passes all tests, else 0. `answer` is not used. Raises ValueError: no tests, or wrong ones."""
    code, kind = program_of(completion, prompt, entry_point), find_isolation(unsafe)
    cases = [] if test else [*read_tests(public_test_cases), *read_tests(private_test_cases)]
    if test:
        called = f"check({entry_point})\n" if "def check(" in test else ""
        passed = _found(code, f"{test}\n\n{called}__found__ = True", kind, TESTED_S) is True
    elif not cases:
        raise ValueError("the row has no tests: neither `test` nor `public_test_cases` and `private_test_cases`")
    elif cases[0]["testtype"] == "functional":
        calls = CALLS.format(name=json.loads(metadata)["func_name"], inputs=[case["input"] for case in cases])
        found = _found(PRELUDE + code, calls, kind, min(TEST_S * len(cases), TOTAL_S))
        passed = found == [json.loads(case["output"]) for case in cases]
    else:
        passed = _passes_runs(PRELUDE + code, cases, kind)
    return {"score": float(passed), "acc": float(passed)}


def _found(code: str, tests: str, kind: str, seconds: float) -> Any:
    """Runs `tests` behind the program; returns what they found, None where either failed or it is no plain data."""
    mark = secrets.token_hex(16)
    program = HARNESS.format(code=code, tests=tests, mark=mark)
    text, problem = run_program(program, LIMITS._replace(timeout_s=seconds), kind)
    try:
        return None if problem else ast.literal_eval(text.partition(mark)[2].strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _passes_runs(program: str, cases: Sequence[Mapping[str, str]], kind: str) -> bool:
    end = time.monotonic() + TOTAL_S
    for case in cases:
        limits = LIMITS._replace(timeout_s=min(TEST_S, end - time.monotonic()))
        text, problem = run_program(program, limits, kind, case["input"]) if limits.timeout_s > 0 else ("", "late")
        if problem or not same_output(text, case["output"]):
            return False
    return True


def same_output(printed: str, expected: str) -> bool:
    """Compares line by line, without white space around it: equal texts, or equal decimals in equal number."""
    lines, wanted = ([line.strip() for line in text.strip().split("\n")] for text in (printed, expected))
    return len(lines) == len(wanted) and all(
        one == other or _decimals(one) == _decimals(other) for one, other in zip(lines, wanted, strict=True)
    )


def _decimals(line: str) -> list[Decimal] | str:
    try:
        return [Decimal(word) for word in line.split()]
    except InvalidOperation:
        return line


class _TextOnly(pickle.Unpickler):
    """Reads a pickled text; the files are others', and a pickle could name any function."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"the tests are a pickle that names {module}.{name}; only a text is read")


def read_tests(cases: str) -> list[dict[str, str]]:
    """Reads tests {"input", "output", "testtype"}: JSON, or its text as a pickle, in zlib and base64. Raises ValueError."""
    if not cases.lstrip().startswith("["):
        cases = _TextOnly(io.BytesIO(zlib.decompress(base64.b64decode(cases)))).load()
    return [dict(case) for case in json.loads(cases)]
