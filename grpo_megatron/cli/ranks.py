"""Ranks on this machine: torchrun's own agent in this process, and what they are started from.

With GPUs a rank is a program of its own. On CPU ranks are forked from a server that imports everything once (preload.py),
while this process is still checking the config: imports are most of what a start costs there.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from grpo_megatron.child import die_with_parent

LAUNCHER_PID = "GRPO_MEGATRON_LAUNCHER_PID"


def is_on_cpu(device: str) -> bool:
    """Before torch is imported."""
    return device == "cpu" or (device == "auto" and not any(Path("/dev").glob("nvidia*")))


def start_fork_server() -> None:
    """Returns at once; the server imports by itself. Again: nothing."""
    os.environ[LAUNCHER_PID] = str(os.getpid())
    try:
        multiprocessing.set_forkserver_preload(["grpo_megatron.cli.preload"])
        forkserver.ensure_running()
    finally:
        del os.environ[LAUNCHER_PID]


def start_ranks(main: Callable[[list[str]], int], world_size: int, argv: list[str], device: str) -> int:
    """Run `torchrun --standalone` in this process; returns the exit code of the rank that failed first, or 0.

    On CPU every forked rank calls `main(argv)`; with GPUs it is `python -m grpo_megatron` with `argv`. Signals are
    passed on to the ranks.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    print(f"starting {world_size} ranks: Megatron-Core, then a vLLM engine; the first line takes some 10 s", flush=True)
    logging.disable(logging.ERROR)  # the agent's, which would bury what the failed rank has said
    if is_on_cpu(device):
        start_fork_server()
    os.environ[LAUNCHER_PID] = str(os.getpid())
    with tempfile.TemporaryDirectory(prefix="grpo_megatron_") as folder:
        settings = {"nproc-per-node": world_size, "rdzv-backend": "c10d", "rdzv-endpoint": "localhost:0"}
        settings |= {"rdzv-id": os.getpid(), "log-dir": folder}
        arguments = [f"--{name}={value}" for name, value in settings.items()]
        launch, program, options = config_from_args(parse_args([*arguments, "-m", "grpo_megatron", *argv]))
        try:
            if is_on_cpu(device):
                launch.start_method = "forkserver"
                elastic_launch(launch, main)(argv)
            else:
                elastic_launch(launch, program)(*options)
        except ChildFailedError as error:
            return _report_failed_rank(error)
        except SignalException as error:
            print("interrupted" if error.sigval == signal.SIGINT else f"ended by {error.sigval.name}", file=sys.stderr)
            return 128 + error.sigval
        finally:
            logging.disable(logging.NOTSET)
            del os.environ[LAUNCHER_PID]
    return 0


def _report_failed_rank(error: Any) -> int:
    """The last line of a failed run. A rank that could still speak has told the reason already."""
    from grpo_megatron.training.stopping import EXIT_STOPPED

    rank, failure = error.get_first_failure()
    if failure.exitcode == EXIT_STOPPED:
        return EXIT_STOPPED
    if failure.exitcode < 0:
        name = failure.signal_name()
        hint = " (the machine may have run out of memory: see dmesg)" if name == "SIGKILL" else ""
        print(f"error: rank {rank} was ended by {name}{hint}", file=sys.stderr)
        return 128 - int(failure.exitcode)
    said = failure.message
    if not isinstance(said, dict):
        print(f"error: rank {rank} ended with exit code {failure.exitcode} and gave no reason", file=sys.stderr)
    elif said["extraInfo"].get("unexpected"):
        first_line = said["message"].partition("\n")[0]
        print(f"error: rank {rank}: {first_line} (its traceback is above)", file=sys.stderr)
    return int(failure.exitcode)


def die_with_launcher() -> None:
    """For a rank, and for what it is forked from: when their parent is killed outright, nobody is left to end them."""
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is not None and sys.platform == "linux":
        die_with_parent(int(launcher))
