"""`quickstart` makes data and a model, and returns the run that trains it. `examples` copies the shipped files.

The quickstart writes into outputs/quickstart of the current folder: data/, model/, the config quickstart.yaml, and run/, the
run. Data and model are made again only for another seed. A run that was stopped goes on; any other begins anew.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Annotated

from grpo_megatron.config import ConfigError
from grpo_megatron.config.options import Argument, Option, Options
from grpo_megatron.starting.prepare import ArithmeticOptions, ModelOptions, prepare_inputs
from grpo_megatron.storage.files import new_folder
from grpo_megatron.storage.hub import examples_folder
from grpo_megatron.untrusted import read_json

# -- the examples and Slurm scripts that come with the package ---------------------------------------------------------

FOLDERS = ("examples", "slurm")


class ExamplesOptions(Options):
    """The options of `examples`."""

    program = "examples"
    description = "Copy examples/ and slurm/ into DIR. Their paths begin there: start runs and jobs from DIR."
    folder: Annotated[Path, Argument("default: the current folder", "DIR")] = Path()


def copy_examples(options: ExamplesOptions) -> int:
    """Copy the folders; returns the exit code. Raises ConfigError if one of them exists."""
    folder = options.folder
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; name a folder")
    existing = [str(folder / name) for name in FOLDERS if (folder / name).exists()]
    if existing:
        raise ConfigError(f"{' and '.join(existing)} would be overwritten; name another folder")
    for name in FOLDERS:
        with new_folder((folder / name).absolute()) as new:
            shutil.copytree(
                examples_folder(name), new, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        print(f"wrote {folder / name}")
    return 0


# -- quickstart --------------------------------------------------------------------------------------------------------

QUICKSTART = Path("outputs/quickstart")
OWN_FILES = ("config.yaml", "metrics.jsonl")  # of an earlier run, which may be removed


class QuickstartOptions(Options):
    """The options of `quickstart`."""

    program = "quickstart"
    description = (
        "Train a tiny model from random weights on this CPU: two ranks, one to two minutes, in outputs/quickstart."
    )
    overrides: Annotated[tuple[str, ...], Argument("replace a value of the config", "section.key=value")] = ()
    seed: Annotated[int, Option("another sample of everything (default 0)", "N", ge=0, le=999_999_999)] = 0


def prepare_quickstart(options: QuickstartOptions) -> list[str]:
    """Prepare the inputs. Returns the arguments of the command line that trains with them. Raises ConfigError."""
    config, run = QUICKSTART / "quickstart.yaml", QUICKSTART / "run"
    text = _with_seeds((examples_folder("examples") / "quickstart.yaml").read_text(), options.seed)
    if not (config.is_file() and config.read_text() == text and _is_stopped(run)):
        _make_inputs(options.seed)
        _remove_run(run)
        config.write_text(text)
        print("the warm-up teaches worked answers, then also bare ones, most of them wrong: its loss rises at the end")
    given, fitting = dict(override.partition("=")[::2] for override in options.overrides), {}
    if (steps := given.get("trainer.total_training_steps", "")) in map(
        str, range(1, 15)
    ):  # the file's intervals are longer
        fitting = {"trainer.test_freq": min(10, int(steps)), "trainer.save_freq": int(steps)}
    return ["train", str(config), *(f"{k}={v}" for k, v in fitting.items() if k not in given), *options.overrides]


def _with_seeds(example: str, seed: int) -> str:
    """Writes the seeds into the config, so that `train` on it resumes the run."""
    for section in ("data", "rollout", "trainer"):
        example, count = re.subn(rf"(?m)^{section}:.*\n", rf"\g<0>  seed: {seed}\n", example)
        assert count == 1, f"the example has no section {section}"
    return example


def _is_stopped(run: Path) -> bool:
    """Says if the run was stopped and can go on, as its last line has promised."""
    try:
        return bool(read_json(run / "outcome.json")["state"] == "stopped")
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _make_inputs(seed: int) -> None:
    made = QUICKSTART / f"seed-{seed}"
    if made.exists():
        return
    for path in QUICKSTART.glob("seed-*"):
        path.unlink()
    data, model = QUICKSTART / "data", QUICKSTART / "model"
    prepare_inputs(ArithmeticOptions(out=data, seed=seed, force=True))
    prepare_inputs(ModelOptions(out=model, preset="quickstart", tokenizer=data / "tokenizer", seed=seed, force=True))
    made.touch()


def _remove_run(run: Path) -> None:
    """Removes the run: a finished one has nothing left to do. No other folder is removed."""
    if not run.exists():
        return
    if any(run.iterdir()) and not any((run / name).exists() for name in OWN_FILES):
        raise ConfigError(f"{run} is not the folder of a run; move it away")
    shutil.rmtree(run)
