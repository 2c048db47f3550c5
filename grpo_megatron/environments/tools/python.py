"""The tool `python`: runs a program in a subprocess, and returns what it prints.

It limits wall-clock and CPU time, address space, the size of each file, open files and output. The program has no network,
and can neither start processes nor signal others (sandbox.py). It runs in an empty folder, which is deleted, with an
environment of a few variables, so that it has no passwords or tokens from there. Each call is a new process.

**What it does not isolate.** The program runs as the user of the training run. It can read every file of this user, write
where this user may write (root also into /proc), fill the disk with many files, and use the CPU caches and the kernel like
any process. Run models that you do not trust in a container, as a user without privileges or credentials.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from grpo_megatron.environments.tool import ToolError, tools
from grpo_megatron.processes.process import MARK, describe_exit, end_tree

SANDBOX = Path(__file__).with_name("sandbox.py")
VARIABLES = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
MIB = 1 << 20
MAX_PRINTED = 1 << 20  # of output; then the program is killed


@tools.register("python")
def python(code: str, *, timeout_s: float = 10.0, memory_mib: int = 1024, file_mib: int = 16) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The program. It must print its results. Nothing is kept between calls.
    """
    limits = {"cpu_s": int(timeout_s) + 1, "memory": memory_mib * MIB, "file": file_mib * MIB}
    with tempfile.TemporaryDirectory(prefix="python_tool_", ignore_cleanup_errors=True) as folder:
        variables = VARIABLES | {"HOME": folder, "TMPDIR": folder, MARK: os.environ.get(MARK, "")}
        process = subprocess.Popen(
            [sys.executable, "-I", "-u", str(SANDBOX), json.dumps(limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=variables,
            start_new_session=True,
        )
        try:
            output, problem = _run(process, code.encode("utf-8", "replace"), timeout_s)
        finally:
            end_tree(process.pid)
            ended = process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe:
                    pipe.close()
    text = output.decode("utf-8", "replace")
    if problem or ended:
        raise ToolError(f"{text}\n{problem or f'the program has ended: {describe_exit(ended)}'}".strip())
    return text


def _run(process: subprocess.Popen[bytes], code: bytes, timeout_s: float) -> tuple[bytes, str]:
    """(output, why the program must be killed or ""). Returns when it has closed its output, or has to."""
    assert process.stdin
    assert process.stdout
    end = time.monotonic() + timeout_s
    output, left = bytearray(), memoryview(code)
    with selectors.DefaultSelector() as selector:
        os.set_blocking(process.stdin.fileno(), False)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select(max(end - time.monotonic(), 0)):
                if key.fileobj is process.stdin:
                    left = _write(process.stdin.fileno(), left)
                    if not left:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                output += chunk
                if not chunk:
                    return bytes(output), ""
            if len(output) > MAX_PRINTED:
                return bytes(output[:MAX_PRINTED]), f"the program has printed more than {MAX_PRINTED} bytes"
            if time.monotonic() > end:
                return bytes(output), f"the program has not ended after {timeout_s:g} s"


def _write(descriptor: int, data: memoryview) -> memoryview:
    try:
        return data[os.write(descriptor, data[: 1 << 16]) :]
    except BlockingIOError:
        return data
    except BrokenPipeError:
        return data[:0]
