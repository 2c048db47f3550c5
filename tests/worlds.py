"""Real worlds of several ranks for tests. The ranks are forked from a server that has imported torch, Megatron and vLLM.

A test file has the program of its ranks beside its tests. A call runs it on every rank, with torchrun's environment set, and
returns the results in rank order. A rank that raises or dies fails the test with its traceback.

    @ranks(4)
    def gradients(folder: Path) -> dict[str, Tensor]: ...

    def test_gradients(tmp_path: Path) -> None:
        assert all(close(result, expected) for result in gradients(folder=tmp_path))

`@ranks()` leaves the size to the call: `gradients(4, folder=tmp_path)`. `run(function, 4, key=value)` is the same for a
module-level function without the decorator.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import pickle
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

HANG_S = 900.0  # ends a world that hangs, below pytest's own limit; a slow or busy machine needs far less
PORTS = range(10_000, 32_768)  # below the ports that the kernel gives to other sockets
PRELOAD = ["torch", "numpy", "transformers", "tests.preload"]


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the server: one thread per rank makes logprobs batch-invariant
    context.set_forkserver_preload(PRELOAD)
    return context


def _rank_main(function: Callable[..., Any], kwargs: dict[str, Any], env: dict[str, str], pipe: Any) -> None:
    os.environ.update(env)
    gc.unfreeze = lambda: (
        None
    )  # an engine that goes out of scope calls it, and collecting what was imported takes seconds
    try:
        result = ("ok", getattr(function, "__wrapped__", function)(**kwargs))
    except BaseException:  # noqa: BLE001 - the parent re-raises it with the rank's traceback
        result = ("error", traceback.format_exc())
    pipe.send_bytes(pickle.dumps(result))  # not send(): torch would share memory with a process that exits
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of vLLM and gloo would delay a normal exit


def free_port() -> int:
    """A port that no other socket takes before rank 0 binds it, unless another world samples the same number."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def ranks(size: int | None = None) -> Callable[[Callable[..., Any]], Callable[..., list[Any]]]:
    """Decorator of a module-level function: a call runs it on `size` ranks. Without `size`, the call's first argument."""

    def decorate(function: Callable[..., Any]) -> Callable[..., list[Any]]:
        @functools.wraps(function)
        def call(*sizes: int, **kwargs: Any) -> list[Any]:
            [world_size] = sizes or (size,)
            return run(call, world_size, **kwargs)  # the pickled name leads to `call`; the rank unwraps it

        return call

    return decorate


def run(
    function: Callable[..., Any],
    world_size: int,
    *,
    timeout_s: float = HANG_S,
    fresh: dict[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call `function(**kwargs)` on `world_size` ranks; results in rank order. `fresh`: in new processes, with these variables."""
    context = _context() if fresh is None else multiprocessing.get_context("spawn")
    port = free_port()
    processes, pipes = [], []
    for rank in range(world_size):
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(function, kwargs, env, sender), daemon=False)
        with mock.patch.dict(os.environ, fresh or {}):
            process.start()
        sender.close()
        processes.append(process)
        pipes.append(receiver)
    try:
        return _collect(processes, pipes, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _collect(processes: list[Any], pipes: list[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    while len(results) + len(errors) < len(pipes):
        open_ranks = [r for r in range(len(pipes)) if r not in results and r not in errors]
        ready = multiprocessing.connection.wait([pipes[r] for r in open_ranks], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(f"ranks {open_ranks} did not finish in time; errors so far: {errors}")
        for rank in open_ranks:
            if pipes[rank] in ready:
                try:
                    status, value = pickle.loads(pipes[rank].recv_bytes())
                except EOFError:
                    processes[rank].join()
                    status, value = "error", f"died with exit code {processes[rank].exitcode}"
                if status == "ok":
                    results[rank] = value
                else:
                    errors[rank] = value
        if errors:
            deadline = min(deadline, time.monotonic() + 15)  # the other ranks may wait for this one for ever
    if errors:
        raise AssertionError("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(errors.items())))
    return [results[rank] for rank in range(len(pipes))]
