"""The command line: how a run of several ranks starts, fails and is interrupted.

Launch tests run real processes under the real torchrun agent. Only `trainer` and `validate` are replaced by stand-ins,
since they take seconds and are not tested here. A sitecustomize module on PYTHONPATH replaces them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_megatron.cli import main
from grpo_megatron.cli.main import KeysOptions, print_keys
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.config.section import config_keys
from grpo_megatron.registry import find_modules, import_function
from tests.listeners import listeners
from tests.runs import make_run, stand_in_trainer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


# -- starting, failing, interrupting ----------------------------------------------------------------------------------

RUN = """
    import signal, time
    rank, kind = int(os.environ["RANK"]), os.environ["KIND"]
    os.write(1, f"rank {rank} of {os.environ['WORLD_SIZE']}, {os.environ['OMP_NUM_THREADS']} thread\\n".encode())
    if kind == "refused by all":
        from grpo_megatron.config import ConfigError
        raise ConfigError("trainer.device=cuda, but there is none")
    if kind == "raised by all" or (kind == "raised by one" and rank == 1):
        raise KeyError("boom")
    if kind == "killed":
        pipe = os.open("pipe", os.O_RDONLY if rank == 0 else os.O_WRONLY)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        os.read(pipe, 1)
        raise RuntimeError("connection closed by peer")
    if kind != "good":
        from grpo_megatron.training.stopping import requested
        from grpo_megatron.training.stopping import Stopped
        with open(f"{rank}.tmp", "w") as file:
            file.write(str(os.getpid()))
        os.rename(f"{rank}.tmp", f"{rank}.running")
        while kind == "waits" or not (requested() or os.path.exists("agreed")):
            time.sleep(0.05)
        name = requested() or open("agreed").read()
        if requested():  # real ranks agree by a collective
            with open(f"agreed.{rank}", "w") as file:
                file.write(name)
            os.rename(f"agreed.{rank}", "agreed")
        open(f"{rank}.ends", "w").close()
        while not all(os.path.exists(f"{other}.ends") for other in range(2)):
            time.sleep(0.05)
        raise Stopped("", 130 if name == "SIGINT" else 75)
"""
LAUNCHER = ["-m", "grpo_megatron"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "grpo_megatron"]


def start(
    run: Path, folder: Path, kind: str, device: str = "cpu", launcher: list[str] = LAUNCHER
) -> subprocess.Popen[str]:
    stand_in_trainer(folder, RUN)
    os.mkfifo(folder / "pipe")
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "RANK", "GRPO_DEBUG")}
    env |= {"KIND": kind, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    return subprocess.Popen(
        [sys.executable, *launcher, "train", str(run / "run.yaml"), f"trainer.device={device}"],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def without_tracebacks(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith((" ", "Traceback"))]


KILLED = "error: rank 1 was ended by SIGKILL (the machine may have run out of memory: see dmesg)"
RAISED = ["KeyError: 'boom'", "error: rank 1: KeyError: 'boom' (its traceback is above)"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "device", "code", "errors"),
    [
        pytest.param("good", "cpu", 0, [], marks=pytest.mark.soak),
        ("refused by all", "cpu", 2, ["error: trainer.device=cuda, but there is none"]),
        pytest.param("raised by one", "cpu", 1, RAISED, marks=pytest.mark.soak),
        pytest.param("killed", "cuda", 137, [KILLED], marks=pytest.mark.soak),
    ],
)
def test_the_launcher_prints_the_reason_once(
    run: Path, tmp_path: Path, kind: str, device: str, code: int, errors: list[str]
) -> None:
    """The killed rank is reported, although the other rank raises as soon as the kernel closes the pipe."""
    process = start(run, tmp_path, kind, device)
    out, err = process.communicate(timeout=600)
    assert process.returncode == code, err
    starting, *ranks = [line for line in out.splitlines() if not line.endswith("so far")]  # on a busy machine
    assert starting.startswith("checking, then starting 2 ranks")
    expected = {"rank 0 of 2, 1 thread", "rank 1 of 2, 1 thread"}
    assert set(ranks) == expected if kind == "good" else set(ranks) <= expected  # a rank may be ended before it prints
    assert without_tracebacks(err) == errors
    assert err.count("Traceback") == (kind == "raised by one")


@pytest.mark.soak
def test_under_torchrun_one_rank_prints_the_reason(run: Path, tmp_path: Path) -> None:
    """One traceback is the program's, the other one torchrun's. The table of torchrun repeats the reason."""
    process = start(run, tmp_path, "raised by all", launcher=TORCHRUN)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 1
    assert err.count("Traceback") == 2, err
    assert without_tracebacks(err).count("KeyError: 'boom'") == 1, err
    assert "KeyError: 'boom'" in err.partition("Root Cause")[2]


def started(run: Path, folder: Path, kind: str, device: str) -> tuple[subprocess.Popen[str], list[int]]:
    """The launcher, and the process ids of its two ranks, which run."""
    process = start(run, folder, kind, device)
    until(lambda: process.poll() is not None or len(list(folder.glob("*.running"))) == 2)
    assert process.poll() is None, process.communicate()
    return process, [int((folder / f"{rank}.running").read_text()) for rank in range(2)]


ANNOUNCED = "{}: the run stops after this step and saves; a second signal ends it at once"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "device"),
    [
        pytest.param(signal.SIGINT, "cpu", marks=pytest.mark.soak),
        (signal.SIGKILL, "cuda"),
    ],
)
def test_no_rank_outlives_the_process_that_started_it(
    run: Path, tmp_path: Path, number: signal.Signals, device: str
) -> None:
    """These ranks never finish their step, so that the first SIGINT does not end them; the second one does."""
    process, ranks = started(run, tmp_path, "waits", device)
    assert listeners(process.pid) == set()  # the ranks meet in a file
    first = ""
    if number == signal.SIGINT:
        process.send_signal(number)
        assert process.stderr is not None
        first = process.stderr.readline()
    process.send_signal(number)
    _, err = process.communicate(timeout=600)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    lines = [line for line in without_tracebacks(first + err) if "resource_tracker" not in line]  # of Python
    assert lines == ([ANNOUNCED.format("SIGINT"), "interrupted"] if number == signal.SIGINT else [])
    until(lambda: not any(_is_running(Path(f"/proc/{rank}")) for rank in ranks))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "target", "device", "code"),
    [
        (signal.SIGINT, "launcher", "cpu", 130),
        (signal.SIGTERM, "group", "cpu", 75),  # as `timeout` does: the server that ranks are forked from gets it, too
        pytest.param(signal.SIGTERM, "launcher", "cuda", 75, marks=pytest.mark.soak),
        pytest.param(signal.SIGUSR1, "rank", "cuda", 75, marks=pytest.mark.soak),
    ],
)
def test_the_first_signal_lets_the_run_save(
    run: Path, tmp_path: Path, number: signal.Signals, target: str, device: str, code: int
) -> None:
    """Sent to the process that the user sees, or to one of its ranks: all ranks stop by themselves."""
    process, ranks = started(run, tmp_path, "stops", device)
    if target == "group":
        os.killpg(process.pid, number)
    else:
        os.kill(process.pid if target == "launcher" else ranks[1], number)
    _, err = process.communicate(timeout=600)
    assert process.returncode == code, err
    assert without_tracebacks(err) == ([ANNOUNCED.format(number.name)] if target != "rank" else [])
    assert (tmp_path / "agreed").read_text() == number.name


def until(condition: Callable[[], bool], timeout_s: float = 600) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_running(process: Path) -> bool:
    """Says if the process exists and is not a zombie."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_modules_beside_the_config_are_found_and_shadow_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, beside = tmp_path / "here", tmp_path / "beside"
    for folder in (here, beside):
        folder.mkdir()
        (folder / "json.py").write_text("raise AssertionError('shadows the standard library')")
    (here / "mine_here.py").write_text("reward = 1")
    (beside / "mine_beside.py").write_text("reward = 2")
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = list(sys.path)
    find_modules(Path("../beside/run.yaml"))
    find_modules(Path("../beside/run.yaml"))
    assert len(sys.path) == len(before) + 2 and sys.path[: len(before)] == before
    assert (import_function("mine_here:reward"), import_function("mine_beside:reward")) == (1, 2)


