"""An unusable Transformer Engine must not end `import megatron`. The installations are fakes, on a path of their own.

Each is imported by a process of its own, forked from one that has imported torch. One of them imports Megatron-Core,
by the same statements as ever.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from grpo_megatron import imports, transformer_engine

ROOT = Path(__file__).resolve().parents[1]
# As upstream's: the package itself only warns if its torch part is missing; Megatron-Core then imports that part.
WITHOUT_TORCH_PART = "import warnings\nwarnings.warn('no shared object', RuntimeWarning)\n"
MISMATCH = "AssertionError: Transformer Engine package version mismatch. Found transformer_engine_torch v2.9.0"
LIBRARY = "import ctypes, pathlib\nctypes.CDLL(str(pathlib.Path(__file__).with_name('libbroken.so')))\n"
# name -> (version, transformer_engine/__init__.py, transformer_engine/pytorch/__init__.py, why it is unusable)
FAKES = {
    "torch part missing": (
        "2.11.0",
        WITHOUT_TORCH_PART,
        "raise FileNotFoundError('Could not find shared object file for Transformer Engine torch lib.')",
        "2.11.0 is installed, but its import raises FileNotFoundError: Could not find shared object file for Transformer"
        " Engine torch lib.",
    ),
    "parts of different versions": (
        "2.11.0",
        f"raise AssertionError({MISMATCH.partition(': ')[2]!r})",
        "",
        f"2.11.0 is installed, but its import raises {MISMATCH}",
    ),
    "library that does not load": ("2.11.0", LIBRARY, "", "2.11.0 is installed, but its import raises OSError: "),
    "newer than Megatron-Core's range": ("2.20.2", "raise SystemExit('imported')", "", "2.20.2 is installed"),
    "older than Megatron-Core's range": ("2.8", "raise SystemExit('imported')", "", "2.8 is installed"),
    "usable": ("2.9.0+cu130", "", "", None),
}
CHILD = """
    import json, os, sys, traceback, warnings
    import torch
    warnings.simplefilter("ignore")

    def child(folder, pipe):
        import grpo_megatron
        from grpo_megatron.transformer_engine import examine_transformer_engine
        sys.path.insert(0, folder)
        if folder.endswith("torch part missing"):
            from megatron.core import fp8_utils  # calls the finder; without it: FileNotFoundError
            assert not fp8_utils.HAVE_TE
        else:  # the same without Megatron-Core, whose import takes seconds
            examine_transformer_engine()
        try:
            import transformer_engine.pytorch
            can_import = True
        except ImportError:  # all that Megatron-Core handles
            can_import = False
        return examine_transformer_engine(), can_import

    children = []
    for folder in sys.argv[1:]:
        read, write = os.pipe()
        if os.fork() == 0:
            try:
                answer = child(folder, write)
            except BaseException as error:
                answer = f"{type(error).__name__}: {error}"
            os.write(write, json.dumps(answer).encode())
            os._exit(0)
        os.close(write)
        children.append(open(read))
    print(json.dumps([json.loads(pipe.read()) for pipe in children]))
"""


def make_fake(folder: Path, version: str, package: str, torch_part: str) -> Path:
    engine = folder / "transformer_engine"
    (engine / "pytorch").mkdir(parents=True)
    (engine / "__init__.py").write_text(package)
    (engine / "libbroken.so").write_text("not a library")
    (engine / "pytorch" / "__init__.py").write_text(torch_part)
    (folder / f"transformer_engine-{version}.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: transformer_engine\nVersion: {version}\n"
    (folder / f"transformer_engine-{version}.dist-info" / "METADATA").write_text(metadata)
    return folder


@pytest.mark.slow
def test_an_unusable_engine_is_hidden_from_megatron(tmp_path: Path) -> None:
    folders = [make_fake(tmp_path / name, *fake[:3]) for name, fake in FAKES.items()]
    script = tmp_path / "import_each.py"
    script.write_text(textwrap.dedent(CHILD))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, *folders], env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    for name, answer in zip(FAKES, json.loads(done.stdout), strict=True):
        reason = FAKES[name][3]
        if reason is None:
            assert answer == [[[2, 9], None], True], name
            continue
        assert not isinstance(answer, str), answer
        (version, problem), can_import = answer
        assert version is None and not can_import, name
        assert problem.startswith(reason), name
        assert "\n" not in problem


@pytest.mark.parametrize(
    ("text", "version"), [("2.20.2+abc", (2, 20)), ("13.0", (13, 0)), ("2.9.0.dev0+5fdd7bb", (2, 9)), ("none", ())]
)
def test_a_version_is_its_first_two_numbers(text: str, version: transformer_engine.Version) -> None:
    assert transformer_engine.parse_version(text) == version


def test_attributes_are_replaced_and_put_back_as_they_were() -> None:
    class Base:
        own, inherited = 1, 2

    class Owner(Base):
        own = staticmethod(len)  # type: ignore[assignment]

    with pytest.raises(ZeroDivisionError), imports.replaced(Owner, own=3, inherited=4):
        assert (Owner.own, Owner.inherited) == (3, 4)
        raise ZeroDivisionError
    assert isinstance(vars(Owner)["own"], staticmethod) and "inherited" not in vars(Owner)
    with pytest.raises(AttributeError, match="absent"), imports.replaced(Owner, absent=1):
        pass
