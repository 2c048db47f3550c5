"""The command line, and how a run starts and ends: `python -m grpo_megatron train CONFIG [section.key=value ...]`.

`train-reward` is `train` with other defaults: a reward model from a file of pairs, or of labelled steps (reward_defaults).

A process that is started by hand checks the config. It then starts one rank per device of the machine through torchrun's
own agent (ranks.py). A world of one rank stays in that process, so that a debugger works. Under torchrun or srun, which
set RANK, the process is a rank itself. A failure is reported once (failures.py).

Exit codes: 0; 2 for a mistake in the config, before anything was started; 1 for a later failure; 75, or 130 after Ctrl-C,
when the run was stopped on request (training/stopping.py) and can be started again; 128 + signal.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import secrets
import signal
import sys
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from grpo_megatron.cli import failures, ranks
from grpo_megatron.cli.commands import COMMANDS, STARTS_RANKS, parse_command, print_plan, print_search
from grpo_megatron.cli.config_file import (
    WrongKeys,
    in_file_order,
    load_config,
    problems_in,
    reward_defaults,
    with_other_mistakes,
)
from grpo_megatron.cli.module_path import find_modules
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.importing import large_imports
from grpo_megatron.observability.progress import awaited
from grpo_megatron.storage.lock import remove_leftovers

if TYPE_CHECKING:
    from grpo_megatron.checks.validate import Checked


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code. In a rank of several, a failure ends the process at once."""
    argv = sys.argv[1:] if argv is None else argv
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: ranks share the cores
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else vLLM prints a NUMA remark per rank
    find_modules(Path("CONFIG"))  # a user's task, family or reward, in the current folder
    if argv[:1] == ["convert"]:  # it reports its own failures
        return COMMANDS["convert"].run(argv[1:])
    try:
        if argv[:1] == ["quickstart"]:
            from grpo_megatron.starting.quickstart import quickstart_arguments

            argv = quickstart_arguments(argv[1:])
    except Exception as error:
        return _report(error)
    has_own_options = argv[:1] in ([name] for name in (*STARTS_RANKS, *COMMANDS))
    args = None if has_own_options else parse_command(argv)
    try:
        code = _train(args, argv) if args is not None else _other(argv)
        if code == 0:
            failures.mark_finished()
            return 0
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
        if os.environ.get("RANK", "0") == "0" and ranks.LAUNCHER_PID not in os.environ:
            print("interrupted", file=sys.stderr)
    except Exception as error:
        code = _report(error)
    if failures.is_one_of_several():
        _exit_at_once(code)
    return code


def _report(error: Exception) -> int:
    return failures.report_failure(error, launcher_prints=ranks.LAUNCHER_PID in os.environ)


def _train(args: argparse.Namespace, argv: list[str]) -> int:
    find_modules(args.config)
    try:
        return _train_from(args, argv)
    except ConfigError as error:
        problems = problems_in(str(error))
        if isinstance(error, WrongKeys):
            problems = with_other_mistakes(error, functools.partial(_validate, args, argv, wrong_keys=error.keys))
        raise ConfigError("\n".join(in_file_order(problems, args.config, args.overrides))) from error


def _train_from(args: argparse.Namespace, argv: list[str]) -> int:
    config = load_config(args.config, args.overrides, reward_defaults if args.command == "train-reward" else None)
    if args.command == "plan" and args.search:
        _quieten(is_rank=False, starts_ranks=False)
        return print_search(config, args)
    is_rank, by_epochs = "RANK" in os.environ, config.trainer.total_epochs is not None
    if not args.dry_run and not by_epochs and _has_nothing_to_do(config, args.profile):
        return 0
    world_size = args.world_size or _world_size(config, is_rank)
    starts_ranks = _starts_ranks(args, world_size)
    if not args.dry_run and (not is_rank or _is_first_of_machine()):
        remove_leftovers()
    if not is_rank and not args.dry_run:
        ranks.announce_start(world_size, _engine(config), str(config.model.path))
    if starts_ranks and ranks.is_on_cpu(config.trainer.device):
        ranks.start_fork_server(_engine(config))
    if not starts_ranks and not args.dry_run:
        with awaited("importing libraries", os.environ.get("RANK", "0") == "0"), large_imports():
            _join_run(is_rank)
    checked = _validate(args, argv, config)
    config = checked.resolved(config)
    if not args.dry_run and by_epochs and _has_nothing_to_do(config, args.profile):
        return 0
    if args.dry_run:
        if os.environ.get("RANK", "0") == "0":
            print_plan(config, checked, world_size, args)
        return 0
    if starts_ranks:
        del checked  # the ranks read the files themselves
        return ranks.start_ranks(main, world_size, argv, config.trainer.device, can_stop=True, engine=_engine(config))
    return _run(config, checked, args.profile)


