"""From `rollout.engine` to an engine: the registry of engine classes, their checks, and the one builder.

rollout:
  engine: vllm                            # a registered name, or package.module:Class of the user
  engine_options: {sleep_level: 1}        # validated by the class's section type, `Options`
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError, RolloutConfig, Section
from grpo_megatron.config.section import read_section
from grpo_megatron.device import Device
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.registry import Registry
from grpo_megatron.rollout.engine import EngineSetup, RolloutEngine
from grpo_megatron.rollout.transformers_engine import TransformersEngine
from grpo_megatron.rollout.vllm.engine import VllmEngine
from grpo_megatron.rollout.vllm.versions import is_newest

engines: Registry[type[RolloutEngine]] = Registry("rollout engine")
engines.register("vllm")(VllmEngine)
engines.register("transformers")(TransformersEngine)


def find_engine(name: str) -> type[RolloutEngine]:
    """Returns the engine class that `rollout.engine` names. Raises ConfigError."""
    try:
        engine = engines.get(name)
    except ValueError as error:
        raise ConfigError(f"rollout.engine: {error}") from error
    except Exception as error:  # whatever the user's module raises while it is imported
        raise ConfigError(
            f"rollout.engine={name!r}: importing it raised {type(error).__name__}: {error}; fix the module"
        ) from error
    if not (isinstance(engine, type) and issubclass(engine, RolloutEngine)):
        raise ConfigError(
            f"rollout.engine={name!r} is no subclass of grpo_megatron.rollout.engine.RolloutEngine; name one"
        )
    if engine.__abstractmethods__:
        raise ConfigError(f"rollout.engine={name!r} lacks {', '.join(sorted(engine.__abstractmethods__))}; define them")
    return engine


def read_options(engine: type[RolloutEngine], given: Mapping[str, Any]) -> Section:
    """Reads the table `rollout.engine_options` as the engine's section. Raises ConfigError with one line per wrong key."""
    return read_section(engine.Options, given, "rollout.engine_options.")


def engine_problems(
    rollout: RolloutConfig, *, replays: bool = False, has_images: bool = False, has_experts: bool = False
) -> Iterator[str]:
    """Yields what is wrong with the engine's part of the config. Runs before any rank starts; imports no engine package.

    `replays`: the trainer replays the routes of the engine. `has_images`: the model reads images. `has_experts`: it is a
    mixture of experts.
    """
    try:
        engine = find_engine(rollout.engine)
        options = read_options(engine, rollout.engine_options)
    except ConfigError as error:
        yield from str(error).splitlines()
        return
    yield from engine.problems(rollout, options)
    if replays and not engine.records_routes:
        yield (
            f"actor.moe.route_replay=engine with rollout.engine={rollout.engine!r}, which records no routes"
            " (records_routes=False); set rollout.engine=vllm, or actor.moe.route_replay=none"
        )
    if rollout.top_k > 0 and not engine.returns_kept:
        yield (
            f"rollout.top_k={rollout.top_k} with rollout.engine={rollout.engine!r}, which does not return the ids that a token"
            " was sampled from (returns_kept=False); set rollout.engine=vllm or transformers, or leave rollout.top_k out"
        )
    if has_images and not engine.reads_images:
        yield (
            f"rollout.engine={rollout.engine!r} serves no model that reads images (reads_images=False); set"
            " rollout.engine=vllm or transformers, or a model.path that reads text alone"
        )
    if has_experts and not engine.serves_experts:
        yield (
            f"rollout.engine={rollout.engine!r} serves no mixture of experts (serves_experts=False); set"
            " rollout.engine=vllm, or a dense model.path"
        )
    if rollout.sync == "delta" and not engine.reads_shards:
        yield (
            f"rollout.sync=delta with rollout.engine={rollout.engine!r}: a delta is sent for the part of each tensor that"
            " a rank's engine reads, and this engine reads whole tensors (reads_shards=False); set rollout.sync=full"
        )
    if rollout.sync == "delta" and rollout.quantization is not None:
        yield (
            f"rollout.sync=delta with rollout.quantization={rollout.quantization}: a delta builds on the weights as they"
            " were loaded, and the engine keeps quantised ones; set rollout.sync=full, or leave rollout.quantization out"
        )


def engine_packages(rollout: RolloutConfig) -> dict[str, str]:
    """Returns the packages that the engine needs: module -> name for `pip install`. Empty for an unknown engine."""
    try:
        return dict(find_engine(rollout.engine).requires)
    except ConfigError:
        return {}


def build_engine(
    rollout: RolloutConfig, model_path: Path | str, mesh: Mesh, device: Device, **arguments: Any
) -> RolloutEngine:
    """Builds the engine of the `rollout` section. Collective over the world; arguments as in `EngineSetup`.

    Raises ConfigError.
    """
    engine = find_engine(rollout.engine)
    options = read_options(engine, rollout.engine_options)
    return engine(
        EngineSetup(rollout=rollout, model_path=model_path, mesh=mesh, device=device, options=options, **arguments)
    )


def exact_engine_problem(engine: str) -> str | None:
    """Returns why `rollout.engine` cannot compute the policy's bits (`model.exact`), or None."""
    if engine == "vllm" and not is_newest():
        return "rollout.engine=vllm: the layers of vllm 0.26 are others; install vllm 0.32.*, or set rollout.engine=transformers"
    with contextlib.suppress(ConfigError):  # reported by another check
        if find_engine(engine).has_exact_rows:
            return None
        return f"rollout.engine={engine} computes with kernels of its own; set rollout.engine=transformers"
    return None
