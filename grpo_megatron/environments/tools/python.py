"""The tool `python`: runs a program in a subprocess, and returns what it prints.

It limits wall-clock and CPU time, address space, the size of each file, open files and output. The program has no network,
and can neither start processes nor signal others (sandbox.py). It runs in an empty folder, which is deleted, with an
environment of a few variables, so that it has no passwords or tokens from there. Each call is a new process.

**What it does not isolate.** The program runs as the user of the training run. It can read every file of this user, write
where this user may write (root also into /proc), fill the disk with many files, and use the CPU caches and the kernel like
any process. Run models that you do not trust in a container, as a user without privileges or credentials.
"""

from __future__ import annotations

import os
import subprocess
import tempfile

from grpo_megatron.environments.tool import ToolError, tools
from grpo_megatron.environments.tools.sandbox import sandbox_command
from grpo_megatron.processes.process import MARK, describe_exit, end_tree

VARIABLES = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
MIB = 1 << 20
MAX_PRINTED = 1 << 20  # bytes of output that the model is shown; of more, none is right


@tools.register("python")
def python(code: str, *, timeout_s: float = 10.0, memory_mib: int = 1024, file_mib: int = 16) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The program. It must print its results. Nothing is kept between calls.
    """
    limits = {"cpu_s": int(timeout_s) + 1, "memory": memory_mib * MIB, "file": file_mib * MIB}
    problem = ""
    # the output is a file, so that the limit on files ends a program that prints without end
    with (
        tempfile.TemporaryDirectory(prefix="python_tool_", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as printed,
        subprocess.Popen(
            sandbox_command(limits),
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=VARIABLES | {"HOME": folder, "TMPDIR": folder, MARK: os.environ.get(MARK, "")},
            start_new_session=True,
        ) as process,
    ):
        try:
            process.communicate(code.encode("utf-8", "replace"), timeout_s)
        except subprocess.TimeoutExpired:
            problem = f"the program has not ended after {timeout_s:g} s"
        finally:
            if process.returncode is None:
                end_tree(process.pid)
        ended = process.wait()
        size = printed.seek(0, os.SEEK_END)
        printed.seek(0)
        text = printed.read(MAX_PRINTED).decode("utf-8", "replace")
    if size > MAX_PRINTED:
        problem = f"the program has printed more than {MAX_PRINTED} bytes"
    if problem or ended:
        raise ToolError(f"{text}\n{problem or f'the program has ended: {describe_exit(ended)}'}".strip())
    return text
