"""Starts the ranks of this machine, with torchrun's own agent in this process.

With GPUs each rank is a new program. On CPU the ranks are forked from a server that has imported everything once
(preload.py). The server imports while this process checks the config, since imports take most of the time of a start.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from grpo_megatron.cli.failures import (
    END_FILE,
    LAUNCHER_PID,
    Cause,
    explain_failure,
    has_started,
    is_first,
    print_error,
)
from grpo_megatron.processes.process import die_with_parent
from grpo_megatron.processes.variables import set_gpu_variables
from grpo_megatron.report.progress import awaited
from grpo_megatron.storage.files import EPOCH, MEMORY_FOLDER, folder_until_exit, private_folder, write_file

if TYPE_CHECKING:
    from grpo_megatron.parallel.heartbeat import LauncherWatch

RESTART_NAME = "restart.json"  # a file in the launcher's folder: a Restart
STOP_NAME = "stop"  # a file in the launcher's folder: the name of the signal that asks the run to stop
MAX_DEVICES = 1024  # of a machine
SHUTDOWN_S = 10  # seconds from SIGTERM to SIGKILL for a rank that cannot end itself
PRELOADED_ENGINE = "GRPO_MEGATRON_PRELOADED_ENGINE"  # in the environment of the fork server: the engine that it imports
# A rank that is ended leaves semaphores (tqdm's lock). Python's resource tracker removes them, and would warn of it.
QUIET_TRACKER = "ignore::UserWarning:multiprocessing.resource_tracker"


class Restart(NamedTuple):
    """How the ranks start: how many, with which settings beside those of the command line."""

    world_size: int  # of this launcher
    settings: Sequence[str] = ()
    devices: list[int] | None = None  # of the machine, by rank; None: the first ones
    lost_at: float | None = None  # Unix time of the last sign of life of a rank that was lost; None: the first start
    grow_after: int | None = None  # steps, after which the ranks end for `heal` to start more of them
    ended_at: float = 0.0  # when all ranks had ended
    world: Mapping[str, str] = {}  # variables of ranks that are some of several nodes (cli/nodes.py)
    first_rank: int = 0


class Healer:
    """Decides how the ranks of this launcher start, and start again; this one: once. `code`: instead of the ranks' own."""

    code: int | None = None
    memory: Path | None = None  # the folder that outlives the ranks

    def first(self, world_size: int) -> Restart | None:
        """Returns the first start; None: there is nothing to start."""
        return Restart(world_size)

    def watch(self, folder: Path) -> None:
        """Takes the folder of the ranks that start now."""

    def ended(self, cause: Cause) -> Cause:
        """Takes why all ranks have ended; returns what is to be printed, and to be healed."""
        return cause

    def after(self, cause: Cause) -> Restart | None:
        """Returns how the ranks start after all have ended; None: the run ends."""
        return None

    def request(self, name: str) -> bool:
        """Takes the name of a signal that asks to stop. False: the ranks stop after their step."""
        return False


def is_on_cpu(device: str) -> bool:
    """Says if trainer.device means the CPU, without importing torch."""
    return device == "cpu" or (device == "auto" and not any(Path("/dev").glob("nvidia*")))


def prepare_environment(device: str) -> None:
    """Set the variables of a run with GPUs, before torch is imported. The ranks that this process starts inherit them."""
    if not is_on_cpu(device):
        for line in set_gpu_variables():
            if is_first() and LAUNCHER_PID not in os.environ:
                print(line, flush=True)


def start_fork_server(engine: str | None = "vllm") -> None:
    """Start the server that CPU ranks are forked from; it imports in the background. A second call does nothing.

    `engine`: the ranks' `rollout.engine`, or None if they have none. vLLM's modules take half of the time.
    """
    before = os.environ.get("PYTHONWARNINGS")
    warnings = ",".join(filter(None, (before, QUIET_TRACKER)))
    for_server = {LAUNCHER_PID: str(os.getpid()), PRELOADED_ENGINE: engine or "", "PYTHONWARNINGS": warnings}
    os.environ |= for_server
    try:
        # multiprocessing's own folder (pymp-*), with the server's socket, would stay for ever if this process is killed.
        settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]
        if "tempdir" not in settings:
            settings["tempdir"] = str(folder_until_exit())
        multiprocessing.set_forkserver_preload(["grpo_megatron.cli.preload"])
        forkserver.ensure_running()
    finally:
        for name in for_server:
            del os.environ[name]
        if before is not None:
            os.environ["PYTHONWARNINGS"] = before


