"""Record the sha256 of the files of vLLM that this program uses, from its wheel for CUDA, into recorded.json.

    python -m tests.contract.record WHEEL ...

`pip download --no-deps vllm==0.32.0` gets a wheel. Run it for a new version, or for further files (`--files NAME ...` of one).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import zipfile
from pathlib import Path

RECORDED = Path(__file__).with_name("recorded.json")


def main() -> None:
    parser = argparse.ArgumentParser("record")
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--files", nargs="*", default=[])
    args = parser.parse_args()
    recorded = json.loads(RECORDED.read_text())
    wanted = {name for files in recorded.values() for name in files} | set(args.files)
    for path in args.wheels:
        with zipfile.ZipFile(path) as wheel:
            names = sorted(wanted & set(wheel.namelist()))
            recorded[path.name.split("-")[1]] = {name: hashlib.sha256(wheel.read(name)).hexdigest() for name in names}
    RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
