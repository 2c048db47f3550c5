"""Counts what a plain GRPO run executes: `python tools/journey.py [--list]`; and lines of Python: `--size`.

A file counts when one of its functions is called; importing it does not count. Three spans are counted, in this process and its
threads (not in the worker processes of rewards):

    check   reading and checking the config
    steps   two training steps of one rank on the CPU, without warm-up, validation and checkpoints
    run     everything, from the config to the end of the run
    read    of the files of `steps` those that explain a step: in STEP_ROOMS without WATCH, 5 or more functions called
Model, data and config are the quickstart's, made in a temporary folder.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import sys
import tempfile
import threading
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLAIN = (
    *("sft.steps=0", "trainer.total_training_steps=2", "trainer.n_gpus_per_node=1", "trainer.device=cpu"),
    *("trainer.test_freq=-1", "trainer.val_before_train=false", "trainer.save_freq=-1", "trainer.save_hf_at_end=false"),
    "trainer.logger=[jsonl]",
)


STEP_ROOMS = (
    "trainer",
    "run",
    "training",
    "sampling",
    "algo",
    "models",
    "rollout",
    "sync",
    "parallel",
    "types",
)  # of a reader
WATCH = {"parallel/heartbeat.py", "training/guards.py", "training/stopping.py", "models/flops.py"}  # they watch a step


class Journey:
    """The functions that were called in each span, by file."""

    def __init__(self) -> None:
        self.spans: dict[str, set[Any]] = {}
        self._open: list[set[Any]] = []  # innermost last

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Count what is called inside, also by threads that start there. Spans may be nested."""
        called = self.spans.setdefault(name, set())
        self._open.append(called)
        if len(self._open) == 1:
            threading.setprofile(self._follow)
            sys.setprofile(self._follow)
        try:
            yield
        finally:
            self._open.pop()
            if not self._open:
                sys.setprofile(None)
                threading.setprofile(None)  # type: ignore[arg-type]

    def _follow(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            for called in self._open:
                called.add(frame.f_code)

    def files(self, name: str) -> dict[str, set[str]]:
        """File of the package -> the functions of it that were called, without lambdas and comprehensions."""
        found: dict[str, set[str]] = {}
        for code in self.spans[name]:
            path = Path(code.co_filename)
            is_function = code.co_flags & inspect.CO_NEWLOCALS and not code.co_name.startswith("<")
            if is_function and path.suffix == ".py" and path.is_relative_to(ROOT / "grpo_megatron"):
                found.setdefault(str(path.relative_to(ROOT / "grpo_megatron")), set()).add(code.co_qualname)
        return found


def to_read(files: dict[str, set[str]]) -> dict[str, set[str]]:
    """The files that a reader of a step needs."""
    return {
        file: functions
        for file, functions in files.items()
        if file.removesuffix(".py").split("/")[0] in STEP_ROOMS and len(functions) >= 5 and file not in WATCH
    }


def count(engine: str) -> Journey:
    """Run the quickstart's config in the current folder."""
    from grpo_megatron.starting.quickstart import QuickstartOptions, prepare_quickstart

    _, config_file, *overrides = prepare_quickstart(QuickstartOptions(overrides=(*PLAIN, f"rollout.engine={engine}")))
    journey = Journey()
    with journey.span("run"):
        with journey.span("check"):
            from grpo_megatron.checks.validate import validate
            from grpo_megatron.cli.config_file import load_config

            config = load_config(config_file, overrides)
            checked = validate(config, 1)
        from grpo_megatron.trainer import Trainer

        trainer = Trainer(config, checked)
        train = trainer.train

        def counted() -> None:
            with journey.span("steps"):
                train()

        trainer.train = counted  # type: ignore[method-assign]
        trainer.run()
    return journey


# -- lines -------------------------------------------------------------------------------------------------------------


def num_lines(paths: Iterator[Path]) -> int:
    """All lines of these files."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def tests_and_the_rest() -> tuple[list[Path], list[Path]]:
    """The Python files of tests/, and all others but tools/benchmarks/ and hidden folders."""
    files = [path.relative_to(ROOT) for path in ROOT.rglob("*.py")]
    files = [path for path in files if not path.parts[0].startswith(".") and path.parts[0] not in ("outputs", "build")]
    tests = [ROOT / path for path in files if path.parts[0] == "tests"]
    benchmarks = ("tools", "benchmarks")
    return tests, [ROOT / path for path in files if path.parts[0] != "tests" and path.parts[:2] != benchmarks]


def imported_files(entry: Path) -> set[Path]:
    """The files of the package that `entry` imports, directly or through others, in functions too."""
    reached, open_files = {entry}, [entry]
    while open_files:
        for node in ast.walk(ast.parse(open_files.pop().read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                path = ROOT / name.replace(".", "/")
                for file in (path.with_suffix(".py"), path / "__init__.py"):
                    if file.is_file() and file not in reached:
                        reached.add(file)
                        open_files.append(file)
    return reached


def code_lines(path: Path) -> int:
    """Lines with code: without blank lines and comments. Docstrings count."""
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
    with tokenize.open(path) as file:
        lines = {
            line
            for token in tokenize.generate_tokens(file.readline)
            if token.type not in (*ignored, tokenize.ENDMARKER)
            for line in range(token.start[0], token.end[0] + 1)
        }
    return len(lines)


def print_sizes() -> None:
    """Print the three counts of docs/map.md."""
    tests, others = tests_and_the_rest()
    reached = imported_files(ROOT / "grpo_megatron" / "trainer.py")
    print(
        f"all Python outside tests/ and tools/benchmarks/   {num_lines(iter(others)):7,} lines in {len(others)} files"
    )
    print(f"tests/                                            {num_lines(iter(tests)):7,} lines in {len(tests)} files")
    print(
        f"what trainer.py imports, code lines only          {sum(map(code_lines, reached)):7,} lines in {len(reached)} files"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Count the files that a plain GRPO run executes.")
    parser.add_argument("--list", action="store_true", help="also the files, with the number of functions of each")
    parser.add_argument("--size", action="store_true", help="count lines instead, without a run")
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="transformers", help="rollout.engine")
    args = parser.parse_args()
    if args.size:
        print_sizes()
        return
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        journey = count(args.engine)
    print("           files   functions       lines")
    for name in ("check", "steps", "run", "read"):
        files = journey.files(name) if name != "read" else to_read(journey.files("steps"))
        lines = num_lines(ROOT / "grpo_megatron" / file for file in files)
        print(f"{name:8}{len(files):8}{sum(map(len, files.values())):12}{lines:12,}")
        for file in sorted(files) if args.list else ():
            print(f"    {file:44} {len(files[file])}")


if __name__ == "__main__":
    main()
