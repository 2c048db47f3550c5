"""The command line: how a run of several ranks starts, fails and is interrupted.

Launch tests run real processes under the real torchrun
agent; only `trainer` and `validate` are stand-ins (they are not what is tested, and cost seconds), put in place by a
sitecustomize module on PYTHONPATH.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_megatron.cli import main
from tests.runs import make_run, stand_in_trainer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


# -- starting, failing, interrupting ----------------------------------------------------------------------------------

DEVICES = ["cpu", "cuda"]  # ranks that are forked, and ranks that are programs of their own: nothing here needs a GPU
RUN = """
    import signal, time
    rank, kind = int(os.environ["RANK"]), os.environ["KIND"]
    print(f"rank {rank} of {os.environ['WORLD_SIZE']}, {os.environ['OMP_NUM_THREADS']} thread", flush=True)
    if kind == "refused by all":
        from grpo_megatron.config import ConfigError
        raise ConfigError("trainer.device=cuda, but there is none")
    if kind == "raised by one" and rank == 1:
        raise KeyError("boom")
    if kind == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "killed":
        raise RuntimeError("connection closed by peer")
    if kind != "good":
        with open(f"{rank}.tmp", "w") as file:
            file.write(str(os.getpid()))
        os.rename(f"{rank}.tmp", f"{rank}.running")
        time.sleep(100)
"""


def start(run: Path, folder: Path, kind: str, device: str) -> subprocess.Popen[str]:
    stand_in_trainer(folder, RUN)
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "RANK", "GRPO_DEBUG")}
    env |= {"KIND": kind, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    return subprocess.Popen(
        [sys.executable, "-m", "grpo_megatron", "train", str(run / "run.yaml"), f"trainer.device={device}"],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


KILLED = "error: rank 1 was ended by SIGKILL (the machine may have run out of memory: see dmesg)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "device", "code", "errors"),
    [
        ("good", "cpu", 0, []),
        ("good", "cuda", 0, []),
        ("refused by all", "cpu", 2, ["error: trainer.device=cuda, but there is none"]),
        ("raised by one", "cpu", 1, ["KeyError: 'boom'", "error: rank 1: KeyError: 'boom' (its traceback is above)"]),
        ("killed", "cpu", 137, [KILLED]),
        ("killed", "cuda", 137, [KILLED]),
    ],
)
def test_one_process_starts_the_ranks_and_has_the_last_word(
    run: Path, tmp_path: Path, kind: str, device: str, code: int, errors: list[str]
) -> None:
    process = start(run, tmp_path, kind, device)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    if kind in ("good", "raised by one"):  # else one may be ended before it has spoken
        starting, *ranks = out.splitlines()
        assert starting.startswith("starting 2 ranks")
        assert sorted(ranks) == ["rank 0 of 2, 1 thread", "rank 1 of 2, 1 thread"]
    said = [line for line in err.splitlines() if not line.startswith((" ", "Traceback"))]
    assert said == errors
    assert ("Traceback" in err) == (kind == "raised by one")


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_process_that_started_it(
    run: Path, tmp_path: Path, number: signal.Signals, device: str
) -> None:
    process = start(run, tmp_path, "waits", device)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("*.running"))) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    ranks = [int(path.read_text()) for path in tmp_path.glob("*.running")]
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    said = [line for line in err.splitlines() if "resource_tracker" not in line and not line.startswith(" ")]
    assert said == (["interrupted"] if number == signal.SIGINT else [])  # Python frees what the killed one held
    deadline = time.monotonic() + 10
    while any(_parent(Path(f"/proc/{rank}")) is not None for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _parent(process: Path) -> int | None:
    """The parent of a living process (not one that has ended and waits to be noticed)."""
    try:
        state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return None if state == "Z" else int(parent)


def test_errors_without_a_traceback_exist_under_their_names() -> None:
    for module, name in main.SELF_EXPLAINING.items():
        assert issubclass(getattr(importlib.import_module(module), name), Exception)


def test_help_and_a_misspelt_key_do_not_import_torch(run: Path) -> None:
    code = "import sys; from grpo_megatron.cli.main import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "train", str(run / "run.yaml"), "rollout.nn=1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n"
    assert done.stderr.startswith("error: unknown key 'rollout.nn'")
