"""The direction of imports, read from the sources with `ast`, and other rules that a reader would overlook.

A room is a folder of the package, or a file of its root. A module may import its own room and the rooms that the table
ROOMS lists for it. `models` and `rollout` do not import each other. Large third-party packages are for named modules
only. Imports inside functions and under TYPE_CHECKING count: the rule is about what a module must know, not about the
time of its import.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests import conftest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "grpo_megatron"
SOURCES = {
    ".".join(path.relative_to(ROOT / PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / PACKAGE).rglob("*.py"))
}
MODULES = sorted(SOURCES)

# Room -> the rooms that it may import. A room lists only rooms above it, so there is no cycle. It lists no room that it
# does not import, so the table shows the whole structure.
ROOMS: dict[str, set[str]] = {
    "types": set(),
    "registry": set(),
    "passthrough": set(),
    "importing": set(),
    "child": set(),
    "extensions": set(),
    "onednn": set(),
    "heap": set(),
    "reading": set(),
    "config": {"reading"},
    "storage": set(),
    "report": {"reading", "storage"},
    "workers": {"child"},
    "rewards": {"registry", "workers"},
    "environments": {"registry", "child", "config", "workers"},
    "algo": {"types", "registry", "config"},
    "data": {"types", "registry", "importing", "reading", "config", "storage", "rewards"},
    "curation": {"reading", "config", "storage", "data"},
    "device": {"extensions", "config"},
    "parallel": {"types", "storage", "device"},
    "sync": {"types", "parallel"},
    "observability": {"types", "config", "storage", "report", "algo"},
    "models": {
        *("types", "registry", "extensions", "reading", "config", "storage"),
        *("algo", "device", "parallel", "sync", "observability"),
    },
    "rollout": {"types", "registry", "passthrough", "importing", "config", "device", "parallel", "sync"},
    "trajectories": {"types", "config", "workers", "data", "environments", "parallel", "rollout"},
    "convert": {"reading", "storage", "models"},
    "evaluation": {
        *("types", "reading", "config", "storage", "report", "rewards", "environments", "data"),
        *("device", "parallel", "models", "rollout", "trajectories", "convert"),
    },
    "generation": {
        *("types", "reading", "config", "storage", "data", "device", "parallel", "models", "rollout"),
        *("convert", "evaluation"),
    },
    "checks": {
        *("types", "registry", "passthrough", "config", "storage", "rewards", "reading", "environments"),
        *("algo", "data", "device", "parallel", "sync", "observability", "models", "rollout", "evaluation"),
    },
    "planning": {"config", "storage", "algo", "device", "parallel", "observability", "models", "checks"},
    "sampling": {
        *("types", "config", "workers", "rewards", "algo", "data"),
        *("parallel", "observability", "rollout", "trajectories"),
    },
    "training": {
        *("types", "onednn", "heap", "config", "storage", "rewards", "environments", "algo", "data"),
        *("device", "parallel", "sync", "observability", "models", "rollout", "trajectories", "checks", "sampling"),
    },
    "trainer": {
        *("types", "config", "storage", "algo", "device", "parallel"),
        *("observability", "models", "checks", "sampling", "training"),
    },
    "migration": {"reading", "config", "storage"},
    "starting": {"reading", "config", "storage", "data", "models", "checks", "planning"},
    "cli": {
        *("importing", "child", "reading", "config", "storage", "parallel", "observability", "rollout", "convert"),
        *("evaluation", "checks", "training", "trainer", "migration", "curation", "starting"),
        *("report", "planning", "generation"),
    },
    "__main__": {"cli"},
}
WITHOUT_TORCH = {
    "child",
    "extensions",
    "types",
    "registry",
    "passthrough",
    "importing",
    "reading",
    "config",
    "storage",
    "report",
    "workers",
    "rewards",
    "environments",
    "data",
    "curation",
    "cli",
    "__main__",
}
ALWAYS_ALLOWED = {"numpy", "torch"}  # except in WITHOUT_TORCH
FENCED = ("rewards.math", "rewards.workers")  # folders of which other rooms may import the modules of ENTRANCES only
ENTRANCES = {  # module -> the rooms that may import it
    "rewards.math.boxed": {"data", "evaluation"},
    "rewards.math.grader": {"data"},
    "rewards.math.formula": {"evaluation"},
    "rewards.workers.pool": {"evaluation", "checks", "sampling", "training"},
}
HANDED_OUT = {"convert": {"convert.conversion"}}  # what a package's __init__ imports when it is asked for a name
THIRD_PARTY: dict[str, tuple[str, ...]] = {  # package -> beginnings of the names of modules that may import it
    "megatron": ("models.", "parallel.mesh", "device"),
    "transformer_engine": ("extensions",),
    "vllm": ("rollout.vllm",),
    "safetensors": ("models.", "convert.", "training.dump"),
    "sentencepiece": ("convert.",),
    "transformers": ("data.", "starting.random_model", "rollout.transformers_model"),
    "tokenizers": ("data.", "starting.random_model"),
    "pydantic": ("config", "cli.partial_config", "data.task", "data.row_format", "rollout."),
    "pydantic_core": ("config",),
    "yaml": ("reading.yaml_text", "planning.resolved", "training.config_record"),
    "matplotlib": ("observability.curves",),
    "numpy": ("data.",),
    "msgspec": ("reading.json_lines",),
    "numba": ("sync.digest_cpu",),
    "triton": ("sync.digest_gpu",),
    "pyarrow": ("data.arrow_rows",),
    "tqdm": ("data.survey", "observability.console", "training.validation", "evaluation.", "convert."),
    "latex2mathml": ("evaluation.formulas",),
    "jsonschema": ("environments.tool",),
    "bm25s": ("environments.tools.search",),
    "math_verify": ("rewards.math.formula", "evaluation.grading_speed"),
    "latex2sympy2_extended": ("rewards.math.formula",),
    "sympy": ("rewards.math.formula", "rewards.math.relation"),
    "torch": ("algo.", "types", "cli.ranks"),
}
TORCH_FREE = (
    "config",
    "registry",
    "checks.layout",
    "checks.passthrough",
    "checks.dry_run",
    "checks.resume",
    "planning",
    "rewards",
    "data",
    "curation",
)


def imported(path: Path) -> set[str]:
    """Full names of all modules that a file imports; for `from package import module` the module, not the package."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
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


