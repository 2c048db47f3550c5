"""The faults of a soak and the run under them: attempts that end badly, one after the other, until the run is done."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_megatron.report.console import format_table
from grpo_megatron.report.run_folder import read_metrics
from grpo_megatron.storage.run_files import on_disk, steps_of
from tests import tiny
from tests.e2e import run_ranks
from tests.rewards.waiting import processes_with
from tests.stored import TIMES


@dataclass(frozen=True)
class Fault:
    """`action` and `point` are of injection.py. `damage` changes the output folder before the attempt starts.

    In an attempt with `background`, the point "save: files" is in the thread that writes.
    """

    name: str
    action: str
    point: str
    exit_code: int
    rank: int = 1
    damage: str = ""
    background: bool = False  # trainer.async_save


KILLED = 128 + signal.SIGKILL
STOPPED = 75
STEP_POINTS = ("update_weights", "gen", "reward", "adv", "old_log_prob", "ref", "update_actor", "log")
SAVE_POINTS = ("save: state", "save: files", "save: manifest", "save: rename", "save: prune")

MATRIX: list[Fault] = [
    *(Fault("a rank is killed", "kill rank", point, KILLED) for point in ("start", *STEP_POINTS)),
    *(Fault("a rank is killed", "kill rank", point, KILLED) for point in ("save: state", "save: files")),
    *(Fault("rank 0 is killed", "kill rank", point, KILLED, rank=0) for point in SAVE_POINTS[2:]),
    *(Fault("the launcher is killed", "kill launcher", p, -signal.SIGKILL) for p in ("update_actor", "save: files")),
    Fault("all processes are killed", "kill all", "gen", -signal.SIGKILL),
    Fault("all processes are killed", "kill all", "save: rename", -signal.SIGKILL, rank=0),
    Fault("SIGTERM", "SIGTERM", "gen", STOPPED),
    Fault("SIGUSR1", "SIGUSR1", "update_actor", STOPPED),
    Fault("Ctrl-C", "SIGINT", "reward", 128 + signal.SIGINT),
    Fault("Ctrl-C twice", "SIGINT twice", "update_actor", 128 + signal.SIGINT),
    Fault("no space for a checkpoint", "full disk", "save: state", 1),
    Fault("a rank is killed, saving in the background", "kill rank", "save: files", KILLED, background=True),
    Fault("SIGUSR1, saving in the background", "SIGUSR1", "save: files", STOPPED, background=True),
    Fault("no space, saving in the background", "full disk", "save: files", 1, background=True),
    Fault("no space for metrics", "full disk", "log", 1, rank=0),
    *(
        Fault(f"newest checkpoint: {damage}, then SIGUSR1", "SIGUSR1", "gen", STOPPED, damage=damage)
        for damage in ("a bit flipped", "a file truncated", "a file lost")
    ),
    Fault("metrics.jsonl: garbage, then SIGUSR1", "SIGUSR1", "gen", STOPPED, damage="garbage"),
]
FIRST = Fault("output folder deleted", "delete folder", "update_actor", 1, rank=0)  # all steps are lost
LAST = Fault("a rank is killed", "kill rank", "export", KILLED)  # all steps are done


def _newest_file(output: Path) -> Path:
    """Finds the largest file of the newest checkpoint."""
    newest = max((output / "checkpoints").glob("step_??????"))
    return max((newest / "state").glob("*.distcp"), key=lambda file: file.stat().st_size)


def _flip(output: Path, rng: random.Random) -> None:
    file = _newest_file(output)
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def _garbage(output: Path, rng: random.Random) -> None:
    with (output / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": \xff\xfe' + rng.randbytes(100))


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "a bit flipped": _flip,
    "a file truncated": lambda output, rng: os.truncate(
        file := _newest_file(output), rng.randrange(file.stat().st_size)
    ),
    "a file lost": lambda output, rng: _newest_file(output).unlink(),
    "garbage": _garbage,
}


# -- attempts, each compared with an undisturbed run of the same config ------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900  # ends an attempt that hangs
SAVE_FREQ = 3
ADDRESS = re.compile(r"/\S*/")  # folders in messages


@dataclass(frozen=True)
class Attempt:
    """One row of the fault matrix. `problems`: what must not be; empty if all is well."""

    fault: Fault | None
    count: int
    steps_done: int
    exit_code: int
    sees: str
    problems: list[str]


def rows_of(output: Path) -> list[dict[str, Any]]:
    """Reads the rows of metrics.jsonl without times."""
    path = output / "metrics.jsonl"
    rows = read_metrics(path) if path.exists() else []
    return [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in rows]


def run_command(raw: dict[str, Any], folder: Path, **environment: str) -> tuple[int, str, str, list[int]]:
    """Run the real command in `folder`. Returns the exit code, both outputs, and processes that have outlived it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(raw))
    mark = uuid.uuid4().hex
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "GRPO_DEBUG")}
    out, err = folder / "out.txt", folder / "err.txt"
    with out.open("w") as out_file, err.open("w") as err_file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.command", "train", str(folder / "run.yaml")],
            cwd=folder,
            env={
                **inherited,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "SOAK_MARK": mark,
                "SOAK_OUTPUT": raw["trainer"]["output_dir"],
                **environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=out_file,  # files: a process that outlives the launcher would keep a pipe open
            stderr=err_file,
            start_new_session=True,
        )
        try:
            code = process.wait(TIMEOUT_S)
        finally:
            process.kill()
    return code, out.read_text(), err.read_text(errors="replace"), _survivors(mark)


