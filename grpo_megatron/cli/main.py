"""The command line, and how a run starts and ends: `python -m grpo_megatron train CONFIG [section.key=value ...]`.

One process started by hand checks the config and starts a rank for each device of the machine, through torchrun's own
agent (ranks.py); a world of one stays in that process, so that a debugger works. Under torchrun (RANK is set) it is a
rank.

What ends a run is said once. Every rank that fails tries to be the first to say so, a file in torchrun's folder being
the token; the others are silent. A rank that fails because another one has died is ended by torchrun before it speaks.

Exit codes: 0; 2 for a mistake in the config, before anything was started; 1 for a failure later on; 75 when the run was
asked to stop (see stopping.py) and can be started again; 128 + signal.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from grpo_megatron.cli import ranks
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.importing import large_imports

if TYPE_CHECKING:
    from grpo_megatron.checks.validate import Checked

SETTLE_S = 2.0  # many of torchrun's looks at its processes, 0.1 s apart: the machine may be busy
SELF_EXPLAINING = {  # module -> exception, shown without a traceback
    "grpo_megatron.config": "ConfigError",
    "grpo_megatron.parallel.mesh": "RankError",
    "grpo_megatron.models.architecture": "UnsupportedModel",
    "grpo_megatron.models.policy": "TooManySkippedSteps",
    "grpo_megatron.models.weights": "WeightsError",
}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code. In a rank of several, a failure ends the process at once."""
    argv = sys.argv[1:] if argv is None else argv
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: ranks share the cores
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # vLLM's NUMA remark, a line a rank
    if argv[:1] == ["convert"]:
        from grpo_megatron.convert.cli import main as convert

        return convert(argv[1:])
    args = None if argv[:1] == ["evaluate"] else _parse(argv)
    try:
        code = _evaluate(argv) if args is None else _train(args, argv)
        if code == 0:
            return 0
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
        if os.environ.get("RANK", "0") == "0" and ranks.LAUNCHER_PID not in os.environ:
            print("interrupted", file=sys.stderr)
    except Exception as error:
        code = _fail(error)
    if _is_one_of_several():
        _leave(code)
    return code


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("grpo-megatron", description="GRPO training of language models on Megatron-Core.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("convert", help="Hugging Face <-> Megatron-Core checkpoints", add_help=False)
    commands.add_parser("evaluate", help="scores on GSM8K, MATH and others, graded and reported", add_help=False)
    train = commands.add_parser(
        "train",
        help="train as a YAML file says",
        epilog="GRPO_DEBUG=1 shows the traceback of every error, and the warnings of Megatron-Core and torch.",
    )
    train.add_argument("config", type=Path, metavar="CONFIG", help="YAML file with sections model, data, actor, ...")
    train.add_argument("overrides", nargs="*", metavar="section.key=value", help="replaces a value of the file")
    train.add_argument("--dry-run", action="store_true", help="check everything, print the plan, start nothing")
    train.add_argument(
        "--world-size", type=int, metavar="N", help="plan for N ranks on other machines (with --dry-run)"
    )
    args, rest = parser.parse_known_args(argv)
    for argument in rest:  # overrides that came after an option
        if argument.startswith("-"):
            train.error(f"unknown option {argument}")
        args.overrides.append(argument)
    if args.world_size is not None and (not args.dry_run or args.world_size < 1):
        train.error("--world-size N needs --dry-run and N >= 1; a run has trainer.nnodes x n_gpus_per_node ranks")
    return args


def _train(args: argparse.Namespace, argv: list[str]) -> int:
    config = load_config(args.config, args.overrides)
    is_rank = "RANK" in os.environ
    world_size = args.world_size or _world_size(config, is_rank)
    starts_ranks = not is_rank and not args.dry_run and world_size > 1
    _quieten(is_rank, starts_ranks)
    if starts_ranks and ranks.is_on_cpu(config.trainer.device):
        ranks.start_fork_server()
    with large_imports():  # torch among them: after the file is known to be well-formed
        from grpo_megatron.checks.validate import validate

    checked = validate(config, world_size, dry_run=args.dry_run, elsewhere=args.world_size is not None)
    if args.dry_run:
        if os.environ.get("RANK", "0") == "0":
            from grpo_megatron.checks.dry_run import describe_run

            print(describe_run(config, checked, world_size))
        return 0
    if starts_ranks and config.trainer.nnodes > 1:
        raise ConfigError(_many_nodes(config, argv))
    if starts_ranks:
        del checked  # the ranks read their own
        return ranks.start_ranks(main, world_size, argv, config.trainer.device)
    return _run(config, checked)


def _run(config: Config, checked: Checked) -> int:
    """Be this rank until the run is over; returns the exit code."""
    from grpo_megatron.training.stopping import EXIT_STOPPED, Stopped, listen

    ranks.die_with_launcher()
    listen(config.trainer.output_dir, is_first_rank=os.environ.get("RANK", "0") == "0")
    with large_imports():
        from grpo_megatron.trainer import Trainer

    try:
        Trainer(config, checked).run()
    except Stopped:
        return EXIT_STOPPED
    return 0


def _evaluate(argv: list[str]) -> int:
    """`evaluate ...`: its own command line, with this one's ranks and failures."""
    is_rank = "RANK" in os.environ
    _quieten(is_rank, starts_ranks=False)
    if is_rank:
        ranks.die_with_launcher()
    from grpo_megatron.evaluation.cli import main as evaluate

    start_ranks = functools.partial(ranks.start_ranks, main)
    return evaluate(argv[1:], start_ranks, is_child=ranks.LAUNCHER_PID in os.environ)


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
        f" \\\n      -m grpo_megatron {' '.join(argv)}\n"
        f"  (Slurm: srun --nodes {nodes} --ntasks-per-node 1 in front of it), or set trainer.nnodes=1"
    )