def test_rooms_import_only_rooms_above_them() -> None:
    rooms = list(ROOMS)
    assert set(rooms) == {top(module) for module in MODULES if module not in (PACKAGE, "__init__")}
    for place, room in enumerate(rooms):
        below = ROOMS[room] - set(rooms[:place])
        assert not below, f"{room} may import {sorted(below)}, which are below it in ROOMS"


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_upwards_in_the_table(room: str) -> None:
    imported_by = {(top(name), module) for module in MODULES if top(module) == room for name in own_imports(module)}
    for other, module in imported_by:
        assert other in {room, PACKAGE} | ROOMS[room], f"{module} imports {other}, which ROOMS does not allow to {room}"
    assert ROOMS[room] <= {other for other, _ in imported_by}, f"{room} does not import all that the table allows it"


def test_imports_have_no_circle() -> None:
    """Imports in functions count: a cycle that only a call closes is still a cycle."""
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " imports ".join([*path[path.index(module) :], module])
        if module not in done:
            for name in sorted(own_imports(module) - {module} - HANDED_OUT.get(module, set())):
                visit(name, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


@pytest.mark.parametrize("module", [m for m in MODULES if m != PACKAGE])
def test_heavy_packages_stay_where_they_belong(module: str) -> None:
    for package in third_party(module):
        if package in ALWAYS_ALLOWED and top(module) not in WITHOUT_TORCH | {"algo"}:
            continue
        assert package in THIRD_PARTY, f"{module} imports {package}: add to THIRD_PARTY which modules may"
        allowed = THIRD_PARTY[package]
        assert module.startswith(allowed), f"{module} imports {package}; only {', '.join(allowed)} may"


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith(TORCH_FREE)])
def test_no_torch_where_it_is_not_needed(module: str) -> None:
    assert "torch" not in third_party(module)


def test_rewards_are_standard_library() -> None:
    for module in (m for m in MODULES if top(m) == "rewards"):
        assert third_party(module) == set() or module.startswith(THIRD_PARTY["sympy"]), module


def test_fenced_folders_are_entered_by_their_entrances() -> None:
    for module in MODULES:
        for name in own_imports(module):
            if name.startswith(FENCED) and top(module) != top(name):
                assert top(module) in ENTRANCES.get(name, set()), f"{module} imports {name}, which is fenced"


def test_models_and_rollout_do_not_know_each_other() -> None:
    for own, other in (("models", "rollout"), ("rollout", "models")):
        for module in (m for m in MODULES if top(m) == own):
            assert not any(top(name) == other for name in own_imports(module)), module


