"""The direction of imports, read from the sources with `ast`, and other rules that a reader would overlook.

A room is a folder of the package, or a file of its root. A module may import its own room and the rooms that stand before
its room in ROOMS. `models` and `rollout` are siblings: neither imports the other. Large third-party packages belong to
named modules. Imports inside functions and under TYPE_CHECKING count: the rule is about what a module must know, not
about the time of its import. Each test gathers all violations and shows them at once.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests import conftest
from tests.covering import covering, tree

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "grpo_megatron"
SOURCES = {
    ".".join(path.relative_to(ROOT / PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / PACKAGE).rglob("*.py"))
}

ROOMS = (  # a room imports only rooms that stand before it
    *("shapes", "types", "registry", "imports", "transformer_engine", "untrusted", "config"),  # the ground
    *("storage", "processes", "rewards", "algo", "data"),  # no process group is visible here
    *("device", "parallel", "sync", "exact", "environments"),
    *("models", "rollout"),  # siblings
    *("report", "convert", "sampling", "planning", "checks", "training", "run", "trainer"),
    *("service", "trust", "evaluation", "migration", "starting", "cli", "__main__"),
)
FORBIDDEN = {("rollout", "models")}  # arrows that the order alone would allow
WITHOUT_TORCH = {
    *("shapes", "types", "registry", "imports", "untrusted", "config", "storage", "processes", "rewards"),
    *("environments", "data", "report", "migration", "cli", "__main__"),
}
FENCED = ("rewards.math",)  # other rooms import this folder only through the module of this name
THIRD_PARTY: dict[str, tuple[str, ...]] = {  # package -> beginnings of the names of modules that may import it
    "torch": (
        "algo.",
        "types",
        "cli.ranks",
        "report.loggers",
        "report.metrics",
    ),  # in the rooms without torch, and in algo
    "megatron": ("models.", "exact.", "parallel.mesh", "device", "convert.family"),
    "transformer_engine": ("transformer_engine",),
    "triton": ("models.layers.head_kernel", "models.lora.merge_kernel"),
    "vllm": ("rollout.vllm", "exact.vllm"),
    "safetensors": ("models.", "convert.", "training.", "trust.depth"),
    "transformers": ("data.", "starting.", "rollout.transformers", "models.vision", "convert.family"),
    "huggingface_hub": ("evaluation.card", "storage.hub"),
    "datasets": ("storage.hub",),
    "tokenizers": ("data.", "starting."),
    "pydantic": ("config", "cli.", "data.", "rollout.", "evaluation.", "convert.", "service.wire"),
    "pydantic_core": ("config", "service.wire"),
    "google": ("service.wire",),
    "jaxtyping": ("shapes",),
    "yaml": ("untrusted", "cli.plan", "training."),
    "jinja2": ("report.", "starting.", "data."),
    "numpy": ("data.", "types", "report.metrics", "report.trace_file"),
    "msgspec": ("rewards.pool", "report.run_folder"),
    "pyarrow": ("data.",),
    "PIL": ("data.", "report.kit"),
    "tqdm": ("data.", "report.", "training.", "evaluation.", "convert."),
    "jsonschema": ("environments.",),
    "referencing": ("environments.",),
    "uvicorn": ("environments.", "service.http"),
    "starlette": ("environments.", "service."),
    "bm25s": ("environments.tools.",),
    "math_verify": ("rewards.math.", "evaluation."),
    "latex2sympy2_extended": ("rewards.math.",),
    "sympy": ("rewards.math.",),
    "nltk": ("rewards.instructions",),
    "langdetect": ("rewards.instructions",),
}
ANYWHERE = {"numpy", "torch", "psutil"}  # outside the rooms without torch, and outside algo


@cache
def imported(path: Path) -> frozenset[str]:
    """Full names of all modules that a file imports; for `from package import module` the module, not the package."""
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                own = full.removeprefix(f"{PACKAGE}.")
            found.add(full if own in SOURCES else node.module)
    return frozenset(found)


def own_imports(module: str) -> set[str]:
    """Modules of this package that a module imports."""
    names = {name for name in imported(SOURCES[module]) if name.split(".")[0] == PACKAGE}
    return {name.removeprefix(f"{PACKAGE}.") for name in names} - {PACKAGE}


def room_of(module: str) -> str:
    return module.split(".")[0]


def show(violations: list[str]) -> str:
    return "\n" + "\n".join(violations)


def test_rooms_import_only_rooms_before_them() -> None:
    rooms = {room_of(module) for module in SOURCES if module not in (PACKAGE, "__init__")}
    assert rooms <= set(ROOMS), f"not in ROOMS: {sorted(rooms - set(ROOMS))}"
    wrong = []
    for module in SOURCES:
        room = room_of(module)
        for name in sorted(own_imports(module)):
            other = room_of(name)
            if other == room or room == "__init__":
                continue
            if ROOMS.index(other) > ROOMS.index(room) or (room, other) in FORBIDDEN:
                wrong.append(f"{module} imports {name}: {room} must not know {other}")
    assert not wrong, show(wrong)


def test_imports_have_no_circle() -> None:
    """Imports in functions count: a circle that only a call closes is still a circle."""
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " imports ".join([*path[path.index(module) :], module])
        if module not in done:
            is_front = module == "convert"  # its __init__ imports a name when it is asked for it
            for name in sorted(own_imports(module) - {module} if not is_front else set()):
                visit(name, (*path, module))
            done.add(module)

    for module in SOURCES:
        visit(module, ())


def test_large_packages_stay_where_they_belong() -> None:
    wrong = []
    for module in SOURCES:
        roots = {name.split(".")[0] for name in imported(SOURCES[module])}
        for package in sorted(roots - set(sys.stdlib_module_names) - {PACKAGE}):
            if package in ANYWHERE and room_of(module) not in WITHOUT_TORCH | {"algo"}:
                continue
            if not module.startswith(THIRD_PARTY.get(package, ())):
                wrong.append(f"{module} imports {package}; THIRD_PARTY allows it to {THIRD_PARTY.get(package, 'none')}")
    assert not wrong, show(wrong)


def test_fenced_folders_are_entered_by_their_front() -> None:
    wrong = [
        f"{module} imports {name}, which is fenced"
        for module in SOURCES
        for name in sorted(own_imports(module))
        if name.startswith(tuple(f"{fence}." for fence in FENCED)) and not module.startswith(FENCED)
    ]
    assert not wrong, show(wrong)


def test_the_command_line_starts_without_large_packages() -> None:
    """`--help` must not wait for torch, transformers or vLLM, and a plan of a step's samples needs no torch."""
    large = ("torch", "transformers", "vllm", "megatron", "pyarrow", "numpy.linalg", "matplotlib")
    for module in ("cli.main", "algo.plan", "report.metrics", "rollout.engine"):
        check = f"import sys, {PACKAGE}.{module}; print(*sorted(set({large[:4]!r}) & set(sys.modules)))"
        found = subprocess.run([sys.executable, "-c", check], check=True, cwd=ROOT, capture_output=True, text=True)
        assert not found.stdout.strip(), f"importing {module} imports {found.stdout}"


