"""Record which uses a package satisfies that cannot be installed here, into recorded.json, with version and file hashes.

    python -m tests.contract.record WHEEL_OR_FOLDER ...

`pip download --no-deps vllm==0.26.0 vllm...` gets the wheels (one call for each version). Run it again after a change that
uses more of vLLM or of Transformer Engine, with the wheels of vllm 0.26.0, vllm 0.32.0 and transformer-engine 2.11.0.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from tests.contract.sources import Package, problem
from tests.contract.table import MEGATRON_USES_TE
from tests.contract.uses import Uses, collect

RECORDED = Path(__file__).with_name("recorded.json")
OURS = Path(__file__).parents[2] / "grpo_megatron"


@functools.cache
def installed(package: str) -> Package | None:
    """The folder that the package is installed in. Nothing is imported."""
    spec = find_spec(package)
    places = spec.submodule_search_locations if spec is not None else None
    return Package(Path(next(iter(places))).parent) if places else None


@functools.cache
def all_uses() -> dict[str, set[str]]:
    """Ours, and those of Transformer Engine in the files of Megatron-Core that we use it through."""
    found = collect(OURS)
    megatron = installed("megatron")
    assert megatron is not None
    for name in MEGATRON_USES_TE:
        tree = megatron.tree(megatron.folder / "megatron/core" / name)
        for use, line in Uses(name, tree, ("transformer_engine",)).found:
            if package_of(use) == "transformer_engine":
                found.setdefault(use, set()).add(f"megatron/core/{name}:{line}")
    return found


def package_of(use: str) -> str:
    return use.split(" ")[1].split(":")[0].split(".")[0]


def record(folder: Path) -> tuple[str, dict[str, object]]:
    """("package version", which uses it satisfies and the sha256 of every file that was read for it)."""
    about = next(p for name in ("vllm", "transformer_engine") for p in folder.glob(f"{name}-*.dist-info/METADATA"))
    fields = dict(line.split(": ", 1) for line in about.read_text(encoding="utf-8").splitlines()[:5] if ": " in line)
    name = fields["Name"].replace("-", "_")
    package = Package(folder)
    uses = sorted(use for use in all_uses() if package_of(use) == name and problem(package, use) is None)
    return f"{name} {fields['Version']}", {"uses": uses, "files": dict(sorted(package.read.items()))}


def main(sources: list[str]) -> None:
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    for source in map(Path, sources):
        with tempfile.TemporaryDirectory() as temporary:
            folder = source
            if source.is_file():
                folder = Path(temporary)
                with zipfile.ZipFile(source) as wheel:
                    wheel.extractall(folder, [n for n in wheel.namelist() if n.endswith((".py", "METADATA"))])
            key, entry = record(folder)
            recorded[key] = entry
            print(f"{key}: {len(entry['uses'])} uses, {len(entry['files'])} files")  # type: ignore[arg-type]
    RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
