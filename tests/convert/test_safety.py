"""After a kill at any moment or on a full disk, a folder with the final name is complete, and the next run works.

Memory is bounded. Children are forked, so that they start at once and inherit the patch that kills them.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_megatron.convert import conversion, megatron
from grpo_megatron.convert.output import HashedFiles
from grpo_megatron.convert.source import HFFolder, safetensors_header
from grpo_megatron.models.families import architecture_of, hf_shapes
from grpo_megatron.storage import files
from grpo_megatron.storage.files import Verification
from tests.convert import folders
from tests.convert.folders import convert, same_bits, tensors_of

ROOT = Path(__file__).resolve().parents[2]


def in_child(action: Callable[[], Any]) -> int:
    """The exit status of `action` in a forked child; negative: the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(int(action()))
        except BaseException:  # noqa: BLE001 - a child of pytest must not return to it
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die(*args: Any, **kwargs: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(count: int, original: Callable[..., Any]) -> Callable[..., Any]:
    calls = [0]

    def function(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return die() if calls[0] == count else original(*args, **kwargs)

    return function


MOMENTS: dict[str, tuple[Any, str, int]] = {  # when the child is killed: (object, attribute, number of the call)
    "first tensor": (HFFolder, "read", 1),
    "a later tensor": (HFFolder, "read", 30),
    "before the table of contents": (megatron.FileSystemWriter, "finish", 1),
    "before the manifest": (conversion, "write_manifest", 1),
    "before the rename": (files, "publish_folder", 1),
    "after the rename": (files, "sync_path", 12),
}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.write(tmp_path_factory.mktemp("safety") / "hf", folders.config_of("qwen3"))


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_while_writing_megatron(moment: str, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    owner, name, count = MOMENTS[moment]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, die_at(count, getattr(owner, name)))
        assert in_child(lambda: convert("to-megatron", hf, out, "--quiet")) == -signal.SIGKILL
    assert out.exists() == (moment == "after the rename")
    complete_or_absent(out)
    assert convert("inspect", tmp_path / ".out.partial", "--hashes") == 2 or moment == "after the rename"
    assert convert("to-megatron", hf, out, "--force", "--quiet") == 0
    assert os.listdir(tmp_path) == ["out"]
    assert convert("verify", hf, out, "--quiet") == 0


@pytest.mark.parametrize("count", [1, 2, 20])
def test_killed_while_writing_hf(count: int, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert convert("to-megatron", hf, tmp_path / "megatron", "--quiet") == 0
    out = tmp_path / "back"
    with monkeypatch.context() as patch:
        patch.setattr(HashedFiles, "write", die_at(count, HashedFiles.write))
        assert in_child(lambda: convert("to-hf", tmp_path / "megatron", out, "--quiet")) == -signal.SIGKILL
    assert not out.exists()
    assert convert("to-hf", tmp_path / "megatron", out, "--quiet") == 0
    same_bits(tensors_of(hf), tensors_of(out))


def test_killed_while_replacing(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --force the old folder stays until the new one is complete. Between the two renames, no folder has its name."""
    out = tmp_path / "out"
    assert convert("to-megatron", hf, out, "--quiet") == 0
    for count in (1, 2, 3):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", die_at(count, Path.rename))
            in_child(lambda: convert("to-megatron", hf, out, "--force", "--quiet", "--dtype", "bfloat16"))
        complete_or_absent(out)
    assert convert("to-megatron", hf, out, "--force", "--quiet") == 0
    assert os.listdir(tmp_path) == ["out"]


def complete_or_absent(out: Path) -> None:
    if out.exists():
        assert Verification(out).finish()


def limited(size: int, *arguments: Any) -> int:
    def action() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        return convert(*arguments)

    return in_child(action)


@pytest.mark.parametrize("size", [5_000, 1_000_000, 2_370_000])
def test_no_space_left(size: int, hf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A write that the system refuses: one line, exit code 2, nothing left. A limit on file sizes stands for a full disk."""
    assert limited(size, "to-megatron", hf, tmp_path / "out", "--quiet") == 2
    assert convert("to-megatron", hf, tmp_path / "megatron", "--quiet") == 0
    assert limited(size, "to-hf", tmp_path / "megatron", tmp_path / "out", "--quiet") == 2
    errors = capfd.readouterr().err.splitlines()
    assert len(errors) == 2 and all(
        line.startswith("error: cannot write") and "File too large" in line for line in errors
    ), errors
    assert os.listdir(tmp_path) == ["megatron"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 2 MiB. The model has 2.4 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"mounting a file system is not permitted here: {made.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_full_disk(
    hf: Path, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real file system, in both directions. It fills up during the write: its free space had seemed sufficient."""
    assert convert("to-megatron", hf, tmp_path / "megatron", "--quiet") == 0
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 40)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    for command, source in (("to-megatron", hf), ("to-hf", tmp_path / "megatron")):
        capsys.readouterr()
        assert convert(command, source, small_disk / "out", "--quiet") == 2
        errors = capsys.readouterr().err.splitlines()
        assert len(errors) == 1 and "No space left on device" in errors[0] and "needed" in errors[0], errors
        assert not os.listdir(small_disk)


def test_a_disk_that_is_too_small_is_noticed_first(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert convert("to-megatron", hf, tmp_path / "out") == 2
    assert "needs 66.3 MiB, its disk has 1000 B free" in capsys.readouterr().err
    assert not os.listdir(tmp_path)


# -- memory ------------------------------------------------------------------------------------------------------------

BIG = {"num_hidden_layers": 4, "hidden_size": 4096, "intermediate_size": 5504, "num_attention_heads": 32,
       "num_key_value_heads": 8, "vocab_size": 16001}  # fmt: skip
MEASURE = """
import re, sys
from pathlib import Path
from grpo_megatron.cli.main import main
command, tiny, tiny_out, source, out = sys.argv[1:]
# of this process alone: getrusage also counts the one that has forked it
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
assert main(["convert", command, tiny, tiny_out, "--quiet"]) == 0  # it allocates what the libraries allocate once
before = peak()
assert main(["convert", command, source, out, "--quiet"]) == 0
print(peak() - before)
"""


def sparse(path: Path, config: dict[str, Any]) -> int:
    """A folder whose only safetensors file is sparse (all holes). Returns the file's size."""
    shapes = hf_shapes(architecture_of(config))
    start = safetensors_header(shapes, dict.fromkeys(shapes, torch.bfloat16))
    size = len(start) + sum(torch.Size(shape).numel() for shape in shapes.values()) * 2
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(start)
    os.truncate(path / "model.safetensors", size)
    return size


@pytest.mark.soak
def test_memory_is_bounded(hf: Path, tmp_path: Path) -> None:
    """1.1 GB of bfloat16. The largest tensor is the embedding, 16001 x 4096 x 2 = 131 MB (gate and up together: 90 MB).

    Peak resident memory without that of the libraries: at most the largest tensor plus 64 MB (chunks of 8 MB: as stored,
    cast, being hashed), a fifth of the model. The pages of a mapped file count too, once a tensor is read from them.
    (The holes of this file may be mapped as one page of zeros.)
    """
    size = sparse(tmp_path / "big", folders.config_of("llama2", **BIG))
    bound = 16001 * 4096 * 2 + 64 * (1 << 20)
    assert size > 5 * bound
    steps = ("to-megatron", hf, "tiny", "big", "megatron"), ("to-hf", "tiny", "tiny-back", "megatron", "back")
    for command, *names in steps:
        arguments = [command, *(str(tmp_path / name) for name in names)]
        done = subprocess.run([sys.executable, "-c", MEASURE, *arguments], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        print(f"{command}: model {size:,}, bound {bound:,}, peak above the libraries {int(done.stdout):,}")
        assert int(done.stdout) < bound
    for name in ("big", "megatron", "back"):
        shutil.rmtree(tmp_path / name)