def test_the_command_line_starts_light() -> None:
    """`--help` must not wait for torch: cli/main.py imports no large package at module level."""
    at_the_top = {
        "cli.main": {
            "config",
            "cli.config_file",
            "cli.mistakes",
            "cli.arguments",
            "cli.commands",
            "cli.module_path",
            "cli.plan",
            "cli.reward_defaults",
            "importing",
            "cli",
        }
        | {"observability.progress", "storage.leftovers"},  # standard library only
        "cli.failures": {"reading.bounds", "config"},
        "cli.ranks": {
            "cli.failures",
            "child",
            "observability.progress",
            "storage.atomic",
            "storage.leftovers",
            "storage.start_times",
        },
        "cli.plan": {"config", "importing"},
        "cli.commands": set(),
        "importing": set(),
    }
    for module, expected in at_the_top.items():
        body = ast.parse(SOURCES[module].read_text(encoding="utf-8")).body
        names = {node.module for node in body if isinstance(node, ast.ImportFrom) and node.module != PACKAGE}
        names |= {f"{PACKAGE}.{a.name}" for n in body if getattr(n, "module", "") == PACKAGE for a in n.names}
        names |= {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
        not_standard = {name for name in names if name and name.split(".")[0] not in sys.stdlib_module_names}
        assert not_standard == {f"{PACKAGE}.{name}" for name in expected}


def test_plans_metrics_and_engine_classes_are_imported_without_torch() -> None:
    """torch takes most of two seconds. It is loaded by the first call that computes with a tensor or asks for a loss."""
    modules = ["algo.plan", "observability.metrics", "rollout.engine"]
    lines = [f"import {PACKAGE}.{module}; assert 'torch' not in sys.modules, {module!r}" for module in modules]
    subprocess.run([sys.executable, "-c", "\n".join(["import sys", *lines])], check=True, cwd=ROOT)


@pytest.mark.parametrize("module", [m for m in MODULES if m not in ("device", "config.trainer", "migration.verl")])
def test_only_device_py_knows_the_device(module: str) -> None:
    """Only device.py uses torch.cuda, "cuda", "nccl" and is_available. (Prose may mention CUDA; configs offer it.)"""
    for node in ast.walk(ast.parse(SOURCES[module].read_text(encoding="utf-8"))):
        where = f"{module}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute):
            assert node.attr != "cuda", f"{where} uses .cuda"
            if node.attr == "is_available":
                assert ast.unparse(node) == "dist.is_available", f"{where} calls {ast.unparse(node)}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert node.value.split(":")[0] not in ("cuda", "nccl"), f"{where} has {node.value!r}"


@pytest.mark.parametrize(
    "path", [*SOURCES.values(), *sorted((ROOT / "tests").rglob("*.py"))], ids=lambda path: str(path.relative_to(ROOT))
)
def test_files_are_short_and_ascii_and_have_a_header(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.isascii(), path
    if not text:
        return
    if PACKAGE in path.parts or path.name.startswith("test_"):
        assert ast.get_docstring(ast.parse(text)), f"{path} has no header"
    length = len(text.splitlines())
    assert length <= (300 if PACKAGE in path.parts else 400), f"{path} has {length} lines: split it"
    assert path.stem not in ("utils", "helpers", "common", "misc"), path


def test_the_list_of_slow_tests_names_files_that_exist() -> None:
    for name in (*conftest.SLOW, conftest.LONGEST):
        assert (ROOT / "tests" / name).exists(), f"tests/conftest.py names tests/{name}"


# -- one name, one thing -----------------------------------------------------------------------------------------------

SHARED_NAMES = {
    "main",
    "architecture_from",
    "weight_table",
    "logger",
    "T",
}  # entry points, each family's two functions, conventions


def public_names(path: Path) -> set[str]:
    """Public functions, classes and constants that a file defines at its top level, without what it registers.

    A registered function is found under its registered name: a task and its reward may both be `gsm8k`.
    """
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            if not any("register(" in ast.unparse(decorator) for decorator in node.decorator_list):
                names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")} - SHARED_NAMES


def names_defined_twice() -> dict[str, list[str]]:
    """Public name -> the modules that define it, where there are several."""
    modules: dict[str, list[str]] = {}
    for module, path in SOURCES.items():
        for name in public_names(path):
            modules.setdefault(name, []).append(module)
    return {name: found for name, found in sorted(modules.items()) if len(found) > 1}


def test_a_public_name_is_defined_once() -> None:
    twice = names_defined_twice()
    assert not twice, "\n".join(f"{name}: {', '.join(modules)}" for name, modules in twice.items())
