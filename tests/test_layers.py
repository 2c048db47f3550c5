"""The direction of imports, read from the sources with `ast`, and the other rules that a reader's eye would miss.

A module may import modules of a lower layer and its own package, nothing else of this project; `models` and `rollout`
are siblings. Third-party packages with a weight of their own are for named modules only. Imports inside functions and
under TYPE_CHECKING count: the direction is about knowledge, not about start-up time.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "grpo_megatron"
SOURCES = {
    ".".join(path.relative_to(ROOT / PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / PACKAGE).rglob("*.py"))
}
MODULES = sorted(SOURCES)

LAYERS: dict[str, int] = {  # first part of a module's name -> layer
    **dict.fromkeys(["types", "config", "config_file", "registry", "importing", "__init__"], 0),
    **dict.fromkeys(["algo", "rewards", "data"], 1),
    **dict.fromkeys(["device", "parallel", "metrics", "sinks", "curves", "flops"], 2),
    **dict.fromkeys(["models", "rollout"], 3),
    **dict.fromkeys(["collector", "colocation", "evaluate", "checkpoint", "supervised", "summary", "convert"], 4),
    **dict.fromkeys(["generator", "filtering", "replay", "revision", "references", "stopping"], 4),
    **dict.fromkeys(["preferences", "reward_training"], 4),
    **dict.fromkeys(["evaluation"], 4),
    **dict.fromkeys(["reward_problems"], 5),
    **dict.fromkeys(["layout", "passthrough", "inputs", "validate", "report", "trainer"], 5),
    **dict.fromkeys(["launch", "starting", "preload", "__main__"], 5),
    **dict.fromkeys(["methods", "schedules", "sources"], 5),
}
SAME_LAYER = {("curves", "sinks"), ("parallel", "device"), ("evaluate", "generator"), ("data", "rewards")}
SAME_LAYER |= {("reward_training", "preferences")}
SAME_LAYER |= {("evaluation", "convert")}
SAME_LAYER |= {("collector", "generator"), ("filtering", "collector"), ("filtering", "replay"), ("replay", "collector")}
SAME_LAYER |= {("config_file", "config"), ("checkpoint", "convert")}  # the manifest
ALWAYS_ALLOWED = {"numpy", "torch"}  # from layer 2 on
THIRD_PARTY: dict[str, tuple[str, ...]] = {  # package -> who may import it, by beginning of the name
    "megatron": ("models.", "parallel.mesh", "device"),
    "transformer_engine": ("models.",),
    "vllm": ("rollout.vllm",),
    "safetensors": ("models.", "convert."),
    "sentencepiece": ("convert.",),
    "transformers": ("data.",),
    "tokenizers": ("data.",),
    "pydantic": ("config", "evaluation.task"),
    "pydantic_core": ("config",),
    "yaml": ("config_file", "report", "trainer", "evaluation.task"),
    "matplotlib": ("curves",),
    "tqdm": ("sinks", "evaluate", "evaluation.", "collector", "convert."),
    "math_verify": ("rewards.formula", "evaluation.grading_speed"),
    "latex2sympy2_extended": ("rewards.formula",),
    "sympy": ("rewards.formula",),
    "torch": ("algo.", "types"),
}
TORCH_FREE = (
    "config",
    "registry",
    "layout",
    "passthrough",
    "report",
    "rewards",
    "data",
)  # no torch, even in a function
LONGER_THAN_300 = {"trainer": "the loop and what it is made of, in one piece"}


def imported(path: Path) -> set[str]:
    """Full names of everything a file imports; of `from package import module`, the module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; this project writes full names"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full.removeprefix(f"{PACKAGE}.") in SOURCES else node.module)
    return found


def own_imports(module: str) -> set[str]:
    names = {name for name in imported(SOURCES[module]) if name.split(".")[0] == PACKAGE}
    return {name.removeprefix(f"{PACKAGE}.") for name in names}


def third_party(module: str) -> set[str]:
    roots = {name.split(".")[0] for name in imported(SOURCES[module])}
    return roots - set(sys.stdlib_module_names) - {PACKAGE}