def _validate(
    args: argparse.Namespace, argv: list[str], config: Config, *, wrong_keys: Collection[str] = ()
) -> Checked:
    """Raises ConfigError with all problems, those of the command line too."""
    is_rank = "RANK" in os.environ
    world_size = args.world_size or _world_size(config, is_rank)
    _quieten(is_rank, _starts_ranks(args, world_size))
    is_shown = not args.dry_run and os.environ.get("RANK", "0") == "0"
    with (
        awaited("importing libraries", is_shown),
        large_imports(),
    ):  # torch too: now the file is known to be well-formed
        from grpo_megatron.checks.validate import RunStart, validate
    device = None if args.gpu is None else args.gpu.usable_bytes
    problems = list(_problems_of_the_start(args, argv, config, world_size))
    return validate(
        config,
        world_size,
        dry_run=args.dry_run,
        elsewhere=args.world_size is not None,
        rehearsed=os.environ.get("RANK", "0") == "0" and ranks.LAUNCHER_PID not in os.environ,
        start=RunStart(problems, args.profile, device, wrong_keys),
    )


def _problems_of_the_start(args: argparse.Namespace, argv: list[str], config: Config, world_size: int) -> Iterator[str]:
    """A command for another kind of config, a file that cannot be written, ranks that this process cannot start."""
    from grpo_megatron.checks.model_folders import trains_scores
    from grpo_megatron.planning.resolved import resolved_problem

    if args.command == "train-reward" and not trains_scores(config):
        yield (
            f"train-reward trains a model that scores, and actor.loss_mode={config.actor.loss_mode} trains a language model; set"
            " loss_mode=bradley_terry (pairs) or step_labels (steps), or use the command train"
        )
    if args.resolved_config is not None and (problem := resolved_problem(args.resolved_config)):
        yield problem
    if _starts_ranks(args, world_size) and config.trainer.nnodes > 1:
        yield _many_nodes(config, argv)


def _starts_ranks(args: argparse.Namespace, world_size: int) -> bool:
    """Whether this process is to start the ranks of its machine, and is none itself."""
    return "RANK" not in os.environ and not args.dry_run and world_size > 1


def _has_nothing_to_do(config: Config, profiled: range | None) -> bool:
    """Whether the run is done; then say so. What a resumed run may not change or profile is left to `validate`."""
    from grpo_megatron.checks.methods import profile_problems
    from grpo_megatron.checks.resume import resume_problems
    from grpo_megatron.training.stopping import is_done

    problems = [*resume_problems(config), *profile_problems(profiled, config.trainer.total_training_steps)]
    if not is_done(config.trainer) or problems:
        return False
    if os.environ.get("RANK", "0") == "0":
        folder, steps = config.trainer.output_dir, config.trainer.total_training_steps
        key = "trainer.total_training_steps" if config.trainer.total_epochs is None else "trainer.total_epochs"
        print(
            f"already done: {folder} has all {steps} steps; for more, raise {key}; for another run, set another"
            " trainer.output_dir"
        )
    return True


def _join_run(is_rank: bool) -> None:
    """Prepare this process as a rank: before anything slow, since signals may come at any time."""
    from grpo_megatron.training.stopping import listen

    if is_rank:
        ranks.join_launcher()
        failures.mark_started()
    is_first = os.environ.get("RANK", "0") == "0"
    listen(failures.is_lost, announces=is_first and ranks.LAUNCHER_PID not in os.environ)


