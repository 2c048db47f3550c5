"""Environment variables of a rank with a GPU: one table, with the reason of each.

They are set in every process that may become a rank, before it imports torch: CUDA and NCCL read them once. What the
user has set stays, but for what keys of the config ask for. On the CPU nothing is set. Not run on a GPU yet.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from grpo_megatron.config import Config, ConfigError
from grpo_megatron.storage.files import folder_until_exit


class Variable(NamedTuple):
    """One row of the table."""

    name: str
    value: str
    reason: str


GPU_VARIABLES = (
    Variable("CUDA_DEVICE_MAX_CONNECTIONS", "1", "Megatron: communication starts before the GEMM that it overlaps"),
    Variable("NCCL_NVLS_ENABLE", "0", "NVLink SHARP buffers take GiB that the engine's cache needs"),
    Variable("NCCL_CUMEM_ENABLE", "0", "vLLM's default; vLLM and Megatron share a process"),
    Variable("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1", "blockwise FP8 on Hopper, as vLLM scales it"),
)
# Compiled kernels. All ranks of all nodes would write them into one shared home. The value is a folder below `cache_folder`.
CACHES = (
    Variable("VLLM_CACHE_ROOT", "vllm", "graphs that vLLM has compiled, and its inspection of model classes"),
    Variable("TRITON_CACHE_DIR", "triton", "Triton's kernels"),
    Variable("TORCHINDUCTOR_CACHE_DIR", "inductor", "kernels of torch.compile"),
    Variable("FLASHINFER_WORKSPACE_BASE", "flashinfer", "FlashInfer's kernels, in .cache/flashinfer below it"),
)


def set_gpu_variables() -> Iterator[str]:
    """Sets what the user has not set. Yields a line for each value of the user's that is not the table's."""
    folder: Path | None = None
    for variable in (*GPU_VARIABLES, *CACHES):
        name, value, reason = variable
        if name not in os.environ:
            if variable in CACHES:
                folder = folder or cache_folder()
                value = str(folder / value)
            os.environ[name] = value
        elif variable in GPU_VARIABLES and os.environ[name] != value:
            yield f"environment: {name}={os.environ[name]} stays as it is set; the default here is {value} ({reason})"


def cache_problems() -> Iterator[str]:
    """Tries to write into the folders of compiled kernels that the environment names; torch and vLLM end in a traceback."""
    for name, _, reason in CACHES:
        if folder := os.environ.get(name):
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=folder).close()
            except OSError as error:
                yield f"{name}={folder!r} ({reason}): {error.strerror}; set it to a folder that can be written, or unset it"


def check_rank_variables() -> None:
    """Checks the rank's numbers in the environment. Raises ConfigError; without RANK nothing is read."""
    given = {"LOCAL_WORLD_SIZE": os.environ.get("WORLD_SIZE", ""), **os.environ}  # one machine, where nobody says
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if "RANK" not in given or (rank == "LOCAL_RANK" and rank not in given):
            continue
        pair = f"{rank}={given.get(rank, '')} and {size}={given.get(size, '')}"
        if not all(given.get(name, "").isdecimal() for name in (rank, size)) or int(given[rank]) >= int(given[size]):
            remedy = "start the ranks with torchrun, or unset RANK to start them with grpo-megatron train"
            raise ConfigError(f"the environment has {pair}, and a rank is a number from 0 to {size} - 1; {remedy}")


TE_NONDETERMINISM = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"  # "0": Transformer Engine's attention adds in a fixed order


def set_determinism_variables(config: Config) -> None:
    """Sets the variables of `actor.megatron.deterministic` and `rollout.batch_invariant`, over the user's.

    cuBLAS reads its variable with the first handle, vLLM when it is imported, TE when it builds an attention.
    """
    if config.actor.megatron.deterministic:
        os.environ |= {TE_NONDETERMINISM: "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if config.has_rollouts and config.rollout.batch_invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"


def cache_folder() -> Path:
    """Makes a folder on this machine, of this user alone, that stays for the next run.

    Its name does not begin like a leftover's. Where another user has taken it, or a link, a new folder lasts until this
    process ends.
    """
    folder = Path(tempfile.gettempdir(), f"grpo-megatron-cache-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        entry = folder.lstat()
        if stat.S_ISDIR(entry.st_mode) and entry.st_uid == os.getuid():
            folder.chmod(0o700)
            return folder
    except OSError:
        pass
    return folder_until_exit()
