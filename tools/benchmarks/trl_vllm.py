"""TRL's vLLM mode on the CPU, for `tools.benchmarks step --trl-vllm`: its environment, and what is set from outside.

TRL is not changed. It writes new weights into vLLM's parameters, one by one, with `load_weights`. After loading, vLLM on CPU
packs its linear layers and empties their parameters, so that the first `load_weights` would fail. `prepare` takes the packed
products away from vLLM: its layers then multiply by their parameters, as transformers' layers do.

Imports nothing of this project: TRL's processes import it, too.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

PACKAGES = ("trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0")


def trl_vllm_python(folder: Path) -> Path:
    """The interpreter of TRL's environment with vLLM, which is made at the first call.

    It sees the packages of this project's environment (vLLM, torch, transformers), and adds TRL.
    """
    done = folder / "installed"
    if not done.exists() or done.read_text() != " ".join(PACKAGES):
        print(f"installing {', '.join(PACKAGES)} into {folder}, beside vLLM of {sys.prefix}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        own = folder / "lib" / version / "site-packages" / "packages_of_grpo_megatron.pth"
        own.write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        done.write_text(" ".join(PACKAGES))
    return folder / "bin" / "python"


def settings(max_model_len: int, share_of_memory: float) -> dict[str, Any]:
    """Settings of GRPOConfig, besides those of `step_trl.py`."""
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": max_model_len,
        "vllm_gpu_memory_utilization": share_of_memory,
        # The correction needs a pass for old log-probabilities. Without it TRL takes those of the update, as without vLLM.
        "vllm_importance_sampling_correction": False,
    }


def prepare() -> None:
    """Set what TRL passes no argument for. Call it before `import trl`, which takes `LLM` from vLLM by name."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in TRL's process
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # both processes would be bound to the same core
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    import vllm
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False
    # `auto` would be bfloat16 for a model in float32. Compiled, the first steps take minutes.
    vllm.LLM = functools.partial(vllm.LLM, dtype="float32", enforce_eager=True)
