"""`tools.benchmarks rollout | update | transformers | exact | distill | service`: parts of a step beside the libraries below.

All run on one CPU rank. Both ways of a pair take turns on the same data; medians and processor seconds are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.benchmarks.workload import SAMPLES, WORKLOADS, Workload, machine, write_model

STEPS = 4  # of a turn of `service`
servers: list[subprocess.Popen[bytes]] = []

# The first is what the others are compared with. A way may return seconds of a processor, or (wall, processor).
Ways = dict[str, Callable[[], Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="default: 0.4M; of service: 5M")
    parser.add_argument("--repeats", type=int, default=5)


def benchmark(
    make: Callable[[Path, Workload, Any], Ways | list[Ways]], workload: str = "0.4M", steps: int = 1
) -> Callable[[argparse.Namespace], int]:
    """A command that measures the ways that `make(folder, workload, mesh)` gives, or each of several lists of ways.

    `steps`: of each call of a way; the times are those of one.
    """

    def command(args: argparse.Namespace) -> int:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), "0")
        os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
        import torch

        from grpo_megatron.device import Device
        from grpo_megatron.parallel.mesh import build_mesh

        torch.set_num_threads(1)
        print(machine())
        mesh = build_mesh(Device("cpu"), tp=1, pp=1, rollout_tp=1)
        for name in args.workload or [workload]:
            with tempfile.TemporaryDirectory(prefix="benchmark-rank-") as root:
                write_model(Path(root) / "model", WORKLOADS[name])
                made = make(Path(root) / "model", WORKLOADS[name], mesh)
                for ways in made if isinstance(made, list) else [made]:
                    measure(name, ways, args.repeats, steps)
                while servers:
                    servers[-1].terminate()
                    servers.pop().wait()
        os._exit(0)  # threads of vLLM and gloo would delay a normal exit

    return command


def measure(name: str, ways: Ways, repeats: int, steps: int) -> None:
    walls: dict[str, list[float]] = {way: [] for way in ways}
    processors: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats + 1):  # the first turn is not counted
        for way, call in ways.items():
            used = resource.getrusage(resource.RUSAGE_SELF)
            begin, processor = time.perf_counter(), used.ru_utime + used.ru_stime
            told = call()
            wall, used = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
            spent = used.ru_utime + used.ru_stime - processor
            wall, spent = told if isinstance(told, tuple) else (wall, told if isinstance(told, float) else spent)
            walls[way].append(wall / steps)
            processors[way].append(spent / steps)
    print(f"{name} parameters, one thread, load {os.getloadavg()[0]:.1f}, medians of {repeats}")
    base: tuple[float, float] | None = None
    for way in ways:
        wall, processor = statistics.median(walls[way][1:]), statistics.median(processors[way][1:])
        base = base or (wall, processor)
        print(
            f"  {way:<60}{wall:8.3f} s {wall / base[0]:5.2f} x   processor {processor:8.3f} s {processor / base[1]:5.2f} x"
        )
        if steps > 1 and wall != base[0]:
            more, cost = 1000 * (wall - base[0]), 1000 * (processor - base[1])
            print(f"  {'':<60}{more:+8.1f} ms a step      processor {cost:+8.1f} ms a step")
    sys.stdout.flush()


def built_engine(name: str, folder: Path, workload: Workload, mesh: Any, **options: Any) -> Any:
    """The engine with the weights of the folder."""
    from safetensors.torch import load_file

    from grpo_megatron.config import RolloutConfig
    from grpo_megatron.device import Device
    from grpo_megatron.models.families import read_architecture
    from grpo_megatron.models.weights.stream import engine_tensors
    from grpo_megatron.rollout.build import build_engine, find_engine

    engine = build_engine(
        RolloutConfig(engine=name),
        folder,
        mesh,
        Device("cpu"),
        dtype="float32",
        max_model_len=workload.max_length,
        eos_token_ids=[0],
        tensors=engine_tensors(read_architecture(folder), 1, reads_shards=find_engine(name).reads_shards),
        **options,
    )
    engine.load_weights(iter([list(load_file(folder / "model.safetensors").items())]), 0)
    return engine


def rollout(folder: Path, workload: Workload, mesh: Any) -> Ways:
    """vLLM's own loop, and the engines over the same requests of half a step: what one of two ranks samples."""
    import torch

    from grpo_megatron.rollout.engine import Request

    engines = {name: built_engine(name, folder, workload, mesh) for name in ("vllm", "transformers")}
    generator = torch.Generator().manual_seed(0)
    shape = (workload.prompts // 2, workload.prompt_length)
    prompts = torch.randint(3, workload.vocabulary, shape, generator=generator).tolist()
    length = workload.response_length
    some = [Request(tuple(prompt), 8 * i + j, length) for i, prompt in enumerate(prompts) for j in range(SAMPLES)]
    vllm: Any = engines["vllm"]
    bare = [{"prompt_token_ids": list(request.prompt_ids)} for request in some]
    parameters = [vllm._queue.params(request) for request in some]

    def bare_generate() -> None:
        with torch.no_grad():
            outputs = vllm._llm.generate(bare, parameters, use_tqdm=False)
        assert sum(len(output.outputs[0].token_ids) for output in outputs) >= 0.98 * len(some) * length

    return {
        "vllm.LLM.generate": bare_generate,
        "rollout.engine=vllm": lambda: vllm.generate(some, 0),
        "rollout.engine=transformers": lambda: engines["transformers"].generate(some, 0),
    }


def _training(folder: Path, workload: Workload, mesh: Any) -> tuple[Any, Any, Any, list[list[int]]]:
    """A policy with its optimizer, a loss, and the batch of half a step with its sequences."""
    from grpo_megatron.config import ActorConfig
    from grpo_megatron.device import Device
    from grpo_megatron.models.families import read_architecture
    from grpo_megatron.models.policy import Policy
    from grpo_megatron.training.correction import build_loss
    from tools.benchmarks.training import draw, make_batch

    actor = ActorConfig.model_validate({"use_kl_loss": False, "optim": {"lr": 1e-6}})
    policy = Policy.load(folder, "float32", read_architecture(folder), actor, mesh, Device("cpu"))
    policy.set_optimizer(actor.optim, 1)
    shape = {
        "prompts": workload.prompts // 2,
        "vocab_size": workload.vocabulary,
        "prompt_length": workload.prompt_length,
        "response_length": workload.response_length,
    }
    table, sequences = draw(shape)
    batch = make_batch(table, sequences, actor)
    batch.old_logprobs = None
    return policy, build_loss(actor), batch, sequences


def update(folder: Path, workload: Workload, mesh: Any) -> Ways:
    """The baseline has Megatron's schedule over packs that are made before, a sum as its loss, and Megatron's optimizer."""
    import torch

    from grpo_megatron.models.forward import forward_backward

    policy, loss, batch, _ = _training(folder, workload, mesh)
    packs = policy.packs(batch, batch.mini_batches[0])

    def plain() -> None:
        policy.ddp.zero_grad_buffer()
        policy.optimizer.zero_grad()
        forward_backward(
            policy.model, packs, lambda pack, values, _: (values.sum(), None), device=policy.device, forward_only=False
        )
        with policy.device.megatron(), torch.no_grad():
            policy.optimizer.step()

    def whole() -> None:
        batch.old_logprobs = None
        policy.update(batch, loss)

    return {"Megatron-Core: forward, backward, optimizer": plain, "the policy's update": whole}


def exact(folder: Path, workload: Workload, mesh: Any) -> list[Ways]:
    """Log-probabilities, update and rollout of half a step, plain and with `model.exact`."""
    import torch

    from grpo_megatron.config import ActorConfig
    from grpo_megatron.device import Device
    from grpo_megatron.models.families import read_architecture
    from grpo_megatron.models.policy import Policy
    from grpo_megatron.rollout.engine import Request
    from grpo_megatron.rollout.transformers_engine import RowModel, RunningBatch
    from grpo_megatron.training.correction import build_loss
    from tools.benchmarks.training import draw, make_batch

    actor = ActorConfig.model_validate({"use_kl_loss": False, "optim": {"lr": 1e-6}})
    shape = {"prompts": workload.prompts // 2, "vocab_size": workload.vocabulary}
    shape |= {"prompt_length": workload.prompt_length, "response_length": workload.response_length}
    table, sequences = draw(shape)
    loss, prompts = build_loss(actor), [ids[: workload.prompt_length] for ids in sequences]
    logprobs: Ways = {}
    updates: Ways = {}
    rollouts: Ways = {}
    for title, is_exact in (("plain", False), ("model.exact", True)):
        parts = (folder, "float32", read_architecture(folder), actor, mesh, Device("cpu"))
        policy = Policy.load(*parts, exact=is_exact)
        policy.set_optimizer(actor.optim, 1)
        batch = make_batch(table, sequences, actor, exact=is_exact)
        engine = RowModel(folder, "float32", exact=is_exact)
        weights = {name: tensor for bucket in policy.hf_weights() for name, tensor in bucket}
        engine.module.load_state_dict(weights, strict=False)

        def update(policy: Policy = policy, batch: Any = batch) -> None:
            batch.old_logprobs = None
            policy.update(batch, loss)

        def rollout(engine: RowModel = engine) -> None:
            running = RunningBatch(engine, 256, 8192, ())
            for number, prompt in enumerate(prompts):
                running.add(str(number), Request(tuple(prompt), number, workload.response_length))
            with torch.inference_mode():
                while running:
                    running.step()

        logprobs[f"log-probabilities, {title}"] = functools.partial(policy.logprobs, batch)
        updates[f"update, {title}"] = update
        rollouts[f"rollout, {title}"] = rollout
    context, of_vllm = multiprocessing.get_context("spawn"), {}
    for title, is_exact in (
        ("plain", False),
        ("model.exact", True),
    ):  # which changes vLLM's classes for a whole process
        here, there = context.Pipe()
        context.Process(target=vllm_rollouts, args=(there, workload, is_exact), daemon=True).start()
        of_vllm[f"rollout with vLLM, {title}"] = functools.partial(answer, here, prompts)
    return [logprobs, updates, rollouts, of_vllm]


def answer(connection: Any, question: Any) -> Any:
    connection.send(question)
    return connection.recv()


def vllm_rollouts(connection: Any, workload: Workload, is_exact: bool) -> None:
    """A process with an engine: it samples for the prompts that it receives, and sends its processor seconds."""

    def serve(folder: Path, workload: Workload, mesh: Any) -> Ways:
        from grpo_megatron.rollout.engine import Request

        engine = built_engine("vllm", folder, workload, mesh, **({"exact": True} if is_exact else {}))
        while True:
            prompts, begin = connection.recv(), time.process_time()
            length = workload.response_length
            engine.generate([Request(tuple(prompt), number, length) for number, prompt in enumerate(prompts)], 0)
            connection.send(time.process_time() - begin)

    with contextlib.suppress(EOFError):  # the other process has measured
        benchmark(serve)(argparse.Namespace(workload=[workload.name]))


def transformers(folder: Path, workload: Workload, mesh: Any) -> Ways:
    """The baseline pads the same sequences to one batch, as a plain training loop does, and has torch's fused AdamW."""
    import torch
    from transformers import AutoModelForCausalLM

    policy, loss, batch, sequences = _training(folder, workload, mesh)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    width = max(map(len, sequences))
    tokens = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in sequences])
    is_token = torch.arange(width) < torch.tensor(list(map(len, sequences))).unsqueeze(1)

    def plain() -> None:
        start = workload.prompt_length - 1
        logits = model(input_ids=tokens, attention_mask=is_token, logits_to_keep=width - start).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(2, tokens[:, start + 1 :, None])[:, :, 0]
        (logprobs * is_token[:, start + 1 :]).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def whole() -> None:
        batch.old_logprobs = None
        policy.update(batch, loss)

    return {"transformers: forward, backward, AdamW": plain, "the policy's update": whole}


