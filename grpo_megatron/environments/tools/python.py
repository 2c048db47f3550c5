"""The tool `python`: runs a program in a subprocess, and returns what it prints. Each call is a new process in an empty
folder.

A program has limits on wall-clock and processor time, address space, the size of files, open files, threads and output. It
has no network, starts no process, and sees neither the files, the processes nor the variables of the run (isolation.py).
Where that is impossible the tool refuses to run, unless `unsafe` is set. docs/agents.md has the threat model. A reward
function that runs programs of the model calls `python` of this file: it raises ToolError for a program that fails.
"""

from __future__ import annotations

from grpo_megatron.environments.tool import ToolError, tools
from grpo_megatron.environments.tools.isolation import ProgramLimits, find_isolation, run_program
from grpo_megatron.storage.files import remove_leftovers


def prepare_isolation(*, unsafe: bool = False, **_: object) -> None:
    """Raises ValueError where nothing isolates programs, and removes what killed workers have left. Once per worker."""
    find_isolation(unsafe)
    remove_leftovers()


@tools.register("python", preload=prepare_isolation)
def python(
    code: str, *, timeout_s: float = 10.0, memory_mib: int = 1024, file_mib: int = 16, unsafe: bool = False
) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The program. It must print its results. Nothing is kept between calls.
    """
    text, problem = run_program(code, ProgramLimits(timeout_s, memory_mib, file_mib), find_isolation(unsafe))
    if problem:
        raise ToolError(f"{text}\n{problem}".strip())
    return text
