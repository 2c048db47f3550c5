"""`train ... --dry-run`, which is `plan ...`, and `plan ... --search`: they print a page and start nothing."""

from __future__ import annotations

import argparse
import shutil
from typing import TYPE_CHECKING

from grpo_megatron.config import Config, ConfigError
from grpo_megatron.importing import large_imports

if TYPE_CHECKING:
    from grpo_megatron.checks.validate import Checked


def print_plan(config: Config, checked: Checked, world_size: int, args: argparse.Namespace) -> None:
    """Raises ConfigError, after the plan, if the run cannot fit the GPU. Then the resolved config is not written."""
    from grpo_megatron.planning.page import PAGE_WIDTH, plan_page
    from grpo_megatron.planning.resolved import write_beside_run, write_resolved

    width = min(max(shutil.get_terminal_size((PAGE_WIDTH, 24)).columns, 80), PAGE_WIDTH)
    page = plan_page(config, checked, world_size, args.gpu, elsewhere=args.world_size is not None, width=width)
    if page.problem is not None:
        print(page, flush=True)
        raise ConfigError(page.problem)
    if args.resolved_config is None:
        written = write_beside_run(config)
    else:
        write_resolved(config, args.resolved_config)
        written = str(args.resolved_config)
    print(page.with_section("Every key with its value, as a config", [written]), flush=True)


def print_search(config: Config, args: argparse.Namespace) -> int:
    """Returns the exit code. Raises ConfigError."""
    with large_imports():
        from grpo_megatron.planning.search_page import search_page

    print(search_page(config, args.world_size, args.gpu, top=args.top, mean_response=args.mean_response))
    return 0