def start_ranks(
    main: Callable[[list[str]], int],
    world_size: int,
    argv: list[str],
    device: str,
    can_stop: bool = False,
    engine: str | None = "vllm",
    place: Callable[[int], str] = lambda rank: "",
    healer: Healer | None = None,
    remembers: bool = False,
    watch: Callable[[int], LauncherWatch] | None = None,
) -> int:
    """Run torchrun's agent in this process; returns 0, or the exit code of the rank that caused the failure.

    On CPU every forked rank calls `main(argv)`. With GPUs every rank is `python -m grpo_megatron` with `argv`. A signal
    ends the ranks; with `can_stop` the first SIGINT, SIGTERM or SIGUSR1 is passed on to them as a request to stop.
    `healer` says how the ranks start; None: once. `remembers`: they share a folder in memory. `watch` builds the watch of
    the children of a process.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from grpo_megatron.parallel.control import register_local_rendezvous

    register_local_rendezvous()
    if not can_stop:  # `train` has announced it before its checks
        announce_start(world_size, engine)
    logging.disable(logging.ERROR)  # of torchrun's agent: explain_failure finds the reason
    if is_on_cpu(device):
        start_fork_server(engine)
    os.environ[LAUNCHER_PID] = str(os.getpid())
    healer = healer or Healer()
    requests = _Requests(can_stop, healer.request)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    memory = private_folder(MEMORY_FOLDER) if remembers else contextlib.nullcontext(None)
    try:
        with memory as mirror:
            healer.memory = mirror
            cause, restart = Cause(0, ""), healer.first(world_size)
            while restart is not None:
                with private_folder() as folder:
                    requests.pass_on(folder)
                    write_file(
                        folder / RESTART_NAME, json.dumps({**restart._asdict(), "mirror": mirror and str(mirror)})
                    )
                    if restart.devices is not None and not is_on_cpu(device):
                        names = visible.split(",") if visible else range(MAX_DEVICES)
                        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(names[place]) for place in restart.devices)
                    healer.watch(folder)
                    watched = None if watch is None else watch(_parent_of_ranks(device))
                    with watched or contextlib.nullcontext():
                        ending = _run_ranks(main, restart, argv, device, folder, place, watched, can_stop=can_stop)
                    cause = healer.ended(ending)
                print_error(cause.text)
                restart = healer.after(cause)
            return cause.code if healer.code is None else healer.code
    except SignalException as error:  # a second request, while no ranks run
        return 128 + error.sigval
    finally:
        requests.close()
        logging.disable(logging.NOTSET)
        del os.environ[LAUNCHER_PID]


def _run_ranks(
    main: Callable[[list[str]], int],
    restart: Restart,
    argv: list[str],
    device: str,
    folder: Path,
    place: Callable[[int], str],
    watched: LauncherWatch | None = None,
    *,
    can_stop: bool,
) -> Cause:
    """Starts the ranks once, with their files in `folder`, and waits until all have ended."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    from grpo_megatron.parallel.control import BACKEND

    settings = {
        "nproc-per-node": restart.world_size,
        "rdzv-backend": BACKEND,
        "rdzv-id": os.getpid(),
        "log-dir": folder,
    }
    arguments = [f"--{name}={value}" for name, value in settings.items()]
    launch, program, options = config_from_args(parse_args([*arguments, "-m", "grpo_megatron", *argv]))
    launch.shutdown_timeout = SHUTDOWN_S
    if can_stop:
        launch.signals_to_handle = "SIGHUP,SIGQUIT"
    try:
        with awaited("starting the ranks, which import libraries", True, is_over=lambda: has_started(folder)):
            if is_on_cpu(device):
                launch.start_method = "forkserver"
                elastic_launch(launch, main)(argv)
            else:
                elastic_launch(launch, program)(*options)
    except ChildFailedError as error:
        cause = explain_failure(error, folder, place, restart.first_rank)
        if watched is None or not watched.text:
            return cause
        named = {restart.first_rank + rank for rank, failure in error.failures.items() if failure.pid in watched.ended}
        ranks = tuple(sorted(named | {rank for rank in watched.ended.values() if rank is not None}))
        ranks = () if len(ranks) == restart.world_size else ranks  # no device is worse than another
        return Cause(cause.code, f"error: {watched.text}\n", is_loss=True, ranks=ranks, is_final=False)
    except SignalException as error:
        ending = "interrupted" if error.sigval == signal.SIGINT else f"ended by {error.sigval.name}"
        return Cause(128 + error.sigval, f"{ending}\n")
    return Cause(0, "")


