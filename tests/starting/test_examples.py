"""A wheel holds every file that a command needs, and `examples` copies what it ships."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from grpo_megatron.cli.config_file import load_config
from grpo_megatron.config import ConfigError
from grpo_megatron.starting import quickstart
from grpo_megatron.storage import hub

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("examples/", "slurm/")
OUTSIDE = {"examples": ROOT / "examples", "slurm": ROOT / "slurm"}


def sources() -> list[str]:
    """Files that git knows or would add; without git, all that are there."""
    done = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    if done.returncode == 0:
        return [name for name in done.stdout.splitlines() if (ROOT / name).exists()]
    files = [path for path in ROOT.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return [
        path.relative_to(ROOT).as_posix() for path in files if not path.relative_to(ROOT).as_posix().startswith(".")
    ]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in a wheel that was built from a copy of the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    wanted = ("grpo_megatron/", "examples/", "slurm/", "setup.py", "pyproject.toml", "README.md", "LICENSE")
    names = [name for name in sources() if name.startswith(wanted)]
    (folder / "names").write_text("\n".join(names))
    subprocess.run(["tar", "cf", folder / "all.tar", "-T", folder / "names"], cwd=ROOT, check=True, timeout=60)
    (folder / "src").mkdir()
    subprocess.run(["tar", "xf", folder / "all.tar", "-C", folder / "src"], check=True, timeout=60)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "wheel", *options, ".", "--wheel-dir", str(folder / "out")]
    done = subprocess.run(command, cwd=folder / "src", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (built,) = (folder / "out").iterdir()
    return set(zipfile.ZipFile(built).namelist())


def test_a_wheel_has_every_file_of_the_package_and_the_examples(wheel: set[str]) -> None:
    names = sources()
    package = {name for name in names if name.startswith("grpo_megatron/")}
    assert package and package <= wheel, sorted(package - wheel)
    outside = {f"grpo_megatron/{name}" for name in names if name.startswith(SHIPPED)}
    assert {"grpo_megatron/examples/quickstart.yaml", "grpo_megatron/slurm/ranks.sh"} <= outside
    assert outside <= wheel, sorted(outside - wheel)
    assert not [name for name in wheel if name.endswith(".pyc")]


def test_examples_are_copied_and_replace_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quickstart.copy_examples(quickstart.ExamplesOptions(folder=tmp_path / "mine")) == 0
    assert "mine/slurm" in capsys.readouterr().out
    for name, folder in OUTSIDE.items():
        expected = {path.relative_to(folder) for path in folder.rglob("*") if path.suffix != ".pyc" and path.is_file()}
        copied = {path.relative_to(tmp_path / "mine" / name) for path in (tmp_path / "mine" / name).rglob("*")}
        assert expected <= copied
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is a file; name a folder$"):
        quickstart.copy_examples(quickstart.ExamplesOptions(folder=tmp_path / "file"))
    with pytest.raises(ConfigError, match="examples and .*slurm would be overwritten"):
        quickstart.copy_examples(quickstart.ExamplesOptions(folder=tmp_path / "mine"))


def test_a_checkout_uses_its_own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "PACKAGE_FOLDER", tmp_path / "grpo_megatron")
    assert quickstart.examples_folder("examples") == tmp_path / "examples"


def test_the_config_of_the_quickstart_has_its_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that `train` on it resumes the run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        quickstart, "_make_inputs", lambda seed: quickstart.QUICKSTART.mkdir(parents=True, exist_ok=True)
    )
    command, path, *overrides = quickstart.prepare_quickstart(
        quickstart.QuickstartOptions(seed=7, overrides=("rollout.n=4",))
    )
    config = load_config(Path(path), [])
    assert (command, overrides) == ("train", ["rollout.n=4"])
    assert (config.data.seed, config.rollout.seed, config.trainer.seed) == (7, 7, 7)
    short = quickstart.QuickstartOptions(seed=7, overrides=("trainer.total_training_steps=6", "trainer.save_freq=3"))
    added = [f"trainer.{key}" for key in ("test_freq=6", "total_training_steps=6", "save_freq=3")]
    assert quickstart.prepare_quickstart(short)[2:] == added  # the file's 10 would be beyond the run
    outcome = quickstart.QUICKSTART / "run/outcome.json"
    for state, seed, goes_on in (("stopped", 7, True), ("done", 7, False), ("stopped", 8, False)):
        outcome.parent.mkdir(exist_ok=True)
        (outcome.parent / "config.yaml").touch()
        outcome.write_text(json.dumps({"state": state}))
        quickstart.prepare_quickstart(quickstart.QuickstartOptions(seed=seed))
        assert outcome.exists() == goes_on, (state, seed)
