"""The examples and Slurm scripts that come with the package, and `grpo-megatron examples [DIR]`, which copies them.

In a checkout, grpo_megatron/shipped/ has links to the folders of the root. A wheel has copies of the files.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from grpo_megatron.config import ConfigError
from grpo_megatron.storage.atomic import new_folder

PACKAGE = Path(__file__).resolve().parents[1]
FOLDERS = ("examples", "slurm")


def shipped_folder(name: str) -> Path:
    """One of FOLDERS. A copy of the sources that has lost its links has the folder beside the package."""
    own = PACKAGE / "shipped" / name
    return own if own.is_dir() else PACKAGE.parent / name


def main(argv: list[str]) -> int:
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