def _survivors(mark: str) -> list[int]:
    """Lists processes of the attempt that are still there ten seconds after its end."""
    deadline = time.monotonic() + 10
    while (pids := processes_with(f"SOAK_MARK={mark}")) and time.monotonic() < deadline:
        time.sleep(0.1)
    return pids


def shown(out: str, err: str) -> str:
    """Returns the line that tells the user what happened, without folders: the first error or warning, else the last line."""
    lines = [line for line in err.splitlines() if line.startswith(("error:", "WARNING:"))] or [
        line for line in (out + err).splitlines() if line.strip()
    ][-1:]
    text = ADDRESS.sub("", lines[0]) if lines else ""
    return text if len(text) <= 110 else f"{text[:107]}..."


class Soak:
    """Attempts of the run `raw` in `folder`. `expected`: the rows of metrics.jsonl of the undisturbed run, without times."""

    def __init__(
        self,
        raw: dict[str, Any],
        folder: Path,
        expected: list[dict[str, Any]],
        rng: random.Random,
        note: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.raw, self.folder, self.rng, self.note = raw, folder, rng, note
        self.expected = {row["step"]: row for row in expected}
        self.output = Path(raw["trainer"]["output_dir"])
        self.attempts: list[Attempt] = []

    @property
    def steps_done(self) -> int:
        return max((steps_of(path) for path in on_disk(self.output)), default=0)

    def attempt(self, fault: Fault | None, count: int = 1) -> Attempt:
        """Start the run, and let `fault` happen the `count`-th time that its rank reaches its point. None: no fault."""
        if fault is not None and fault.damage:
            DAMAGES[fault.damage](self.output, self.rng)
        spec = {} if fault is None else {**asdict(fault), "count": count}
        self.raw["trainer"]["async_save"] = fault is not None and fault.background
        code, out, err, survivors = run_command(self.raw, self.folder, SOAK_FAULT=json.dumps(spec))
        problems = []
        if code != (0 if fault is None else fault.exit_code):
            problems.append(f"exit code {code}: {err[-2000:]}")
        if survivors:
            problems.append(f"processes {survivors} have outlived it")
        rows = rows_of(self.output)
        if [row["step"] for row in rows] != list(range(len(rows))):
            problems.append(f"metrics.jsonl has steps {[row['step'] for row in rows]}")
        problems += [f"step {row['step']} differs" for row in rows if row != self.expected.get(row["step"])]
        sees = "nothing: this process is killed" if code < 0 else shown(out, err) if code else "the results"
        done = Attempt(fault, count, self.steps_done, code, sees, problems)
        self.attempts.append(done)
        what = "no fault" if fault is None else f"{fault.name} ({fault.point} #{count})"
        self.note(f"attempt {len(self.attempts)}: {what}: exit {code}, {done.steps_done} steps saved {problems or ''}")
        return done

    def run(self, faults: Sequence[Fault]) -> None:
        """Makes one attempt per fault, at random steps; then one without. Needs more than 3 steps per fault."""
        waiting = list(faults)
        while waiting:
            # Damage needs an older checkpoint, with which the run goes on.
            fault = next(f for f in waiting if not f.damage or len(on_disk(self.output)) > 1)
            waiting.remove(fault)
            left = self.raw["trainer"]["total_training_steps"] - self.steps_done
            most = min(2 * left // (len(waiting) + 1) - 1, left - SAVE_FREQ * (len(waiting) + 1))
            count = self.rng.randint(1, max(1, most))
            if fault.point in SAVE_POINTS:
                count = -(-count // SAVE_FREQ)
            done = self.attempt(fault, 1 if fault.point in ("start", "export") else count)
            if done.exit_code == 0:
                return  # the fault has not happened; the attempt's problems say so
        self.attempt(None)

    def table(self) -> str:
        """Returns the fault matrix."""
        rows = [
            [
                "none" if attempt.fault is None else attempt.fault.name,
                "" if attempt.fault is None else f"{attempt.fault.point} #{attempt.count}",
                attempt.sees,
                str(attempt.exit_code),
                str(attempt.steps_done),
                "NO" if attempt.problems else "yes",
            ]
            for attempt in self.attempts
        ]
        return format_table(rows, ["fault", "phase", "the user sees", "exit", "steps saved", "identical"])


# -- the run -----------------------------------------------------------------------------------------------------------


def make_workspace(root: Path) -> Path:
    """Write data/ and model/ into `root`: the arithmetic task and an untrained two-layer model with its tokenizer."""
    from grpo_megatron.starting.generated import build_tokenizer, write_example

    (root / "data").mkdir(parents=True)
    write_example("arithmetic", root / "data", seed=0, num_train=64, num_val=16)
    tiny.make_model(root / "model", "qwen2-tied", num_hidden_layers=2, vocab_size=80, std=0.05)
    build_tokenizer().save_pretrained(root / "model")
    return root


def soak_settings(root: Path, output: Path, steps: int, engine: str = "vllm") -> dict[str, Any]:
    """Two data-parallel ranks. Dynamic sampling has left-over groups in every checkpoint."""
    trainer = {"total_training_steps": steps, "save_freq": SAVE_FREQ, "test_freq": 7, "save_hf_at_end": True}
    trainer |= {"logger": ["console", "jsonl"], "max_actor_ckpt_to_keep": 3}
    raw = run_ranks.settings(root, output, 2, trainer=trainer)
    raw["rollout"]["engine"] = engine
    raw["reward"] = {"function": "tests.e2e.rewards:parity_reward"}
    raw["algorithm"] = {"filter_groups": {"enable": True, "max_num_gen_batches": 2}}
    return raw
