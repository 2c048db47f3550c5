"""The command line: `grpo-megatron COMMAND ...`. A failure is reported once (failures.py).

Exit codes: 0; 2 for a mistake of the user, before anything was started; 1 for a later failure; 75, or 130 after Ctrl-C,
when a run was stopped on request (training/stopping.py) and can be started again; 128 + signal. `convert`, `curate` and
`replay` say more in their --help.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from grpo_megatron.cli import failures, ranks
from grpo_megatron.cli.commands import COMMANDS, RunOptions, find_command
from grpo_megatron.config.options import parse
from grpo_megatron.registry import find_modules


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code. In a rank of several, a failure ends the process at once."""
    argv = sys.argv[1:] if argv is None else argv
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: ranks share the cores
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else vLLM prints a NUMA remark per rank
    find_modules(Path("CONFIG"))  # a user's task, family or reward, in the current folder
    try:
        code = _run_command(argv)
        if code == 0:
            failures.mark_finished()
            return 0
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
        if os.environ.get("RANK", "0") == "0" and failures.LAUNCHER_PID not in os.environ:
            print("interrupted", file=sys.stderr)
    except Exception as error:
        code = failures.report_failure(error)
    if failures.is_one_of_several():
        _exit_at_once(code)
    return code


def _run_command(argv: list[str]) -> int:
    name, arguments = find_command(argv)
    command, is_rank = COMMANDS[name], "RANK" in os.environ
    options = parse(command.options, arguments)
    if command.is_prelude:
        return _run_command(command.run(options))
    if isinstance(options, RunOptions):
        return command.run(options, argv, main)
    failures.quieten(is_rank and command.starts_ranks, starts_ranks=False)
    if not command.starts_ranks:
        return command.run(options)
    if is_rank:
        ranks.join_launcher()
        failures.mark_started()

    def start_ranks(world_size: int, device: str) -> int:
        return ranks.start_ranks(main, world_size, argv, device)

    return command.run(options, None if failures.LAUNCHER_PID in os.environ else start_ranks)


def _exit_at_once(code: int) -> NoReturn:
    """Exit without the interpreter's clean-up, which threads of the engine and broken process groups can block for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
