"""How a run starts and ends: `train`, `train-reward`, and `plan`, which is `train ... --dry-run`.

A process that is started by hand checks the config. It then starts one rank per device of the machine through torchrun's
own agent (ranks.py). A world of one rank stays in that process, so that a debugger works. Under torchrun or srun, which
set RANK, the process is a rank itself. `train-reward` is `train` with other defaults (config_file.py).
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import shlex
import shutil
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from grpo_megatron.cli import failures, ranks
from grpo_megatron.cli.config_file import (
    WrongKeys,
    for_command_line,
    in_file_order,
    load_config,
    preparation,
    reward_defaults,
    with_other_mistakes,
)
from grpo_megatron.cli.main import PlanOptions, RunOptions, TrainRewardOptions
from grpo_megatron.cli.nodes import build_healer, node_problem
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.config.problems import Problems, keys_of
from grpo_megatron.imports import large_imports
from grpo_megatron.processes.variables import set_determinism_variables
from grpo_megatron.registry import find_modules
from grpo_megatron.report.progress import awaited
from grpo_megatron.storage.files import remove_leftovers
from grpo_megatron.storage.hub import known_shape, model_folder
from grpo_megatron.untrusted import ReadError, redacted

if TYPE_CHECKING:
    from grpo_megatron.checks.validate import Checked

Main = Callable[[list[str]], int]  # cli/main.py's: every rank of a CPU run calls it with the command line


def train(options: RunOptions, argv: list[str], main: Main) -> int:
    """Check the config; train, start the ranks that train, or print the plan. `argv`: the command line that `main` takes.

    Returns the exit code. Raises ConfigError with all mistakes, in the order of the file.
    """
    find_modules(options.config)
    try:
        return _train_from(options, argv, main)
    except ConfigError as error:
        problems = error.problems
        if isinstance(error, WrongKeys):
            problems = with_other_mistakes(error, functools.partial(_validate, options, argv, wrong_keys=error.keys))
        problems = in_file_order(problems, options.config, options.settings)
        raise ConfigError(*map(for_command_line, problems), *preparation(options.config, problems)) from error


def _train_from(options: RunOptions, argv: list[str], main: Main) -> int:
    settings = [*options.settings, *ranks.settings_of_restart()]
    config = load_config(options.config, settings, reward_defaults if isinstance(options, TrainRewardOptions) else None)
    if isinstance(options, PlanOptions) and options.search:
        return _print_search(config, options)
    is_rank, by_epochs = "RANK" in os.environ, config.trainer.total_epochs is not None
    world_size, engine = (
        options.world_size or _world_size(config),
        config.rollout.engine if config.has_rollouts else None,
    )
    if options.dry_run:
        checked = _validate(options, argv, config)
        if failures.is_first():
            _print_plan(config, checked, world_size, options)
        return 0
    if not by_epochs and _has_nothing_to_do(config):
        return 0
    ranks.prepare_environment(config.trainer.device)
    set_determinism_variables(config)
    starts_ranks = _starts_ranks(options, config, world_size)
    if not is_rank or (os.environ.get("LOCAL_RANK") == "0" and failures.LAUNCHER_PID not in os.environ):
        remove_leftovers()  # our launcher cleans up for its ranks
    if not is_rank:
        ranks.announce_start(world_size, engine, checks=True)
    if starts_ranks and ranks.is_on_cpu(config.trainer.device):
        ranks.start_fork_server(engine)
    if not starts_ranks:
        with awaited("importing libraries", failures.is_first()), large_imports():
            _join_run(config, world_size, is_rank)
    checked = _validate(options, argv, config)
    config = checked.config
    if by_epochs and _has_nothing_to_do(config):
        return 0
    if starts_ranks:
        from grpo_megatron.parallel.heartbeat import LauncherWatch

        healer = build_healer(config, checked)
        del checked  # the ranks read the files themselves
        place = functools.partial(failures.last_place, config.trainer.output_dir)
        device, num_nodes = config.trainer.device, config.trainer.nnodes
        stall_s = config.trainer.stall_timeout_s
        watch = None
        if stall_s is not None:
            folder, heals = config.trainer.output_dir, config.trainer.healing.is_on
            watch = functools.partial(LauncherWatch, folder, stall_s, num_nodes=num_nodes, heals=heals)
        return ranks.start_ranks(
            main,
            config.trainer.n_gpus_per_node if num_nodes > 1 else world_size,
            argv,
            device,
            can_stop=True,
            engine=engine,
            place=place,
            healer=healer,
            remembers=config.trainer.healing.is_mirrored,
            watch=watch,
        )
    return _run(config, checked, options)


def _world_size(config: Config) -> int:
    if "RANK" not in os.environ:
        return config.trainer.nnodes * config.trainer.n_gpus_per_node
    return int(os.environ["WORLD_SIZE"])


def _starts_ranks(options: RunOptions, config: Config, world_size: int) -> bool:
    """Says if this process starts the ranks of its machine, and is none itself."""
    is_rank = "RANK" in os.environ
    return not is_rank and not options.dry_run and (world_size > 1 or config.trainer.healing.is_on)


def _validate(options: RunOptions, argv: list[str], config: Config, *, wrong_keys: Collection[str] = ()) -> Checked:
    """Raises ConfigError with all problems, those of the command line too."""
    world_size = options.world_size or _world_size(config)
    failures.quieten("RANK" in os.environ, _starts_ranks(options, config, world_size))
    with awaited("importing libraries", not options.dry_run and failures.is_first()), large_imports():
        from grpo_megatron.checks.validate import RunStart, validate  # torch too: the file is known to be well-formed
    device = None if options.gpu is None else options.gpu.usable_bytes
    problems = list(_problems_of_the_start(options, argv, config, world_size))
    return validate(
        config,
        world_size,
        dry_run=options.dry_run,
        elsewhere=_is_elsewhere(options, config),
        rehearsed=failures.is_first() and failures.LAUNCHER_PID not in os.environ,
        start=RunStart(problems, device, wrong_keys),
    )


def _is_elsewhere(options: RunOptions, config: Config) -> bool:
    """Says if a plan is for other machines: by --world-size, or since this one has no more than the shape of its model.

    Where the model is missing, no word about missing data: its path may be mistyped.
    """
    if options.world_size is not None or not isinstance(options, PlanOptions):
        return options.world_size is not None
    path = config.model.path
    has_shape_alone = (path / "config.json").exists() and len(list(path.iterdir())) == 1
    if has_shape_alone or known_shape(path) is not None:
        return True
    try:
        return not model_folder(path, weights=False).exists()
    except ReadError:
        return True


def _problems_of_the_start(options: RunOptions, argv: list[str], config: Config, world_size: int) -> Problems:
    """Yields a command for another kind of config, a file that cannot be written, ranks that this process cannot start."""
    if isinstance(options, TrainRewardOptions):
        from grpo_megatron.checks.models import trains_scores

        if not trains_scores(config):
            yield (
                f"train-reward trains a model that scores, and {keys_of(config).actor.loss_mode} trains a language model; set"
                " loss_mode=bradley_terry (pairs) or step_labels (steps), or use the command train"
            )
    if config.trainer.healing.is_on and "RANK" in os.environ and failures.LAUNCHER_PID not in os.environ:
        yield (
            f"{keys_of(config).trainer.healing.layouts}: ranks that torchrun or srun has started are not started again; leave"
            " it out, or start the command without them"
        )
    if options.resolved_config is not None:
        from grpo_megatron.cli.plan import resolved_problem

        if problem := resolved_problem(options.resolved_config):
            yield problem
    nodes, each = config.trainer.nnodes, config.trainer.n_gpus_per_node
    starts_ranks = _starts_ranks(options, config, world_size) and nodes > 1
    if starts_ranks and config.trainer.healing.is_on:
        if problem := node_problem(config):
            yield f"{keys_of(config).trainer.nnodes} with {keys_of(config).trainer.healing.layouts}: {problem}"
    elif starts_ranks:
        yield (
            f"{keys_of(config).trainer.nnodes}: one process cannot start ranks on other machines; on each of the {nodes}"
            f" start\n  torchrun --nnodes {nodes} --nproc-per-node {each} --rdzv-backend c10d --rdzv-endpoint"
            f" FIRST_HOST:29500 \\\n      --rdzv-id {secrets.token_hex(16)} -m grpo_megatron {redacted(shlex.join(argv))}\n"
            f"  (Slurm: srun --nodes {nodes} --ntasks-per-node 1 in front of it), or set trainer.nnodes=1"
        )


def _has_nothing_to_do(config: Config) -> bool:
    """Says if the run is done, and prints it. What a resumed run may not change is left to `validate`."""
    from grpo_megatron.training.stopping import is_done

    if not is_done(config.trainer):
        return False
    from grpo_megatron.checks.resume import resume_problems  # imports large libraries: a new run starts without them

    if list(resume_problems(config)):
        return False
    if failures.is_first():
        folder, steps = config.trainer.output_dir, config.trainer.total_training_steps
        key = "trainer.total_training_steps" if config.trainer.total_epochs is None else "trainer.total_epochs"
        print(
            f"already done: {folder} has {'its only step' if steps == 1 else f'all {steps} steps'}; for more, raise {key};"
            " for another run, set another trainer.output_dir"
        )
    return True


def _draws(config: Config, world_size: int) -> bool:
    return int(os.environ.get("RANK", "0")) >= world_size - config.num_rollout_ranks


def _join_run(config: Config, world_size: int, is_rank: bool) -> None:
    """Prepare this process as a rank: before anything slow, since signals may come at any time."""
    from grpo_megatron.training.stopping import listen

    if is_rank:
        ranks.join_launcher()
        if config.replaces_rollout_ranks and _draws(config, world_size):
            from grpo_megatron.cli.keeper import keep_rank

            keep_rank()
        failures.mark_started()
    listen(failures.is_lost, announces=failures.is_first() and failures.LAUNCHER_PID not in os.environ)


def _run(config: Config, checked: Checked, options: RunOptions) -> int:
    """Train as this rank until the run is over; returns the exit code."""
    from grpo_megatron.parallel.bridge import RunOver
    from grpo_megatron.parallel.heartbeat import when_stalled
    from grpo_megatron.training.stopping import Stopped, forget_outcome

    when_stalled(failures.report_failure)
    if failures.is_first():
        forget_outcome(config.trainer.output_dir)
    draws = _draws(config, _world_size(config))
    with awaited("importing Megatron-Core", failures.is_first()), large_imports():
        if draws:
            from grpo_megatron.training.rollout_rank import RolloutRank
        else:
            from grpo_megatron.trainer import Trainer
    if fault := os.environ.get("GRPO_MEGATRON_FAULT"):  # `certify` proves that a run survives it, or notices it
        from grpo_megatron.trust.certify import plant

        plant(json.loads(fault))
    try:
        (RolloutRank(config, checked) if draws else Trainer(config, checked, options.profile, options.last_step)).run()
    except Stopped as stopped:
        return stopped.exit_code
    except RunOver:
        return 0
    except SystemExit as error:  # of a user's loss or estimator: exit code 0 would look like a finished run
        raise RuntimeError(f"sys.exit({error.code!r}) was called during the run; raise an exception instead") from error
    return 0


def _print_plan(given: Config, checked: Checked, world_size: int, options: RunOptions) -> None:
    """Raises ConfigError, after the plan, if the run cannot start. Then the resolved config is not written."""
    from grpo_megatron.cli.plan import PAGE_WIDTH, plan_page, readiness, write_resolved

    config = checked.config
    width = min(max(shutil.get_terminal_size((PAGE_WIDTH, 24)).columns, 80), PAGE_WIDTH)
    elsewhere = _is_elsewhere(options, given)
    page = plan_page(
        config,
        checked,
        world_size - config.num_rollout_ranks,
        options.gpu,
        host_gib=options.host_memory,
        elsewhere=elsewhere,
        width=width,
    )
    if page.problem is not None:
        print(page, flush=True)
        raise ConfigError(page.problem)
    if not (isinstance(options, PlanOptions) or elsewhere or options.gpu):  # a named GPU has a verdict of its own
        try:
            page.verdict.append(readiness(given, checked, world_size))
        except ConfigError:
            print(page, flush=True)
            raise
    shapes = {key: given.at(key) for key in ("model.path", "ref.path", "critic.path", "reward_model.path")}
    shapes = {key: path for key, path in shapes.items() if elsewhere and path and known_shape(path)}
    page.verdict[:0] = [
        f"{key}={path} is not here: its shape is that of {known_shape(path)}" for key, path in shapes.items()
    ]
    resolved = write_resolved(config.with_values(shapes), options.resolved_config)
    page.sections["Every key with its value, as a config"] = [resolved]
    print(page, flush=True)


def _print_search(config: Config, options: PlanOptions) -> int:
    """Returns the exit code. Raises ConfigError."""
    failures.quieten(is_rank=False, starts_ranks=False)
    if config.num_rollout_ranks:
        raise ConfigError(
            f"{keys_of(config).rollout.placement}: the search compares colocated layouts and splits by itself; leave it out"
        )
    with large_imports():
        from grpo_megatron.checks.models import read_models, with_hub_models
        from grpo_megatron.planning.search import search_page

    models = read_models(with_hub_models(config, weights=False, shapes=True))
    lengths = {"top": options.top, "mean_response": options.mean_response}
    print(search_page(config, models, options.world_size, options.gpu, **lengths))
    return 0
