"""Records facts of packages that cannot be imported here, into recorded.json.

    python -m tests.contract.record WHEEL              # vLLM's for CUDA, of the installed series
    python -m tests.contract.record transformer_engine # on a machine that has it

Of vLLM the hashes of the files behind our uses, since its files for the CPU are checked; of Transformer Engine the uses.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import json
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

from tests.contract.installed import problem
from tests.contract.table import MEGATRON_USES_TE
from tests.contract.uses import Uses, collect

RECORDED = Path(__file__).with_name("recorded.json")
OURS = Path(__file__).parents[2] / "grpo_megatron"


@functools.cache
def all_uses() -> dict[str, set[str]]:
    """Ours, and those of Transformer Engine in the files of Megatron-Core that we use it through."""
    uses, spec = collect(OURS), find_spec("megatron.core")
    assert spec is not None and spec.submodule_search_locations is not None
    for name in MEGATRON_USES_TE:
        tree = ast.parse((Path(spec.submodule_search_locations[0]) / name).read_text(encoding="utf-8"))
        for use, line in Uses(name, tree, ("transformer_engine",)).found:
            if package_of(use) == "transformer_engine":
                uses.setdefault(use, set()).add(f"megatron/core/{name}:{line}")
    return uses


def uses_of(package: str) -> list[str]:
    return sorted(use for use in all_uses() if package_of(use) == package)


def package_of(use: str) -> str:
    return use.split(" ")[1].split(":")[0].split(".")[0]


def main(source: str) -> None:
    files: dict[str, str] = {}
    if source.endswith(".whl"):
        for use in uses_of("vllm"):
            problem(use, files)
        with zipfile.ZipFile(source) as wheel:
            names = sorted(files.keys() & set(wheel.namelist()))
            key, entry = f"vllm {Path(source).name.split('-')[1].partition('+')[0]}", {}
            entry["files"] = {name: hashlib.sha256(wheel.read(name)).hexdigest() for name in names}
    else:
        key = f"{source} {importlib.metadata.version(source)}"
        entry = {"uses": [use for use in uses_of(source) if problem(use) is None]}
    RECORDED.write_text(json.dumps(json.loads(RECORDED.read_text()) | {key: entry}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