def _is_first_of_machine() -> bool:
    """Under torchrun or srun; our launcher cleans up for its ranks."""
    return os.environ.get("LOCAL_RANK") == "0" and ranks.LAUNCHER_PID not in os.environ


def _run(config: Config, checked: Checked, profiled: range | None) -> int:
    """Train as this rank until the run is over; returns the exit code."""
    from grpo_megatron.parallel.heartbeat import when_stalled
    from grpo_megatron.training.stopping import Stopped, forget_outcome

    when_stalled(_report)
    if os.environ.get("RANK", "0") == "0":
        forget_outcome(config.trainer.output_dir)
    with awaited("importing Megatron-Core", os.environ.get("RANK", "0") == "0"), large_imports():
        from grpo_megatron.trainer import Trainer

    try:
        Trainer(config, checked, profiled).run()
    except Stopped as stopped:
        return stopped.exit_code
    except SystemExit as error:  # of a user's loss or estimator: exit code 0 would look like a finished run
        raise RuntimeError(f"sys.exit({error.code}) was called during the run; raise an exception instead") from error
    return 0


def _other(argv: list[str]) -> int:
    """A command of STARTS_RANKS or of COMMANDS."""
    if argv[0] in STARTS_RANKS:
        return _with_ranks(argv)
    _quieten(is_rank=False, starts_ranks=False)
    return COMMANDS[argv[0]].run(argv[1:])


def _with_ranks(argv: list[str]) -> int:
    """`evaluate ...`, `generate ...`: they parse their own options, and start ranks and report failures as `train` does."""
    is_rank = "RANK" in os.environ
    _quieten(is_rank, starts_ranks=False)
    if is_rank:
        ranks.join_launcher()
        failures.mark_started()
    start_ranks = functools.partial(ranks.start_ranks, main)
    if argv[0] == "generate":
        from grpo_megatron.generation.cli import main as generate

        return generate(argv[1:], start_ranks, is_rank)
    from grpo_megatron.evaluation.cli import main as evaluate

    return evaluate(argv[1:], start_ranks, is_child=ranks.LAUNCHER_PID in os.environ)


def _engine(config: Config) -> str | None:
    """`rollout.engine` of a run that draws, else None."""
    return config.rollout.engine if config.draws else None


def _world_size(config: Config, is_rank: bool) -> int:
    if not is_rank:
        return config.trainer.nnodes * config.trainer.n_gpus_per_node
    try:
        return int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        raise ConfigError("RANK is set but WORLD_SIZE is not a number; start with torchrun, or unset RANK") from None


def _many_nodes(config: Config, argv: list[str]) -> str:
    nodes, each = config.trainer.nnodes, config.trainer.n_gpus_per_node
    return (
        f"trainer.nnodes={nodes}: one process cannot start ranks on other machines; on each of the {nodes} start\n"
        f"  torchrun --nnodes {nodes} --nproc-per-node {each} --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29500"
        f" \\\n      --rdzv-id {secrets.token_hex(16)} -m grpo_megatron {' '.join(argv)}\n"
        f"  (Slurm: srun --nodes {nodes} --ntasks-per-node 1 in front of it), or set trainer.nnodes=1"
    )


def _quieten(is_rank: bool, starts_ranks: bool) -> None:
    """Show warnings in one process only: rank 0, or the only process."""
    shows_warnings = not starts_ranks and (not is_rank or os.environ["RANK"] == "0")
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING if shows_warnings else logging.ERROR)
    if not failures.is_debugging():
        warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed\.")  # the user cannot act on them
        warnings.filterwarnings("ignore", message=".*deprecating ShardedTensor")  # Megatron-Core's checkpoints use it


def _exit_at_once(code: int) -> NoReturn:
    """Exit without the interpreter's clean-up, which threads of the engine and broken process groups can block for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
