"""`grpo-megatron quickstart [--seed N] [section.key=value ...]`: makes data and a model, and returns the run that trains it.

It writes into outputs/quickstart of the current folder: data/, model/, the config quickstart.yaml, and run/, the run. Data and
model are made again only for another seed.
"""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

from grpo_megatron.config import ConfigError
from grpo_megatron.starting import prepare
from grpo_megatron.storage.atomic import new_folder

# -- The examples and Slurm scripts that come with the package, and `grpo-megatron examples [DIR]`, which copies them --
# In a checkout, grpo_megatron/shipped/ has links to the folders of the root. A wheel has copies of the files.

PACKAGE = Path(__file__).resolve().parents[1]
FOLDERS = ("examples", "slurm")


def shipped_folder(name: str) -> Path:
    """One of FOLDERS. A copy of the sources that has lost its links has the folder beside the package."""
    own = PACKAGE / "shipped" / name
    return own if own.is_dir() else PACKAGE.parent / name


def copy_examples(argv: list[str]) -> int:
    """Copies the folders. Raises ConfigError if one of them exists."""
    parser = argparse.ArgumentParser(
        "grpo-megatron examples",
        description="Copy examples/ and slurm/ into DIR. Their paths begin there: start runs and jobs from DIR.",
    )
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path(), metavar="DIR", help="default: the current folder"
    )
    folder = parser.parse_args(argv).folder
    existing = [str(folder / name) for name in FOLDERS if (folder / name).exists()]
    if existing:
        raise ConfigError(f"{' and '.join(existing)} would be overwritten; name another folder")
    for name in FOLDERS:
        with new_folder((folder / name).absolute()) as new:
            shutil.copytree(shipped_folder(name), new, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        print(f"wrote {folder / name}")
    return 0


QUICKSTART = Path("outputs/quickstart")
OWN_FILES = ("config.yaml", "metrics.jsonl")  # of an earlier run, which may be removed


def quickstart_arguments(argv: list[str]) -> list[str]:
    """Prepare the inputs. Returns the arguments of the command line that trains with them. Raises ConfigError."""
    parser = argparse.ArgumentParser(
        "grpo-megatron quickstart",
        description="Train a tiny model from random weights on this CPU: two ranks, one to two minutes, in outputs/quickstart.",
    )
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="another draw of everything (default 0)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replace a value of the config")
    args = parser.parse_args(argv)
    _make_inputs(args.seed)
    _remove_run(QUICKSTART / "run")
    config = QUICKSTART / "quickstart.yaml"
    config.write_text(_with_seeds((shipped_folder("examples") / "quickstart.yaml").read_text(), args.seed))
    return ["train", str(config), *args.overrides]


def _with_seeds(example: str, seed: int) -> str:
    """The config with the seeds in it, so that `train` on it resumes the run."""
    for section in ("data", "rollout", "trainer"):
        example, count = re.subn(rf"(?m)^{section}:.*\n", rf"\g<0>  seed: {seed}\n", example)
        assert count == 1, f"the example has no section {section}"
    return example


def _seed(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at most nine digits")
    return int(text)


def _make_inputs(seed: int) -> None:
    made = QUICKSTART / f"seed-{seed}"
    if made.exists():
        return
    for path in QUICKSTART.glob("seed-*"):
        path.unlink()
    data, model = str(QUICKSTART / "data"), str(QUICKSTART / "model")
    common = ["--seed", str(seed), "--force"]
    tokenizer = ["--tokenizer", f"{data}/tokenizer", "--std", "0.05"]
    for arguments in (["arithmetic", data, *common], ["model", "--preset", "quickstart", model, *tokenizer, *common]):
        if prepare.main(arguments):
            raise ConfigError(f"the quickstart could not write {arguments[-len(common) - 1]}; the reason is above")
    made.touch()


def _remove_run(run: Path) -> None:
    """A finished run has nothing left to do, so each quickstart starts a new one. No other folder is removed."""
    if not run.exists():
        return
    if any(run.iterdir()) and not any((run / name).exists() for name in OWN_FILES):
        raise ConfigError(f"{run} is not the folder of a run; move it away")
    shutil.rmtree(run)
