"""The command line: the dry run's plan, and how a run of several ranks starts, fails and is interrupted.

The plan of Llama-3.1-70B is checked against a count by hand. Launch tests run real processes under the real torchrun
agent. Only `trainer` and `validate` are stand-ins, since they take seconds and are not tested here; a sitecustomize
module on PYTHONPATH puts them in place.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_megatron.checks.dry_run import WIDTH, stage_parameters
from grpo_megatron.checks.layout import stage_layers
from grpo_megatron.cli import main
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.models.families import read_architecture
from tests.runs import make_run, stand_in_trainer, write_tokenizer

ROOT = Path(__file__).resolve().parents[2]
LLAMA_70B = ROOT.parent / "shared" / "data" / "hf_configs" / "Llama-3.1-70B.json"
TP, PP = "actor.megatron.tensor_model_parallel_size", "actor.megatron.pipeline_model_parallel_size"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


def plan(run: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main.main(["train", str(run / "run.yaml"), "--dry-run", *arguments]) == 0
    return capsys.readouterr().out


# -- the plan ---------------------------------------------------------------------------------------------------------


def test_the_plan_counts_what_a_step_is(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(run, capsys, f"{TP}=2", f"{PP}=2", "trainer.n_gpus_per_node=8", "actor.ppo_mini_batch_size=4")
    for line in (
        "8 = 1 node x 8",
        "tp 2 x pp 2 x dp 2, sequence parallel, distributed optimizer, float32",
        "8 engines of tp 1",
        "8 prompts x 4 = 32, about 4 an engine",
        "2 mini-batches x 1 epoch = 2, of 16 samples each",
        "about 8 samples of each optimizer step",
        "prompt 16 + response 16 = 32 of the model's 128",
        "qwen2: 4 layers x 64, MLP 96, vocabulary 101",
        "complete, by name and shape",
        "18 tokens, ends with '<eos>'",
        "9 prompts of task arithmetic; 4 steps x 8 = 3.56 epochs",
        "4 prompts, before training, every 5 steps, at the end",
    ):
        assert line in text, text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_the_plan_ends_with_a_config_that_can_be_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = plan(run, capsys, "rollout.n=3", "sft.steps=2")
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(text.partition("Resolved configuration\n")[2])
    assert load_config(resolved) == load_config(run / "run.yaml", ["rollout.n=3", "sft.steps=2"])
    assert "5 rows; 2 steps x 32 = 12.80 epochs" in text


def test_overrides_may_stand_anywhere(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(run, capsys, "rollout.n=2", "--world-size", "6", "data.train_batch_size=3")
    assert "3 prompts x 2 = 6" in text
    assert "6 (the config has 1 x 2)" in text


def test_a_dry_run_needs_no_weights_and_says_so(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(run / "model", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    assert "NOT FOUND, so not checked" in plan(run, capsys, f"model.path={folder}")


def test_a_dry_run_writes_nothing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(run, capsys, f"trainer.output_dir={tmp_path / 'out'}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not LLAMA_70B.exists(), reason=f"needs {LLAMA_70B}")
def test_the_plan_of_70b(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """80 layers, h 8192, MLP 28672, 64 heads in 8 groups of 128, V 128256; tp 8 x pp 4 x dp 2 on 64 ranks, bfloat16.

    A layer: q and o 2 * 8192**2, k and v 2 * 1024 * 8192, MLP 3 * 28672 * 8192, two norms of 8192 = 855,654,400. Of it
    a tp rank has the matrices over 8 and the norms whole: 855,638,016 / 8 + 16,384 = 106,971,136. Embedding, head:
    128256 * 8192 = 1,050,673,152 each, over 8: 131,334,144 (128256 is a multiple of 64: no padding).
    """
    shutil.copy(LLAMA_70B, tmp_path / "config.json")
    write_tokenizer(tmp_path)
    arguments = [f"model.path={tmp_path}", "model.dtype=bfloat16", "trainer.nnodes=8", "trainer.n_gpus_per_node=8"]
    text = plan(run, capsys, *arguments, f"{TP}=8", f"{PP}=4", "rollout.tensor_model_parallel_size=8")
    layers = 20 * 106_971_136
    assert "70,553,706,496" in text
    assert 80 * 855_654_400 + 2 * 1_050_673_152 + 8192 == 70_553_706_496
    assert re.search(rf"0 +20 +{layers + 131_334_144:,} ", text)
    assert re.search(rf"1 +20 +{layers:,} ", text)
    assert re.search(rf"3 +20 +{layers + 131_334_144 + 8192:,} ", text)
    gib = layers / 2**30  # of a middle stage: weights 2 bytes, gradients 4, optimizer 12 over dp 2, reference 2
    assert f"{2 * gib:>9.3f} {4 * gib:>9.3f} {6 * gib:>9.3f} {2 * gib:>9.3f} {14 * gib:>9.3f}" in text
    assert "NOT FOUND" in text


def test_stages_add_up_to_the_model(run: Path) -> None:
    """At tp 1 every parameter is on one stage: the sum is the model, and its padding rows (101 -> 104) twice."""
    arch = read_architecture(run / "model")
    for layers in ([4], [2, 2], [1, 2, 1]):
        counts = stage_parameters(arch, layers, 1)
        assert sum(count for _, count in counts) == arch.num_parameters() + 2 * 3 * arch.hidden_size


def test_the_ends_of_the_pipeline_hold_embedding_and_head(run: Path) -> None:
    """101 rows padded to 112, of 64, over tp 2 are 3,584; the final norm is 64. A tied head elsewhere is a copy."""
    arch = read_architecture(run / "model")
    (_, first), (_, middle), (_, last) = stage_parameters(arch, [1, 1, 1], 2)
    assert (first - middle, last - middle) == (3584, 3584 + 64)
    tied = dataclasses.replace(arch, tied=True)
    assert stage_parameters(tied, [1, 1, 1], 2) == stage_parameters(arch, [1, 1, 1], 2)
    assert stage_parameters(tied, [3], 2)[0][1] == stage_parameters(arch, [3], 2)[0][1] - 3584


@pytest.mark.parametrize(
    ("pp", "first", "last", "expected"),
    [
        (1, None, None, [8]),
        (4, None, None, [2, 2, 2, 2]),
        (3, None, None, None),
        (3, 2, None, [2, 3, 3]),
        (3, None, 2, [3, 3, 2]),
        (4, 1, 1, [1, 3, 3, 1]),
        (2, 3, 5, [3, 5]),
        (2, 3, 4, None),
        (2, 8, None, None),
        (1, 4, 4, None),
        (2, 0, None, None),
        (2, "4", None, None),
    ],
)
def test_stages_are_cut_as_megatron_cuts_them(
    run: Path, pp: int, first: object, last: object, expected: list[int] | None
) -> None:
    ends = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
    override = json.dumps({name: value for name, value in ends.items() if value is not None})
    config = load_config(run / "run.yaml", [f"{PP}={pp}", f"actor.megatron.override_transformer_config={override}"])
    assert stage_layers(8, config.actor.megatron) == expected


# -- starting, failing, interrupting ----------------------------------------------------------------------------------

DEVICES = ["cpu", "cuda"]  # ranks that are forked, and ranks that are new programs: neither needs a GPU here
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
        with open(f"{rank}.tmp", "w") as file:
            file.write(str(os.getpid()))
        os.rename(f"{rank}.tmp", f"{rank}.running")
        time.sleep(1000)
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
    )


def without_tracebacks(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith((" ", "Traceback"))]


KILLED = "error: rank 1 was ended by SIGKILL (the machine may have run out of memory: see dmesg)"
RAISED = ["KeyError: 'boom'", "error: rank 1: KeyError: 'boom' (its traceback is above)"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "device", "code", "errors"),
    [
        ("good", "cpu", 0, []),
        ("good", "cuda", 0, []),
        ("refused by all", "cpu", 2, ["error: trainer.device=cuda, but there is none"]),
        ("raised by one", "cpu", 1, RAISED),
        ("raised by one", "cuda", 1, RAISED),
        ("killed", "cpu", 137, [KILLED]),
        ("killed", "cuda", 137, [KILLED]),
    ],
)
def test_the_launcher_prints_the_reason_once(
    run: Path, tmp_path: Path, kind: str, device: str, code: int, errors: list[str]
) -> None:
    """A killed rank is the reason even though the other rank raises at once, as soon as the kernel closes the pipe."""
    process = start(run, tmp_path, kind, device)
    out, err = process.communicate(timeout=600)
    assert process.returncode == code, err
    starting, *ranks = out.splitlines()
    assert starting.startswith("starting 2 ranks")
    expected = {"rank 0 of 2, 1 thread", "rank 1 of 2, 1 thread"}
    assert set(ranks) == expected if kind == "good" else set(ranks) <= expected  # a rank may be ended before it prints
    assert without_tracebacks(err) == errors
    assert err.count("Traceback") == (kind == "raised by one")


@pytest.mark.slow
def test_under_torchrun_one_rank_prints_the_reason(run: Path, tmp_path: Path) -> None:
    """One traceback is the program's. The other one is of torchrun, whose table repeats the reason."""
    process = start(run, tmp_path, "raised by all", launcher=TORCHRUN)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 1
    assert err.count("Traceback") == 2, err
    assert without_tracebacks(err).count("KeyError: 'boom'") == 1, err
    assert "KeyError: 'boom'" in err.partition("Root Cause")[2]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_process_that_started_it(
    run: Path, tmp_path: Path, number: signal.Signals, device: str
) -> None:
    process = start(run, tmp_path, "waits", device)
    until(lambda: process.poll() is not None or len(list(tmp_path.glob("*.running"))) == 2)
    assert process.poll() is None
    ranks = [int(path.read_text()) for path in tmp_path.glob("*.running")]
    process.send_signal(number)
    _, err = process.communicate(timeout=600)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    lines = [line for line in without_tracebacks(err) if "resource_tracker" not in line]  # Python frees shared memory
    assert lines == (["interrupted"] if number == signal.SIGINT else [])
    until(lambda: not any(_is_running(Path(f"/proc/{rank}")) for rank in ranks))


def until(condition: Callable[[], bool], timeout_s: float = 600) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_running(process: Path) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_help_and_a_misspelt_key_do_not_import_torch(run: Path) -> None:
    code = "import sys; from grpo_megatron.cli.main import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "train", str(run / "run.yaml"), "rollout.nn=1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.stdout == "False\n"
    assert done.stderr.startswith("error: unknown key 'rollout.nn'")