def distill(folder: Path, workload: Workload, mesh: Any) -> list[Ways]:
    """A teacher of twice the student's width and depth: its scores beside one forward pass, and the student's update."""
    import torch

    from grpo_megatron.device import Device
    from grpo_megatron.models.families import read_architecture
    from grpo_megatron.models.forward import forward_backward
    from grpo_megatron.models.policy import Reference
    from grpo_megatron.training.correction import build_loss
    from grpo_megatron.types import TeacherScores

    policy, _, batch, _ = _training(folder, replace(workload, prompts=2), mesh)
    sizes = {name: 2 * getattr(workload, name) for name in ("layers", "hidden", "intermediate", "heads", "groups")}
    big = folder.with_name("teacher")
    write_model(big, replace(workload, **sizes))  # type: ignore[arg-type]
    actor, arch = policy.actor, read_architecture(big)
    teacher = Reference.load(big, "float32", arch, actor, mesh, Device("cpu"))
    packs = teacher.packs(batch, batch.mini_batches[0])
    loss = build_loss(actor, teachers=("teacher",))

    def plain() -> None:
        with torch.no_grad():
            forward_backward(teacher.model, packs, lambda *_: None, device=teacher.device, forward_only=True)

    def update(scores: TeacherScores | None) -> None:
        batch.old_logprobs, batch.teacher = None, scores
        policy.update(batch, loss)

    count, weights, vocabulary = len(batch), batch.token_weights, policy.arch.vocab_size
    logprobs, top = teacher.distribution(batch, 64, vocabulary)
    _, states = teacher.distribution(batch, 0, vocabulary)
    head = policy.teacher_head(big, arch, torch.float32)
    sampled = TeacherScores([0] * count, weights, logprobs)
    full = replace(sampled, kl="reverse", states=list(states), heads=[head])
    scoring: Ways = {
        "one forward pass of the teacher": plain,
        "scores, sampled": lambda: teacher.logprobs(batch),
        "scores, top_k 64": lambda: teacher.distribution(batch, 64, vocabulary),
        "scores, full vocabulary": lambda: teacher.distribution(batch, 0, vocabulary),
    }
    updates: Ways = {
        "update without a teacher": lambda: update(None),
        "update, sampled": lambda: update(sampled),
        "update, top_k 64": lambda: update(replace(sampled, kl="reverse", top=list(top))),
        "update, full vocabulary": lambda: update(full),
    }
    return [scoring, updates]


