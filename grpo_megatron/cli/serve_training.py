"""The command `serve-training CONFIG`: the ranks of a config, and on rank 0 the server. Each command runs on all ranks.

Rank 0 takes the next command from the server, and broadcasts it. An error that all ranks have alike, or that a single rank has,
is the answer to the command's requests; any other ends the ranks, as the others may wait in a collective. It is in the
folder then (store.py), and a later start answers with it, and goes on.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from grpo_megatron.cli.config_file import load_config
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.config.options import Argument, Option, Options
from grpo_megatron.imports import large_imports
from grpo_megatron.processes.variables import set_determinism_variables

TICK_S = 1.0  # seconds between two broadcasts without work


class ServeOptions(Options):
    """The options of `serve-training`."""

    program = "serve-training"
    description = "Serve a model's training to clients of the public `tinker` package (docs/service.md)."
    config: Annotated[Path, Argument("YAML file with sections model, actor, rollout, service, ...", "CONFIG")]
    overrides: Annotated[
        tuple[str, ...], Argument("replace a value of the file; ~section.key takes one out", "section.key=value")
    ] = ()
    dry_run: Annotated[bool, Option("check everything, say if the service can start, and stop")] = False

    @functools.cached_property
    def settings(self) -> Config:
        """Reads the config. Raises ConfigError."""
        return load_config(self.config, self.overrides, service_defaults)

    @property
    def device(self) -> str:
        """Returns the device of the ranks."""
        return self.settings.trainer.device


def service_defaults(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns key -> value of what a config need not say: there is no run with steps, data and rewards."""
    return {"trainer.n_gpus_per_node": 1, "trainer.val_before_train": False, "trainer.test_freq": -1}


def serve_training(options: ServeOptions, start_ranks: Callable[[int, str], int] | None) -> int:
    """Check the config; start the ranks, or serve as one of them. Returns the exit code. Raises ConfigError."""
    config, is_rank = options.settings, "RANK" in os.environ
    set_determinism_variables(config)
    world_size = int(os.environ["WORLD_SIZE"]) if is_rank else config.trainer.nnodes * config.trainer.n_gpus_per_node
    with large_imports():
        from grpo_megatron.checks.validate import validate_service

        checked = validate_service(config, world_size)
    check_base(checked.config)
    if options.dry_run:
        from grpo_megatron.cli.plan import readiness

        if os.environ.get("RANK", "0") == "0":
            print(readiness(config, checked, world_size).replace("the run", "the service"))
        return 0
    if not is_rank and world_size > 1:
        if config.trainer.nnodes > 1:
            raise ConfigError("trainer.nnodes: start the command on each node under torchrun (docs/service.md)")
        assert start_ranks is not None
        code = start_ranks(world_size, config.trainer.device)
        return 0 if code in (128 + signal.SIGTERM, 128 + signal.SIGINT) else code  # as one rank
    serve(checked)
    return 0


def base_settings(config: Config) -> dict[str, Any]:
    """Returns key -> value of what the models in a folder depend on."""
    names = ("rank", "alpha", "use_rslora", "target_modules", "exclude_modules")
    settings = {f"actor.lora.{name}": getattr(config.actor.lora, name) for name in names}
    return {"model.path": str(config.model.path.resolve()), **settings}


def check_base(config: Config) -> None:
    """Check that the models in the output folder, if there are any, began with these settings. Raises ConfigError."""
    folder = config.trainer.output_dir / "service"
    if not (folder / "base.json").exists() or not any((folder / "models").glob("*")):
        return
    earlier = json.loads((folder / "base.json").read_text())
    for key, value in base_settings(config).items():
        if earlier.get(key) != value:
            remedy = f"the models in {str(folder)!r} began with {earlier.get(key)!r}; set that, or another trainer.output_dir"
            raise ConfigError(f"{key}={value!r}: {remedy}")


def serve(checked: Any) -> None:
    """Serve as this rank, until a signal comes."""
    from grpo_megatron.parallel.mesh import destroy_mesh
    from grpo_megatron.service.work import Work
    from grpo_megatron.training.output_folder import OutputFolder

    config = checked.config
    work = Work(config, checked)
    with OutputFolder(config.trainer, work.mesh):
        server = start_server(config, checked) if work.mesh.rank == 0 else None
        run_commands(work, server)
        if server is not None:
            print("stopped by a signal; the same command goes on", flush=True)
    work.close()
    destroy_mesh()


def start_server(config: Config, checked: Any) -> Any:
    """Open the folder and listen. Returns the Server. Raises ConfigError."""
    from grpo_megatron.service.http import HttpServer
    from grpo_megatron.service.server import ServedModel, Server
    from grpo_megatron.service.store import Store

    path = config.model.path
    served = ServedModel(
        name=config.service.base_model or str(path),
        tokenizer=config.service.base_model or str(config.model.tokenizer_path or path),
        vocab_size=checked.arch.vocab_size,
        max_tokens=config.data.max_prompt_length + config.data.max_response_length,
        rank=config.actor.lora.rank,
        seed=config.rollout.seed,
    )
    store = Store(config.trainer.output_dir / "service")
    server = Server(config.service, store, served)
    store.write(store.folder / "base.json", base_settings(config))
    try:
        http = HttpServer(server)
    except OSError as error:
        address = f"service.host={config.service.host}, service.port={config.service.port}"
        raise ConfigError(f"{address}: {error.strerror}; set another port (0: any free one)") from error
    store.write(store.folder / "url", http.url.encode() + b"\n")
    http.start()
    token = config.service.tokens or store.folder / "token"
    print(f"serving {served.name} at {http.url}; TINKER_API_KEY is in {token}", flush=True)
    return server


def run_commands(work: Any, server: Any) -> None:
    """Run the server's commands until SIGTERM or SIGINT. `server`: on rank 0. Raises what not all ranks have alike."""
    from grpo_megatron.cli.failures import LOST_CONNECTION
    from grpo_megatron.models.weights.stream import WeightsError
    from grpo_megatron.parallel.mesh import RankError
    from grpo_megatron.service.store import REQUEST_FAILED
    from grpo_megatron.service.wire import RequestError

    asked: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: asked.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        while True:
            command = server.take(TICK_S) if server is not None else None
            sent = command and (command.method, command.arguments, command.options, server.running)
            sent, is_over = work.mesh.broadcast((sent, bool(asked)))
            if is_over:
                return
            if sent is None:
                continue
            result, problem, is_known = None, None, True
            method, arguments, options, note = sent
            try:
                result = getattr(work, method)(*arguments, **options)
            except (RequestError, RankError, WeightsError) as error:
                if getattr(error, "is_loss", False):
                    raise
                problem = error
            except BaseException as error:  # torch's CheckpointException is one, with its reason at the end
                if isinstance(error, KeyboardInterrupt | SystemExit):
                    raise
                text, is_known = f"{type(error).__name__}: {str(error)[-1000:]}", False
                if work.mesh.world_size > 1:
                    with contextlib.suppress(OSError), note.open("a") as file:
                        if not LOST_CONNECTION.search(text):  # else the cause is another rank
                            file.write(f"{REQUEST_FAILED}{' '.join(text.split())}\n")
                    raise
                traceback.print_exc()
                problem = RankError(REQUEST_FAILED + text)
            if server is not None:
                server.finish(command, result, problem)
            if not is_known:
                work.recover()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