def _quieten(is_rank: bool, starts_ranks: bool) -> None:
    """Rank 0 alone shows warnings; the process that starts ranks leaves them to it."""
    speaks = not starts_ranks and (not is_rank or os.environ["RANK"] == "0")
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING if speaks else logging.ERROR)
    if not _debugs():
        warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed\.")  # nobody here can act on them
        warnings.filterwarnings("ignore", message=".*deprecating ShardedTensor")  # Megatron-Core's checkpoints use it


# -- failing -----------------------------------------------------------------------------------------------------------


def _fail(error: Exception) -> int:
    """Say what went wrong, once over all ranks of this machine; returns the exit code."""
    is_expected = _explains_itself(error)
    code = 2 if isinstance(error, ConfigError) else 1
    if _is_one_of_several() and not is_expected:
        time.sleep(SETTLE_S)  # if another rank has died, torchrun ends this one now, and the symptom hides no cause
    message = str(error) if is_expected else f"{type(error).__name__}: {error}"
    _write_error_file(message, unexpected=not is_expected)
    if not _speaks_first(is_same_everywhere=code == 2):
        time.sleep(SETTLE_S)  # let the one that does finish its line before torchrun notices this one
        return code
    if not is_expected or _debugs():
        traceback.print_exception(error)
    if is_expected:
        lines = [line if line.startswith(" ") else f"error: {line}" for line in message.splitlines()]
        print("\n".join(lines), file=sys.stderr, flush=True)
    return code


def _explains_itself(error: Exception) -> bool:
    """Whether the message alone tells what to do. What was never imported was not raised, and is not imported now."""
    raised = [getattr(sys.modules[module], name) for module, name in SELF_EXPLAINING.items() if module in sys.modules]
    return isinstance(error, tuple(raised))


def _debugs() -> bool:
    return os.environ.get("GRPO_DEBUG", "0") not in ("", "0")


def _is_one_of_several() -> bool:
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def _speaks_first(is_same_everywhere: bool) -> bool:
    """Whether this rank is the first of its machine to fail. Without torchrun, only what all ranks find is once."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None or not _is_one_of_several():
        return os.environ.get("RANK", "0") == "0" or not is_same_everywhere
    with contextlib.suppress(OSError):
        os.close(os.open(Path(file).parent.parent / "first_failure", os.O_CREAT | os.O_EXCL))
        return True
    return False


def _write_error_file(message: str, unexpected: bool) -> None:
    """Where torchrun looks for the reason: one that we have not started repeats it in its own last words."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is not None:
        content = {
            "message": {"message": message, "extraInfo": {"timestamp": int(time.time()), "unexpected": unexpected}}
        }
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps(content))


def _leave(code: int) -> NoReturn:
    """Without the interpreter's goodbyes: threads of the engine and half-dead process groups can hold it for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