def _parent_of_ranks(device: str) -> int:
    return forkserver._forkserver._forkserver_pid if is_on_cpu(device) else os.getpid()  # type: ignore[attr-defined]


def announce_start(world_size: int, engine: str | None, *, checks: bool = False) -> None:
    """Prints the first line of a run: what is awaited, and for how long. `checks`: the config is checked first."""
    parts = "Megatron-Core" if engine is None else "Megatron-Core, then the engine"
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    expected = f"a small model needs some {10 if engine == 'vllm' else 5} s, a large one minutes"
    action = "checking, then starting" if checks else "starting"
    print(f"{action} {ranks}: {parts}; {expected}", flush=True)


class _Requests:
    """Handles the signals that ask the run to stop, in the launcher. A request outlasts the ranks that it was made to."""

    def __init__(self, handles: bool, request: Callable[[str], bool]) -> None:
        from grpo_megatron.training.stopping import REQUESTS

        self._request = request
        self._folder: Path | None = None  # of the ranks that run
        self._received: list[str] = []
        self._before = {number: signal.signal(number, self._handle) for number in REQUESTS} if handles else {}

    def pass_on(self, folder: Path) -> None:
        """Passes requests on to the ranks of `folder`, from now on and those from before."""
        self._folder = folder
        if self._received and not self._request(self._received[0]):
            write_file(folder / STOP_NAME, self._received[0])

    def _handle(self, number: int, frame: object) -> None:
        from torch.distributed.elastic.multiprocessing.api import SignalException

        from grpo_megatron.training.stopping import ANNOUNCEMENT

        name = signal.Signals(number).name
        self._received.append(name)  # first: the next signal may come while this one is handled
        if len(self._received) == 1:
            os.write(2, ANNOUNCEMENT.format(name).encode())  # print could have been interrupted itself
            if self._request(name) or self._folder is None:
                return
            with contextlib.suppress(OSError):  # between two starts of the ranks: `pass_on` writes it
                write_file(self._folder / STOP_NAME, name)
            return
        if self._folder is not None:
            with contextlib.suppress(OSError):
                (self._folder / END_FILE).touch()
        raise SignalException(f"ended by {name}", signal.Signals(number))

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def join_nodes() -> None:
    """Makes a rank of our launcher one of several nodes, where it is, before anything reads its number."""
    if (folder := launcher_folder()) is None:
        return
    restart = json.loads((folder / RESTART_NAME).read_text())
    if restart["world"]:
        os.environ |= {**restart["world"], "RANK": str(restart["first_rank"] + int(os.environ["LOCAL_RANK"]))}
        os.environ.pop("TORCHELASTIC_RUN_ID", None)  # the store is rank 0's, as under srun


def join_launcher() -> None:
    """Ties a rank to its launcher: it dies with it, and finds its files."""
    from grpo_megatron.parallel.control import STORE_FILE
    from grpo_megatron.training.stopping import RESTART_FILE, STOP_FILE

    die_with_launcher()
    if (folder := launcher_folder()) is not None:
        if (folder / END_FILE).exists():  # the launcher cannot end a rank that it does not know yet
            os._exit(1)
        os.environ[STOP_FILE] = str(folder / STOP_NAME)
        if EPOCH not in os.environ:
            os.environ[STORE_FILE] = str(folder / "store")
        os.environ[RESTART_FILE] = str(folder / RESTART_NAME)


def settings_of_restart() -> list[str]:
    """Lists the settings with which a rank of our launcher was started again after a loss; [] otherwise."""
    folder = launcher_folder()
    return [] if folder is None else json.loads((folder / RESTART_NAME).read_text())["settings"]


def launcher_folder() -> Path | None:
    """Finds a rank's temporary folder of our launcher, which only this user can read. None under torchrun and srun.

    A forked rank has the environment of the fork server, which is older than the folder, and torchrun's own variables.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # FOLDER/RUN_ID/attempt_0/RANK/error.json
    return Path(file).parents[3] if file and LAUNCHER_PID in os.environ else None


def die_with_launcher() -> None:
    """Have the kernel kill this process when its parent, the launcher or the fork server, ends.

    A launcher that is killed by SIGKILL cannot end its ranks itself.
    """
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is not None and sys.platform == "linux":
        die_with_parent(int(launcher))