def service(folder: Path, workload: Workload, mesh: Any) -> Ways:
    """Steps of PPO on all tokens, by the trainer, and by the public client through `serve-training` in another process.

    Like the trainer, the client begins a step when the one before is complete. Each turn has STEPS steps, and snapshots are as
    frequent as by default. Processor time is that of server and client.
    """
    import tinker
    import torch
    import yaml
    from tinker import types

    from tools.benchmarks.workload import family_processor_seconds

    policy, loss, batch, sequences = _training(
        folder, replace(workload, prompt_length=1, response_length=workload.max_length - 1), mesh
    )
    config = {
        "model": {"path": str(folder), "dtype": "float32"},
        "data": {"max_prompt_length": 1, "max_response_length": workload.max_length},
        "rollout": {"engine": "transformers"},
        "trainer": {"device": "cpu", "output_dir": str(folder.with_name("out"))},
        "service": {"port": 0, "base_model": "it"},
    }
    (folder.with_name("serve.yaml")).write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "grpo_megatron", "serve-training", str(folder.with_name("serve.yaml"))]
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    env = {name: value for name, value in os.environ.items() if name not in ranks} | {"OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    servers.append(server)
    out = folder.with_name("out") / "service"
    while not (out / "url").exists():
        assert server.poll() is None, "the server has ended"
        time.sleep(0.1)
    url, token = ((out / name).read_text().strip() for name in ("url", "token"))
    client = tinker.ServiceClient(base_url=url, api_key=token).create_lora_training_client("it", rank=0).result()

    def datum(ids: list[int]) -> types.Datum:
        size = len(ids) - 1
        inputs = {"target_tokens": ids[1:], "logprobs": [-4.0] * size, "advantages": torch.randn(size).tolist()}
        return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)

    data = [datum(ids) for ids in sequences]

    def whole() -> None:
        for _ in range(STEPS):
            batch.old_logprobs = None
            policy.update(batch, loss)

    def served() -> tuple[float, float]:
        before, begin = family_processor_seconds(os.getpid()), time.perf_counter()
        for _ in range(STEPS):
            passed = client.forward_backward(data, "ppo")
            stepped = client.optim_step(types.AdamParams(learning_rate=1e-6, grad_clip_norm=1.0))
            passed.result(), stepped.result()
        wall, processor = time.perf_counter() - begin, family_processor_seconds(os.getpid()) - before
        client.forward(data[:1], "ppo").result()  # after a snapshot that the last step has begun
        return wall, processor

    return {"the policy's update": whole, "the public client through serve-training": served}


measure_service = benchmark(service, "5M", STEPS)
measure_rollout, measure_exact, measure_distill = benchmark(rollout), benchmark(exact), benchmark(distill)
measure_update, measure_transformers = benchmark(update), benchmark(transformers)
