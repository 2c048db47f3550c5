"""The commands `report` and `watch`. Both read the files of a run, on any machine, while the run goes on and afterwards."""

from __future__ import annotations

import argparse
import select
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from grpo_megatron.pages.run_folder import METRICS_FILE, RunFolder
from grpo_megatron.pages.run_page import render_report
from grpo_megatron.report.watch import watch_lines
from grpo_megatron.storage.atomic import write_file

PLAIN_WIDTH = 100  # characters of a line where there is no terminal
CLEAR, HIDE, SHOW = "\x1b[H\x1b[J", "\x1b[?25l", "\x1b[?25h"  # the screen; the cursor


def report_main(argv: Sequence[str]) -> int:
    """Run `grpo-megatron report RUN [RUN2] --output FILE`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="grpo-megatron report", description="Write the page of a run, or of two runs beside each other."
    )
    parser.add_argument("run", type=Path, nargs="+", help="a run's output folder; at most two")
    parser.add_argument("--output", type=Path, required=True, help="the HTML file to write")
    options = parser.parse_args(argv)
    if len(options.run) > 2:
        parser.error(f"a page shows one run or two, not {len(options.run)}")
    runs = [_opened(parser, folder) for folder in options.run]
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write_file(options.output, render_report(runs))
    except OSError as error:
        parser.error(f"cannot write --output {options.output}: {error}")
    print(f"wrote {options.output}")
    return 0


def watch_main(argv: Sequence[str], stdin: TextIO | None = None, stdout: TextIO | None = None) -> int:
    """Run `grpo-megatron watch RUN`, which ends with the run, or on q and Enter; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="grpo-megatron watch",
        description="Show a run in the terminal, from its files. Ctrl-C, or q and Enter, end it.",
    )
    parser.add_argument("run", type=Path, help="the run's output folder")
    parser.add_argument("--once", action="store_true", help="print once; the default where there is no terminal")
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="between two looks (default: 2)")
    options = parser.parse_args(argv)
    stdin, stdout = stdin or sys.stdin, stdout or sys.stdout
    run = _opened(parser, options.run)
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


def _opened(parser: argparse.ArgumentParser, folder: Path) -> RunFolder:
    if not folder.is_dir():
        parser.error(f"there is no folder {folder}; name the trainer.output_dir of a run")
    run = RunFolder(folder)
    run.update()
    if not run.curves.num_rows and not run.settings and not run.events:
        parser.error(
            f"{folder} has neither {METRICS_FILE} nor config.yaml: it is not the output folder of a run; name the"
            " trainer.output_dir itself, not a folder above or below it"
        )
    return run