@pytest.mark.parametrize(
    ("example", "commands"),
    [
        ("quickstart.yaml", ["grpo-megatron quickstart"]),
        (
            "agents/calculator.yaml",
            ["python -m grpo_megatron prepare products ", "python -m grpo_megatron prepare model "],
        ),
    ],
)
def test_missing_inputs_of_an_example_are_named_with_what_makes_them(
    example: str,
    commands: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "examples" / example, "copy.yaml")  # beside the original there may be the inputs
    assert main.main(["train", "copy.yaml", "--dry-run"]) == 2
    _, hint, lines = capsys.readouterr().err.partition("error: first make the inputs of ")
    made = zip(lines.splitlines()[1:], commands, strict=True)
    assert hint and all(line.startswith(f"  {command}") for line, command in made)


def test_a_config_from_another_folder_is_told_where_its_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("there/m", "there/configs", "here"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "there/t.jsonl").write_text("{}")
    config = tmp_path / "there/configs/c.yaml"
    config.write_text("model: {path: m}\ndata: {train_files: [t.jsonl], task: jsonl}\nreward: {function: length}\n")
    monkeypatch.chdir(tmp_path / "here")
    assert main.main(["train", str(config), "--dry-run"]) == 2
    assert f"start it where they are: cd {tmp_path / 'there'}\n" in capsys.readouterr().err
    assert main.main(["train", str(config), "--dry-run", "model.path=nowhere"]) == 2
    assert "start it where they are" not in capsys.readouterr().err
    assert main.main(["train", str(config.parent)]) == 2  # as a run's folder, which has a config.yaml
    assert "did you mean" not in capsys.readouterr().err
    config.rename(config.with_name("config.yaml"))
    assert main.main(["train", str(config.parent)]) == 2
    assert f"; did you mean '{config.with_name('config.yaml')}'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ("lora", "; keys of this name: actor.lora, critic.lora"),
        ("cliprange", "; keys of this name: critic.cliprange_value"),
        ("actr.lora", "; did you mean 'actor.lora'?"),
        ("xyzzy", " (sections: method, model, "),
    ],
)
def test_a_section_that_is_no_section(section: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        print_keys(KeysOptions(section=section))
    text = f"no key of a config begins with {section!r}{told}"
    assert str(error.value) == text if "sections" not in told else str(error.value).startswith(text)


def test_keys_are_listed_with_default_type_and_comment(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_keys(KeysOptions(section="rollout.val_kwargs")) == 0
    assert "rollout.val_kwargs.temperature: 0.0   (float; since 2026-11-26)\n    0: greedy\n" in capsys.readouterr().out
    assert print_keys(KeysOptions()) == 0
    assert "model.path: needed   (Path; since 2026-11-26; resume: fixed)" in capsys.readouterr().out
    assert len(list(config_keys(Config))) == len({key.name for key in config_keys(Config)})
    assert print_keys(KeysOptions(section="critic.optim.lr")) == 0
    needs = "needs algorithm.adv_estimator:needs_values"
    assert f"critic.optim.lr: 1e-05   (float; since 2026-11-26; resume: schedule; {needs})" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="did you mean 'actor'"):
        print_keys(KeysOptions(section="actr"))
