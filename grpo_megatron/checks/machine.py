"""Requirements on this machine: an output folder that it can write, installed packages, and CUDA devices."""

from __future__ import annotations

import importlib.util
import logging
import os
import tempfile

from grpo_megatron.config import Config, ConfigError
from grpo_megatron.config.problems import Problem, Problems, keys_of
from grpo_megatron.device import count_cuda_devices
from grpo_megatron.report.loggers import check_loggers
from grpo_megatron.rollout.build import engine_packages
from grpo_megatron.untrusted import existing_part, reason_of

logger = logging.getLogger(__name__)
NO_DEVICE = "torch sees no CUDA device on this machine"


def output_problems(config: Config, *, is_plan: bool = False) -> Problems:
    """Checks that the output folder can be written, and that loggers are installed (a plan only warns)."""
    k, folder = keys_of(config), config.trainer.output_dir
    if folder.resolve().is_relative_to(config.model.path.resolve()):
        yield f"{k.trainer.output_dir} is in {k.model.path}, which a run only reads; set a folder outside of it"
    existing, no_folder = existing_part(folder)
    if no_folder:
        yield f"{k.trainer.output_dir}: {no_folder}"
    else:
        try:
            tempfile.TemporaryDirectory(prefix=".grpo_", dir=existing).cleanup()  # root may do more than it can
        except OSError as error:
            yield f"{k.trainer.output_dir}: {str(existing)!r} is not writable ({reason_of(error)}); choose another"
    for problem in logger_problems(config):
        if is_plan:
            logger.warning("%s", Problem.of(problem).text)
        else:
            yield problem


def logger_problems(config: Config) -> Problems:
    """Looks up the packages of `trainer.logger`."""
    try:
        check_loggers(config.trainer.logger)
    except ConfigError as error:
        yield from (Problem.of(problem, "trainer.logger") for problem in error.problems)


def package_problems(config: Config) -> Problems:
    """Looks up Megatron-Core and the engine's packages, without the seconds that an import takes."""
    of_engine = engine_packages(config.rollout) if config.has_rollouts else {}
    for name, package in {"megatron": "megatron-core", **of_engine}.items():
        if importlib.util.find_spec(name) is None:
            yield f"the package {name!r} is not installed; pip install {package}, as requirements/ pins it"


def is_auto_cpu(config: Config) -> bool:
    """Says if `trainer.device=auto` is the CPU, because this machine has no CUDA devices."""
    return config.trainer.device == "auto" and count_cuda_devices() == 0


def gpu_engine_problems(config: Config) -> Problems:
    """Checks that the engine runs on GPUs, where the run is for them: no other machine would change it."""
    if config.rollout.engine == "transformers" and not (config.trainer.device == "cpu" or is_auto_cpu(config)):
        yield f"{keys_of(config).rollout.engine} on GPUs: this engine has no GPU path; set rollout.engine=vllm"


def device_problems(config: Config, world_size: int) -> Problems:
    """Checks that this machine has the CUDA devices that `trainer.device` asks for, one for each of its ranks."""
    k, device, count = keys_of(config), config.trainer.device, count_cuda_devices()
    if device == "cpu" or is_auto_cpu(config):
        return
    yield from gpu_engine_problems(config)
    if config.colocates and config.rollout.free_cache_engine:
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            if "expandable_segments:true" in (value := os.environ.get(name, "")).replace(" ", "").lower():
                yield (
                    f"{name}={value} with {k.rollout.free_cache_engine}: such segments cannot be in the pool that vLLM puts"
                    " to sleep (pytorch issue 147851), and vLLM changes the setting of the whole process while it fills that"
                    " pool; leave expandable_segments out of the variable"
                )
    if count == 0:
        yield f"{k.trainer.device}, but {NO_DEVICE}; set trainer.device=cpu or auto"
        return
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size if config.trainer.nnodes == 1 else 0))
    if "RANK" not in os.environ and config.trainer.nnodes == 1:
        ranks += config.trainer.healing.spares
    if ranks > count:
        yield (
            f"{ranks} ranks on this machine need {ranks} CUDA devices, and torch sees {count}; set"
            f" {k.trainer.n_gpus_per_node:key}={count}, or let every rank see all devices of its machine"
            " (CUDA_VISIBLE_DEVICES)"
        )