def top(module: str) -> str:
    return module.split(".")[0]


@pytest.mark.parametrize("module", [m for m in MODULES if m != PACKAGE])
def test_imports_go_downwards(module: str) -> None:
    assert top(module) in LAYERS, f"{module} has no layer: add it to LAYERS, and to the picture in README.md"
    own = top(module)
    for name in own_imports(module):
        other = top(name)
        down = LAYERS[other] < LAYERS[own] or other == own or LAYERS[own] == 5
        assert down or (own, other) in SAME_LAYER, f"{module} (layer {LAYERS[own]}) imports {name} ({LAYERS[other]})"


@pytest.mark.parametrize("module", [m for m in MODULES if m != PACKAGE])
def test_heavy_packages_stay_where_they_belong(module: str) -> None:
    for package in third_party(module):
        if package in ALWAYS_ALLOWED and LAYERS[top(module)] >= 2:
            continue
        assert package in THIRD_PARTY, f"{module} imports {package}: say in THIRD_PARTY who may"
        allowed = THIRD_PARTY[package]
        assert module.startswith(allowed), f"{module} imports {package}, which is for {', '.join(allowed)}"


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith(TORCH_FREE)])
def test_no_torch_where_it_is_not_needed(module: str) -> None:
    assert "torch" not in third_party(module)


def test_rewards_are_standard_library_and_the_registry() -> None:
    for module in (m for m in MODULES if top(m) == "rewards"):
        assert third_party(module) == set() or module == "rewards.formula", module
        assert {top(name) for name in own_imports(module)} <= {"rewards", "registry"}, module


def test_models_and_rollout_do_not_know_each_other() -> None:
    for own, other in (("models", "rollout"), ("rollout", "models")):
        for module in (m for m in MODULES if top(m) == own):
            assert not any(top(name) == other for name in own_imports(module)), module


def test_the_command_line_starts_light() -> None:
    """`--help` and a misspelt key must not wait for torch: launch imports nothing heavy at the top."""
    at_the_top = {"launch": {"config", "config_file", "importing", "starting"}, "starting": set(), "importing": set()}
    for module, expected in at_the_top.items():
        body = ast.parse(SOURCES[module].read_text(encoding="utf-8")).body
        names = {node.module for node in body if isinstance(node, ast.ImportFrom) and node.module != PACKAGE}
        names |= {f"{PACKAGE}.{a.name}" for n in body if getattr(n, "module", "") == PACKAGE for a in n.names}
        names |= {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
        ours = {name for name in names if name and name.split(".")[0] not in sys.stdlib_module_names}
        assert ours == {f"{PACKAGE}.{name}" for name in expected}


@pytest.mark.parametrize("module", [m for m in MODULES if m not in ("device", "config")])
def test_device_is_the_only_file_that_knows(module: str) -> None:
    """torch.cuda, "cuda", "nccl" and is_available are device.py's. (Prose may speak of CUDA; config offers it.)"""
    for node in ast.walk(ast.parse(SOURCES[module].read_text(encoding="utf-8"))):
        where = f"{module}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute):
            assert node.attr != "cuda", f"{where} uses .cuda"
            if node.attr == "is_available":
                assert ast.unparse(node) == "dist.is_available", f"{where} asks {ast.unparse(node)}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert node.value.split(":")[0] not in ("cuda", "nccl"), f"{where} says {node.value!r}"


@pytest.mark.parametrize(
    "path", [*SOURCES.values(), *sorted((ROOT / "tests").rglob("*.py"))], ids=lambda path: str(path.relative_to(ROOT))
)
def test_files_are_short_ascii_and_introduced(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.isascii(), path
    if not text:
        return
    if PACKAGE in path.parts or path.name.startswith("test_"):
        assert ast.get_docstring(ast.parse(text)), f"{path} has no header"
    length = len(text.splitlines())
    assert length <= 400, f"{path} has {length} lines"
    if PACKAGE in path.parts:
        assert length <= 300 or path.stem in LONGER_THAN_300, f"{path} has {length} lines; cut it, or say here why not"
    assert path.stem not in ("utils", "helpers", "common", "misc"), path
