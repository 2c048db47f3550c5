"""device.py: freed memory is used again without page faults, unless the user has set the limits."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# 40 MiB: above the 32 MiB up to which glibc learns by itself what to keep. Kept, the ten blocks are one: a tenth of the faults.
SCRIPT = """
import resource
from grpo_megatron.device import keep_freed_memory

def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        bytearray(40 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = page_faults()
is_kept = keep_freed_memory()
print(is_kept, 3 * page_faults() < before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
@pytest.mark.parametrize(
    ("variables", "expected"), [({}, "True True"), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, "False False")]
)
def test_freed_memory_is_used_again(variables: dict[str, str], expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment | variables, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected
