"""Counts the files and functions of the package that a plain GRPO run executes: `python tools/journey.py [--list]`.

A file counts when one of its functions is called; importing it does not count. Three spans are counted, in this process and its
threads (not in the worker processes of rewards):

    check   reading and checking the config
    steps   two training steps of one rank on the CPU, without warm-up, validation and checkpoints
    run     everything, from the config to the end of the run
Model, data and config are the quickstart's, made in a temporary folder.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import sys
import tempfile
import threading
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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Count the files that a plain GRPO run executes.")
    parser.add_argument("--list", action="store_true", help="also the files, with the number of functions of each")
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="transformers", help="rollout.engine")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        journey = count(args.engine)
    print("           files   functions")
    for name in ("check", "steps", "run"):
        files = journey.files(name)
        print(f"{name:8}{len(files):8}{sum(map(len, files.values())):12}")
        for file in sorted(files) if args.list else ():
            print(f"    {file:44} {len(files[file])}")


if __name__ == "__main__":
    main()