def test_only_device_py_knows_the_device() -> None:
    """Only device.py uses torch.cuda, "cuda", "nccl" and is_available. (Prose may mention CUDA; configs offer it.)"""
    wrong = []
    for module in SOURCES:
        if module in ("device", "config.trainer") or module.startswith("migration."):
            continue
        for node in ast.walk(tree(SOURCES[module])):
            where = f"{module}:{getattr(node, 'lineno', 0)}"
            used = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if used.endswith((".cuda", ".is_available")) and used != "dist.is_available":
                wrong.append(f"{where} uses {used}")
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and text.split(":")[0] in ("cuda", "nccl"):
                wrong.append(f"{where} has {text!r}")
    assert not wrong, show(wrong)


def test_files_are_ascii_and_have_a_header() -> None:
    wrong = []
    for path in (*SOURCES.values(), *sorted((ROOT / "tests").rglob("*.py"))):
        text = path.read_text(encoding="utf-8")
        if not text.isascii():
            wrong.append(f"{path} is not ASCII")
        if text and (PACKAGE in path.parts or path.name.startswith("test_")) and not ast.get_docstring(tree(path)):
            wrong.append(f"{path} has no header")
        if path.stem in ("utils", "helpers", "common", "misc"):
            wrong.append(f"{path}: name the file for what it holds")
    assert not wrong, show(wrong)


def test_the_list_of_slow_tests_names_files_that_exist() -> None:
    for name in (*conftest.SLOW, *conftest.LONGEST):
        assert (ROOT / "tests" / name).exists(), f"tests/conftest.py names tests/{name}"


def test_the_docstring_of_a_room_names_its_files() -> None:
    """Each file by its stem, and no file that has gone."""
    wrong = []
    for front in sorted((ROOT / PACKAGE).glob("*/**/__init__.py")):
        room, text = front.parent, ast.get_docstring(tree(front)) or ""
        stems = {path.stem for path in room.glob("*.py")} - {"__init__"}
        missing = [stem for stem in stems if not re.search(rf"\b{stem}\b", text)]
        gone = [name for name in re.findall(r"(?<![\w/])(\w+)\.py\b", text) if name not in stems]
        gone = [name for name in gone if not any((ROOT / PACKAGE).rglob(f"{name}.py"))]
        wrong += [f"{front.relative_to(ROOT)}: {sorted(missing)} not named, {gone} gone"] if missing or gone else []
    assert not wrong, show(wrong)


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    wrong = []
    for module, path in SOURCES.items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                first = (ast.get_docstring(node) or "").split(" ")[0]
                if first in ("What", "Whether", "Of", "Those", "Whose"):
                    wrong.append(f"{module}:{getattr(node, 'lineno', 1)} begins with {first}")
    assert not wrong, show(wrong)


def test_a_test_covers_every_file() -> None:
    """`make test FILE=...` finds one."""
    paths = [path.relative_to(ROOT) for path in SOURCES.values() if path.stem not in ("__init__", "__main__")]
    wrong = [str(path) for path in paths if not covering(path)]
    assert not wrong, show(wrong)


# -- one name, one thing -----------------------------------------------------------------------------------------------

SHARED_NAMES = {"main", "architecture_from", "weight_table", "logger", "T"}  # entry points, families, conventions


def public_names(path: Path) -> set[str]:
    """Public functions, classes and constants that a file defines at its top level, without what it registers.

    A registered function is found under its registered name: a task and its reward may both be `gsm8k`.
    """
    names: set[str] = set()
    for node in tree(path).body:
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


def test_a_public_name_is_defined_once() -> None:
    modules: dict[str, list[str]] = {}
    for module, path in SOURCES.items():
        for name in public_names(path):
            modules.setdefault(name, []).append(module)
    twice = [f"{name}: {', '.join(found)}" for name, found in sorted(modules.items()) if len(found) > 1]
    assert not twice, show(twice)


def test_a_public_function_or_class_says_what_it_is() -> None:
    """The sentence of a docstring, for what other files may call. One-line properties and overrides need none."""
    wrong = []
    for module, path in SOURCES.items():
        for node in tree(path).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            if not ast.get_docstring(node):
                wrong.append(f"{module}:{node.lineno} {node.name} has no docstring")
    assert not wrong, show(wrong)
