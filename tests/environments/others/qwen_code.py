"""Qwen Code, unmodified, without a screen: its shell is the sandbox of a task folder.

It is a program of npm (`npm install @qwen-code/qwen-code`, node 22 or newer), and looks for `bash` on PATH. Its other tools see
an empty folder. NODE_COMPILE_CACHE=FOLDER makes its starts several times shorter.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

OPTIONS = ["--auth-type=openai", "--yolo", "--bare", "--core-tools=run_shell_command", "--max-session-turns=3"]


def main() -> None:
    """Runs the agent on the task's instruction, for three turns at most."""
    row = json.loads(sys.stdin.readline())["row"]
    work = Path(tempfile.gettempdir(), "qwen_code")  # the prompt names it, so it is the same for all
    work.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        bash = Path(home, "bash")
        bash.write_text(f'#!/bin/sh\nexec {shlex.join(row["sandbox"])} "$2"\n')
        bash.chmod(0o700)
        variables = {"HOME": home, "PATH": f"{home}:{os.environ['PATH']}", "QWEN_CODE_NO_RELAUNCH": "1"}
        command = ["qwen", *OPTIONS, "--system-prompt", "You use bash.", "-p", row["instruction"]]
        subprocess.run(command, cwd=work, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=2)
