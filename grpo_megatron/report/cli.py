"""The commands `report` and `watch`. Both read the files of a run, on any machine, while the run goes on and afterwards."""

from __future__ import annotations

import select
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TextIO

from grpo_megatron.config import ConfigError
from grpo_megatron.config.options import Argument, Option, Options
from grpo_megatron.pages.run_folder import METRICS_FILE, RunFolder
from grpo_megatron.pages.run_page import render_report
from grpo_megatron.report.watch import watch_lines
from grpo_megatron.storage.files import write_file

PLAIN_WIDTH = 100  # characters of a line where there is no terminal
CLEAR, HIDE, SHOW = "\x1b[H\x1b[J", "\x1b[?25l", "\x1b[?25h"  # the screen; the cursor


class ReportOptions(Options):
    """The options of `report`."""

    program, description = "report", "Write the page of a run, or of two runs beside each other."
    run: Annotated[tuple[Path, ...], Argument("a run's output folder; at most two")]
    output: Annotated[Path, Option("the HTML file to write")]

    def problems(self) -> Iterator[str]:
        """More runs than a page shows."""
        if len(self.run) > 2:
            yield f"a page shows one run or two, not {len(self.run)}"


class WatchOptions(Options):
    """The options of `watch`."""

    program = "watch"
    description = "Show a run in the terminal, from its files. Ctrl-C, or q and Enter, end it."
    run: Annotated[Path, Argument("the run's output folder")]
    once: Annotated[bool, Option("print once; the default where there is no terminal")] = False
    every: Annotated[float, Option("between two looks (default: 2)", "SECONDS")] = 2.0


def report(options: ReportOptions) -> int:
    """Write the page of the runs; returns the exit code. Raises ConfigError."""
    runs = [_opened(folder) for folder in options.run]
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write_file(options.output, render_report(runs))
    except OSError as error:
        raise ConfigError(f"cannot write --output {options.output}: {error}") from error
    print(f"wrote {options.output}")
    return 0


def watch(options: WatchOptions, stdin: TextIO | None = None, stdout: TextIO | None = None) -> int:
    """Show the run until it ends, or until q and Enter; returns the exit code. Raises ConfigError."""
    stdin, stdout = stdin or sys.stdin, stdout or sys.stdout
    run = _opened(options.run)
    if options.once or not stdout.isatty():
        print("\n".join(watch_lines(run, PLAIN_WIDTH)), file=stdout)
        return 0
    _follow_run(run, options.every, stdin, stdout)
    return 0


def _follow_run(run: RunFolder, every_s: float, stdin: TextIO, stdout: TextIO) -> None:
    stdout.write(HIDE)
    try:
        while True:
            size = shutil.get_terminal_size()
            lines = watch_lines(run, size.columns)[: size.lines - 1]
            stdout.write(CLEAR + "\n".join(lines) + "\n")
            stdout.flush()
            if run.state() != "running":
                return
            readable, _, _ = select.select([stdin], [], [], max(0.1, every_s))
            if readable and stdin.readline()[:1] in ("q", ""):
                return
            run.update()
    except KeyboardInterrupt:
        return
    finally:
        stdout.write(SHOW)
        stdout.flush()


def _opened(folder: Path) -> RunFolder:
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; name the trainer.output_dir of a run")
    run = RunFolder(folder)
    run.update()
    if not run.curves.num_rows and not run.settings and not run.events:
        raise ConfigError(
            f"{folder} has neither {METRICS_FILE} nor config.yaml: it is not the output folder of a run; name the"
            " trainer.output_dir itself, not a folder above or below it"
        )
    return run
