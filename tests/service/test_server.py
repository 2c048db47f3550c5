"""The server in front of one rank: a kill at any command, order, repeated and foreign requests, and 200 hostile ones."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import json
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from megatron.core.parallel_state import destroy_model_parallel

from grpo_megatron.cli import serve_training as serve
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.config import ConfigError, ServiceConfig
from grpo_megatron.rollout.engine import Completion
from grpo_megatron.rollout.transformers_engine import TransformersEngine as Engine
from grpo_megatron.service import http as http_module
from grpo_megatron.service import server as server_module
from grpo_megatron.service import wire
from grpo_megatron.service import work as work_module
from grpo_megatron.service.server import METHODS, ServedModel, Server
from grpo_megatron.service.slots import Slots
from grpo_megatron.service.store import REQUEST_FAILED, Store
from grpo_megatron.service.wire import RequestError, read_json_request
from grpo_megatron.service.work import Sampled
from tests.service.inputs import LORA, RawClient, loop, make_data, make_service, pass_body
from tests.service.test_work import LAYOUTS, build
from tests.worlds import ranks


class Killed(Exception):
    """The server is gone between a command and its answer."""


def served(config: Path, out: Path, play: Callable[[RawClient], Any], kills: list[int], *overrides: str) -> Any:
    """Returns what `play` returns in a thread, beside a server that is killed after commands of these numbers, and started again.

    A kill takes the states of all ranks. None on the ranks after the first.
    """
    work = build(config, out, ["service.snapshot_steps=2", *overrides])
    server_module.SNAPSHOT_SHARE = 1e9  # as many as snapshot_steps allows
    server_module.POLL_S = 0.3  # an answer of a killed server, whose connection stays open here, is not waited for
    found: dict[str, Any] = {}
    client = RawClient("http://127.0.0.1:1", "")

    def run() -> None:
        try:
            found["result"] = play(client)
        except BaseException as error:  # noqa: BLE001 - raised in the main thread
            found["error"] = error
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=run, daemon=True)
    for kill in [*kills, None]:
        if work.mesh.rank:
            serve.run_commands(work, None)
            if kill is not None:
                forget(work)
            continue
        server = serve.start_server(work.config, _Checked())
        client.token = (work.config.service.tokens or out / "service" / "token").read_text().split()[0]
        client.url = (out / "service" / "url").read_text().strip()
        if not thread.ident:
            thread.start()
        finish, count = server.finish, iter(range(1_000_000))

        def counted(*arguments: Any, kill: int | None = kill, count: Any = count, finish: Any = finish) -> None:
            if next(count) == kill:
                raise Killed
            finish(*arguments)

        server.finish = counted
        try:
            serve.run_commands(work, server)
            break
        except Killed:
            client.url = "http://127.0.0.1:1"
            work.mesh.broadcast((None, True))  # the other ranks leave their loop
            forget(work)
            server.loop.call_soon_threadsafe(server.loop.stop)
    if thread.ident:
        thread.join()
    work.close()
    destroy_model_parallel()
    if "error" in found:
        raise found["error"]
    return found.get("result")


def forget(work: Any) -> None:
    """Leave this rank with what a new process has."""
    work._sleep()
    work._saved.clear()
    first, work.slots = work.slots.first, Slots(work.policy)
    work.slots.first = first


class _Checked:
    class arch:
        vocab_size = 101


@ranks()
def killed(config: Path, rank: int, overrides: list[str]) -> list[Any]:
    """A loop without a kill; and with kills."""
    folder = config.parent / f"killed-{len(overrides)}-{rank}"
    return [
        served(config, folder / str(len(kills)), lambda client: loop(client, 5, rank=rank), kills, *overrides)
        for kills in ([], [3, 9, 4])
    ]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_service(tmp_path_factory.mktemp("service"))


@ranks()
def attacked(config: Path, seed: int) -> list[Any]:
    """The loop alone; the loop beside the hostile requests, and what they were answered."""
    alone = served(config, config.parent / f"alone-{seed}", lambda client: loop(client, 3), [], *LORA)
    other = "tml-another-client-of-this-server"
    out = config.parent / f"attacked-{seed}"
    (config.parent / "tokens").write_text(f"tml-0123456789abcdefghij\n{other}\n")

    def play(client: RawClient) -> Any:
        answers = list[Any]()
        enemy = threading.Thread(target=lambda: answers.extend(attack(RawClient(client.url, other), client, seed)))
        enemy.start()
        found = [loop(client, 3), loop(client, 3)]
        enemy.join()
        return found, answers, loop(client, 3)

    overrides = [*LORA, f"service.tokens={config.parent / 'tokens'}", "service.max_body_megabytes=1"]
    return [alone, served(config, out, play, [], *overrides)]


def attack(enemy: RawClient, victim: RawClient, seed: int) -> Iterator[tuple[str, int, bytes]]:
    """200 requests, each with a name, and the status and content of its answer."""
    rng = random.Random(seed)
    enemy.open()
    model, seqs = enemy.create(0), iter(range(1, 1000))
    data = make_data(2, "ppo")
    good = pass_body(model, 0, data, "ppo")
    adam: Any = {"learning_rate": 0.1}
    while not victim.session:
        time.sleep(0.01)
    foreign = f"{victim.session}:train:0"
    save: Any = {"model_id": model, "path": "x"}
    sample: Any = {
        "prompt": {"chunks": [{"tokens": [1], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 2},
    }
    sample |= {"sampling_session_id": f"{victim.session}:sample:0-4", "seq_id": 0}
    cut = [good[: rng.randrange(len(good))] for _ in range(40)]
    noise = [bytes(rng.randrange(256) for _ in range(rng.randrange(300))) for _ in range(35)]
    flipped = [bytes(b ^ (rng.random() < 0.01) * rng.randrange(256) for b in good) for _ in range(40)]
    bodies = [*cut, *noise, *flipped]
    nan, vast = data[0].columns["logprobs"] * float("nan"), data[0].targets + 1000
    wrong_data = ({"columns": {**data[0].columns, "logprobs": nan}}, {"targets": vast}, {"tokens": -data[0].tokens - 1})
    bodies += [pass_body(model, next(seqs), [replace(data[0], **wrong)], "ppo") for wrong in wrong_data]
    losses = ("custom", "stable_reinforce", "gspo", "", "x" * 1000)
    bodies += [pass_body(model, next(seqs), data, loss) for loss in losses]
    wrong_settings = (
        {"clip_low_threshold": float("inf")},
        {"clip_low_threshold": 2.0},
        {"beta": 1.0},
    )
    bodies += [pass_body(model, next(seqs), data, "ppo", **settings) for settings in wrong_settings]
    bodies += [
        pass_body(model, next(seqs), [], "ppo"),
        pass_body(foreign, 1, data, "ppo"),
        pass_body(model, 10**9, data, "ppo"),
    ]
    bodies += [pass_body("../../etc", 1, data, "ppo"), pass_body(model, -5, data, "ppo"), b"\x0a" * 2_000_000]
    requests: list[tuple[str, Any]] = [("forward_backward", body) for body in bodies]
    rates = (float("nan"), float("inf"), -1, "1", None, [], 1e300)
    steps = [
        {"adam_params": {**adam, "learning_rate": rate}, "model_id": model, "seq_id": next(seqs)} for rate in rates
    ]
    requests += [("optim_step", step) for step in steps]
    names = ("../x", "", "a/b", ".", "x" * 1000, 5, "\0", "a\nb", "~root")
    requests += [("save_weights", {**save, "path": name, "seq_id": next(seqs)}) for name in names]
    for wrong in (
        "tinker://x",
        f"tinker://{foreign}/sampler_weights/session-0000000004",
        "/etc/passwd",
        "tinker://../../x/weights/y",
    ):
        load = {"path": wrong, "optimizer": True}
        requests.append(("load_weights", {**load, "session_id": enemy.session, "model_seq_id": 5}))
        requests.append(("load_weights", {**load, "model_id": model, "seq_id": next(seqs)}))
        create = {"session_id": enemy.session, "sampling_session_seq_id": 1, "model_path": wrong}
        requests.append(("create_sampling_session", create))
    requests += [
        ("asample", sample),
        ("retrieve_future", {"request_id": f"{foreign}:1"}),
        ("retrieve_future", {"request_id": f"{victim.session}:sample:0-4:0"}),
        ("get_info", {"model_id": foreign}),
        ("session_heartbeat", {"session_id": victim.session}),
        (f"sessions/{victim.session}/finish", {}),
        ("create_model", {"session_id": victim.session, "model_seq_id": 0, "base_model": "tiny"}),
        (
            "create_model",
            {"session_id": enemy.session, "model_seq_id": 9, "base_model": "/etc", "lora_config": {"rank": 1}},
        ),
        *(
            (
                "create_model",
                {"session_id": enemy.session, "model_seq_id": 9, "base_model": "tiny", "lora_config": {"rank": r}},
            )
            for r in (0, -1, 7, 10**30, True, 1.5)
        ),
        ("create_session", {"tags": "x"}),
        ("create_session", b"[" * 100_000),
        ("create_session", b'{"user_metadata": ' + b'{"a": ' * 50_000),
        ("nowhere", {}),
        ("asample", {**sample, "prompt": {"chunks": [{"type": "image", "data": "x"}]}}),
        *(("asample", {**sample, "sampling_params": {"temperature": t}}) for t in (-1, "1", float("nan"))),
        *(("asample", {**sample, "num_samples": n}) for n in (0, 10**9, -1)),
        *((path, noise[0]) for path in ("optim_step", "save_weights", "create_model", "asample", "retrieve_future")),
    ]
    rng.shuffle(requests)
    for path, body in requests:
        yield path, *enemy.ask(path, body)
    host, port = victim.url.removeprefix("http://").split(":")
    head = (
        f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: x\r\nX-API-Key: {enemy.token}\r\nContent-Length: 1000\r\n\r\n"
    )
    for text in (
        "GET",
        "\0\0\0\r\n\r\n",
        head,
        head + "abc",
        "A" * 100_000,
        head.replace("1000", "-7"),
        head.replace("1000", "9" * 30),
    ):
        with socket.create_connection((host, int(port))) as raw, contextlib.suppress(OSError):
            raw.sendall(text.encode())
    for headers in (
        {"X-API-Key": "tml-wrong"},
        {"X-API-Key": ""},
        {"X-API-Key": "x" * 5000},
        {"Content-Encoding": "zstd"},
    ):
        yield "key", *enemy.ask("create_session", {"tags": []}, **headers)
    for path in (
        f"training_runs/{foreign}",
        f"samplers/{victim.session}:sample:0-4",
        f"training_runs/{foreign}/checkpoints",
    ):
        yield "get", *enemy.ask(path, method="GET")
    yield "delete", *enemy.ask(f"training_runs/{foreign}/checkpoints/sampler_weights/session-0000000004", b"", "DELETE")


def test_hostile_requests_leave_the_server_and_the_others_as_they_are(config: Path) -> None:
    [[alone, (beside, answers, after)]] = attacked(1, config=config, seed=0)
    assert beside == [alone, alone] and after == alone
    assert len(answers) + 7 >= 200 and answers[-1][0] == "delete"
    good = [(path, content) for path, status, content in answers if status == 200]
    assert len(good) < len(answers)
    for path, status, content in answers:
        assert status < 500, (path, status, content)
        if status != 200:
            assert json.loads(content)["error"] if content[:1] == b"{" else status in (400, 404)
    for path, content in good:  # futures of wrong requests in the order of a model
        assert path in ("forward_backward", "optim_step", "save_weights", "load_weights", "create_session"), (
            path,
            content,
        )


def ask(server: Server, path: str, body: Any) -> None:
    """A request of the server's one client."""
    content, owner = json.dumps(body).encode(), next(iter(server.owners.values()))
    if path != "asample":
        server.add_request(path, content, owner)
        return
    with server.lock:
        server.sample(read_json_request(wire.SampleRequest, content), owner, content)


def opened(folder: Path) -> tuple[Server, str, str, str]:
    """A server without ranks: it, its owner, a session, a model."""
    server = Server(ServiceConfig(), Store(folder), ServedModel("tiny", "tiny", 101, 48, None, 0))
    owner = next(iter(server.owners.values()))
    session = server.create_session(None, owner)["session_id"]
    create = wire.CreateModel(session_id=session, model_seq_id=0, base_model="tiny")
    with server.lock:
        return server, owner, session, server.create_model(create, owner)["model_id"]


def run_all(server: Server) -> list[str]:
    """The commands that the server has for the ranks, which do nothing but to make the folders of checkpoints."""
    names = []
    while (command := server.take(0.0)) is not None or server._samples:
        if command is None:
            continue
        names.append(command.method)
        if command.method in ("save", "snapshot"):
            command.arguments[1].mkdir(parents=True)
        sampled = [Sampled([Completion([1], [-1.0], "stop")], None) for _ in command.jobs]
        server.finish(command, sampled if command.method == "sample" else 1.0, None)
    return names


def test_a_client_without_a_sign_of_life_frees_what_it_holds(tmp_path: Path) -> None:
    """Memory, answers, requests that wait, weights without a name. Its named checkpoint stays, and a restart runs nothing."""
    server, owner, session, model = opened(tmp_path)
    ask(server, "save_weights_for_sampler", {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0})
    ask(server, "save_weights", {"model_id": model, "seq_id": 2, "path": "kept"})
    ask(server, "save_weights_for_sampler", {"model_id": model, "seq_id": 3, "path": "named"})
    ask(server, "optim_step", {"model_id": model, "seq_id": 5, "adam_params": {}})  # waits for 4
    assert run_all(server) == ["create", "snapshot", "save", "snapshot"]
    sample: Any = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 2}}
    sample |= {"sampling_session_id": f"{session}:sample:0-1"}
    ask(server, "asample", {**sample, "seq_id": 0})
    assert run_all(server) == ["sample"] and len(server.jobs) == 2
    ask(server, "asample", {**sample, "seq_id": 1})
    folder = tmp_path / "models" / model
    assert (folder / "sampler_weights/session-0000000001").exists() and (folder / "requests/0000000005").exists()

    server.session(session, owner)  # as a heartbeat does
    assert server.models[model].is_loaded
    server.sessions[session].seen -= ServiceConfig().session_timeout_s + 1
    assert run_all(server) == ["drop"]
    assert not server.jobs and server._kept == 0 and not server.models[model].is_loaded
    assert not (folder / "requests/0000000005").exists() and not any((tmp_path / "samplers").iterdir())
    assert [path.name for path in (folder / "sampler_weights").iterdir() if path.is_dir()] == ["named"]
    assert {*server.store.checkpoints(model)} == {"weights/kept", "sampler_weights/named"}
    for call in (lambda: server.session(session, owner), lambda: ask(server, "asample", {**sample, "seq_id": 2})):
        with pytest.raises(RequestError) as error:
            call()
        assert error.value.status in (404, 410)
    assert run_all(Server(ServiceConfig(), Store(tmp_path), server.served)) == []


def test_what_a_closed_session_had_queued_is_freed(tmp_path: Path) -> None:
    server, _, session, model = opened(tmp_path)
    ask(server, "save_weights_for_sampler", {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0})
    server.end(server.sessions[session])
    assert run_all(server) == ["create", "snapshot", "drop"] and run_all(server) == []
    assert not server.store.checkpoints(model) and not server.samplers
    assert not any((tmp_path / "models" / model / "sampler_weights").iterdir())


def test_a_checkpoint_that_is_removed_while_another_replaces_it(tmp_path: Path) -> None:
    server, _, _, model = opened(tmp_path)
    ask(server, "save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
    assert run_all(server) == ["create", "save"]
    ask(server, "save_weights", {"model_id": model, "seq_id": 2, "path": "a", "overwrite": True})
    command = server.take(0.0)
    assert command is not None
    server.remove_checkpoint(model, "weights/a")
    server.finish(command, None, None)
    assert run_all(server) == []
    assert "weights/a" in server.store.checkpoints(model) and command.arguments[1].exists()


def test_a_new_model_is_answered_after_a_restart(tmp_path: Path) -> None:
    server, owner, _, model = opened(tmp_path)
    again = Server(ServiceConfig(), Store(tmp_path), server.served)
    assert json.loads(bytes(asyncio.run(again.retrieve(f"{model}:new", owner)).body)) == {"model_id": model}


def test_samples_of_the_base_do_not_depend_on_the_clients_count(tmp_path: Path) -> None:
    places = []
    for numbers, folder in (((0, 1), "a"), ((0, 3), "b")):
        server, owner, session, _ = opened(tmp_path / folder)
        for number in (*numbers, *numbers):
            server.create_sampler(wire.CreateSampler(session_id=session, sampling_session_seq_id=number), owner)
        server = Server(ServiceConfig(), Store(tmp_path / folder), server.served)
        places.append([one.place for one in server.samplers.values()])
    assert places[0] == places[1] and len({*places[0]}) == 2


def test_weights_that_were_removed_are_an_error_of_later_samples(tmp_path: Path) -> None:
    server, owner, session, model = opened(tmp_path)
    ask(server, "save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "a"})
    assert run_all(server) == ["create", "snapshot"]
    path = f"tinker://{model}/sampler_weights/a"
    server.create_sampler(wire.CreateSampler(session_id=session, sampling_session_seq_id=0, model_path=path), owner)
    server.remove_checkpoint(model, "sampler_weights/a")
    sample: Any = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_session_id": f"{session}:sample:0", "seq_id": 0}
    ask(server, "asample", {**sample, "sampling_params": {}})
    assert run_all(server) == []
    answer = server.jobs[f"{session}:sample:0:0"].answer
    assert answer is not None and b"was removed" in answer[1]


@pytest.mark.parametrize(
    ("world", "rank", "overrides"),
    [(1, 3, LORA), (2, 3, [*LORA, *LAYOUTS["TP2"][1]]), (2, 0, LAYOUTS["PP2"][1])],
    ids=["LoRA", "LoRA TP2", "PP2"],
)
def test_a_killed_server_goes_on_bit_for_bit(config: Path, world: int, rank: int, overrides: list[str]) -> None:
    [[alone, killed_thrice], *_] = killed(world, config=config, rank=rank, overrides=overrides)
    assert len(alone) == 25 and len({json.dumps(one) for one in alone}) > 20
    assert killed_thrice == alone


def stumble(client: RawClient, plants: bool) -> Any:
    """A loop among requests that raise in the middle of their work, or, without `plants`, that are refused at once.

    Returns the answers to the others, and the errors.
    """
    client.open()
    model, other = client.create(0, seed=1), client.create(1, seed=2)
    seqs, found, errors = iter(range(1, 100)), list[Any](), list[Any]()
    data = make_data(3, "cross_entropy")
    sample: Any = {"prompt": {"chunks": [{"tokens": [5, 9], "type": "encoded_text"}]}, "seq_id": 0}

    def train(which: str, seq: int) -> None:
        futures = [client.send("forward_backward", pass_body(which, seq, data, "cross_entropy"))]
        if which == model:
            step: Any = {"adam_params": {"learning_rate": 0.5 if plants else -1.0}, "model_id": which}
            errors.append(client.send("optim_step", {**step, "seq_id": next(seqs)}))
            wrong = pass_body(which, next(seqs), make_data(3, "dro"), "dro" if plants else "?")
            errors.append(client.send("forward_backward", wrong))
            bad = {"model_id": which, "seq_id": next(seqs), "path": "bad" if plants else "/"}
            errors.append(client.send("save_weights", bad))
        seq = next(seqs) if which == model else seq + 1
        futures.append(client.send("optim_step", {"adam_params": {}, "model_id": which, "seq_id": seq}))
        found.extend(client.result(future) for future in futures)

    for turn in range(3):
        train(model, next(seqs))
        train(other, 2 * turn + 1)
        save = {"model_id": model, "seq_id": next(seqs), "sampling_session_seq_id": turn}
        sampler = json.loads(client.result(client.send("save_weights_for_sampler", save)))["sampling_session_id"]
        sample["sampling_session_id"] = sampler
        pair = [{**sample, "seq_id": n, "sampling_params": {"max_tokens": 4, "temperature": 1 + n}} for n in range(2)]
        futures = [client.send("asample", one) for one in (pair if plants else pair[:1])]
        found.append(client.result(futures[0]))
        errors.extend(futures[1:])
    return found, [json.loads(client.result(error)) for error in errors]


@ranks()
def stumbling(config: Path) -> list[Any]:
    """Without planted exceptions; with them; with them and kills."""
    runs = [served(config, config.parent / "stumble-0", lambda client: stumble(client, False), [], *LORA)]
    token_losses, step, save, generate = work_module.token_losses, Slots.step, work_module.save_sharded, Engine.generate

    def planted_loss(name: str, *arguments: Any) -> Any:
        return token_losses(name, *arguments) if name != "dro" else {}["planted"]

    def planted_step(slots: Slots, adam: Any) -> Any:
        norm = step(slots, adam)
        return norm if adam.learning_rate != 0.5 else {}["planted"]

    def planted_save(policy: Any, folder: Path) -> None:
        save(policy, folder)
        assert "bad" not in str(folder), "planted"

    def planted_generate(engine: Any, requests: Any, version: int) -> Any:
        return generate(engine, requests, version) if all(one.temperature == 1 for one in requests) else {}["planted"]

    with (
        mock.patch.object(work_module, "token_losses", planted_loss),
        mock.patch.object(Slots, "step", planted_step),
        mock.patch.object(work_module, "save_sharded", planted_save),
        mock.patch.object(Engine, "generate", planted_generate),
    ):
        for kills in ([], [9, 12]):
            out = config.parent / f"stumble-1-{len(kills)}"
            runs.append(served(config, out, lambda client: stumble(client, True), kills, *LORA))
    return runs


def test_an_exception_of_the_ranks_costs_its_own_request_only(config: Path) -> None:
    """In a pass, a step, a checkpoint, a sample beside another: each in the middle. Other answers stay as they are."""
    [[(alone, refused), *planted]] = stumbling(1, config=config)
    assert {one["category"] for one in refused} == {"user"} and len(alone) == 15 and len(set(alone)) == 14
    for found, errors in planted:
        assert found == alone and len(errors) == 12
        assert all("planted" in one["error"] and one["category"] == "server" for one in errors), errors


@pytest.mark.parametrize("ends", ["error", "kill"])
def test_a_request_that_ends_the_server_does_not_run_for_ever(tmp_path: Path, ends: str) -> None:
    """An error of one of several ranks: the next start answers with it. Without a known reason: after three starts."""
    server, owner, session, model = opened(tmp_path)
    adam: Any = {"model_id": model, "adam_params": {}}
    sample: Any = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 2}}
    sample["sampling_session_id"] = f"{session}:sample:0"
    server.create_sampler(wire.CreateSampler(session_id=session, sampling_session_seq_id=0), owner)
    ask(server, "optim_step", {**adam, "seq_id": 1})
    ask(server, "optim_step", {**adam, "seq_id": 2})
    for seq in range(2):
        ask(server, "asample", {**sample, "seq_id": seq})
    bad = f"{model}:2", f"{session}:sample:0:1"
    starts, ran = 0, list[str]()
    while True:
        command = server.take(0.0)
        if command is None and not server._samples:
            break
        if command is None:
            continue
        names = [job.id for job in command.jobs]
        if not set(names).isdisjoint(bad):
            starts += 1
            assert starts < 20, names
            if ends == "error":
                server.running.open("a").write(f"{REQUEST_FAILED}planted\n")
            server = Server(ServiceConfig(), Store(tmp_path), server.served)
            continue
        ran += names
        server.finish(
            command, [Sampled([Completion([1], [-1.0], "stop")], None)] if command.method == "sample" else 1.0, None
        )
    assert starts == (2 if ends == "error" else 6)
    assert f"{model}:1" in ran and f"{session}:sample:0:0" in ran
    answers = [server._stored_answer(bad[0], owner).body, server.jobs[bad[1]].answer[1]]
    assert all(REQUEST_FAILED.encode() in answer for answer in answers), answers
    ask(server, "optim_step", {**adam, "seq_id": 3})
    assert run_all(server)[-1] == "step"
    again = Server(ServiceConfig(), Store(tmp_path), server.served)
    assert REQUEST_FAILED.encode() in again.jobs[bad[1]].answer[1]  # type: ignore[index]
    assert "sample" in run_all(again)  # the other one, whose answer nobody has fetched


def squeezed(client: RawClient, is_full: bool) -> Any:
    """A loop whose disk is full for a while: files may have 3,000 bytes, less than a checkpoint, and then none.

    Returns the answers outside this time; those of checkpoints; what these left; and those without room for anything.
    """
    client.open()
    model, hard = client.create(0, seed=1), resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    home = Path(f"{os.environ['SERVICE_OUT']}/service/models/{model}")

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size if is_full else hard, hard))

    def train(seq: int) -> Iterator[bytes]:
        yield client.result(client.send("forward_backward", pass_body(model, seq, data, "cross_entropy")))
        adam = {"learning_rate": 0.02}
        yield client.result(client.send("optim_step", {"model_id": model, "seq_id": seq + 1, "adam_params": adam}))

    def save(seq: int) -> Iterator[bytes]:
        for number, path in enumerate(("save_weights", "save_weights_for_sampler", "save_weights_external")):
            request = {"model_id": model, "seq_id": seq + number, "path": "a", "overwrite": seq > 9}
            yield client.result(client.send(path, request))

    data = make_data(3, "cross_entropy")
    found = [*train(1)]
    try:
        limit(3000)
        failed = [*save(3)]
        left = [path for kind in METHODS for path in (home / kind).iterdir()]
        limit(0)
        body: Any = pass_body(model, 6, data, "cross_entropy")
        refused = [client.ask("forward_backward", body), client.ask("create_session", {})] if is_full else []
        sampler = {"session_id": client.session, "sampling_session_seq_id": 0}
        sample: Any = {"prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {"max_tokens": 3}, "seq_id": 0}
        sample["sampling_session_id"] = f"{client.session}:sample:0"
        refused += [client.ask("create_sampling_session", sampler)] if is_full else []
        limit(hard)
        client.send("create_sampling_session", sampler)
        limit(0)
        refused += [client.ask("asample", sample)] if is_full else []
    finally:
        limit(hard)
    found += [client.result(client.send("asample", sample)), *train(6), *train(8)]
    saved = [json.loads(one) for one in save(10)]
    load = {"model_id": model, "seq_id": 13, "path": saved[0]["path"], "optimizer": True}
    client.result(client.send("load_weights", load))
    return [*found, *train(14)], failed, left, refused


@ranks()
def squeezing(config: Path) -> list[Any]:
    runs = []
    for kills in ([], [4, 8], None):
        out = config.parent / f"squeezed-{kills}"
        os.environ["SERVICE_OUT"] = str(out)
        is_full = kills is not None
        play = functools.partial(squeezed, is_full=is_full)
        runs.append(served(config, out, play, kills or [], *LORA))
    return runs


def test_a_full_disk_costs_the_requests_that_it_has_no_room_for(config: Path) -> None:
    """A checkpoint fails, and leaves nothing. Other requests are refused until there is room: the client comes again."""
    [[*squeezed, (alone, saved, *_)]] = squeezing(1, config=config)
    assert len(alone) == 9 and len(set(alone)) == 9 and not any(b"error" in one for one in saved)
    for found, failed, left, refused in squeezed:
        assert found == alone
        assert [json.loads(one)["category"] for one in failed] == ["server"] * 3 and left == []
        assert [status for status, _ in refused] == [507] * 4 and b"make room" in refused[0][1]


def test_an_answer_that_cannot_be_written_is_computed_again(tmp_path: Path) -> None:
    """The server ends; nobody has seen the answer."""
    server, owner, _, model = opened(tmp_path)
    assert run_all(server) == ["create"]
    ask(server, "optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
    command, job = server.take(0.0), server.jobs[f"{model}:1"]
    assert command is not None
    full = mock.patch.object(Path, "write_bytes", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with full, pytest.raises(OSError, match="No space"):
        server.finish(command, 1.0, None)
    assert job.answer is None and not job.done.is_set()
    again = Server(ServiceConfig(), Store(tmp_path), server.served)
    assert run_all(again) == ["create", "step"]
    assert b"grad_norm" in again._stored_answer(job.id, owner).body


@ranks()
def part_of_loop(config: Path, out: Path, session: str, first: int, last: int, rank: int, overrides: list[str]) -> Any:
    def play(client: RawClient) -> Any:
        client.session = session
        return loop(client, last, rank=rank, first=first), client.session

    return served(config, out, play, [], *overrides)


@pytest.mark.parametrize(
    ("rank", "overrides", "layout"),
    [(0, ["model.exact=true"], []), (3, LORA, LAYOUTS["TP2"][1])],
    ids=["DP2 to 1, exact", "TP2 to 1"],
)
def test_a_restart_with_fewer_ranks(config: Path, rank: int, overrides: list[str], layout: list[str]) -> None:
    """A snapshot of step 2, and the requests of step 3: bit for bit with `model.exact`, else up to rounding."""
    whole: Any = {"config": config, "session": "", "first": 0, "rank": rank, "overrides": overrides}
    [(alone, _)] = part_of_loop(1, **whole, out=config.parent / f"one-{rank}", last=5)
    out = config.parent / f"fewer-{rank}"
    [(begun, session), _] = part_of_loop(2, **{**whole, "overrides": [*overrides, *layout]}, out=out, last=3)
    [(rest, _)] = part_of_loop(1, **{**whole, "session": session, "first": 3}, out=out, last=5)
    if overrides[0] == "model.exact=true":
        assert begun + rest == alone
    norms = [[one["metrics"]["grad_norm"] for one in run if isinstance(one, dict)] for run in (begun + rest, alone)]
    assert len(set(norms[1])) == 5 and norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_equal_seeds_are_equal_samples(tmp_path: Path) -> None:
    """Also of different sampling sessions; without a seed, or with another prompt, they differ."""
    server, owner, session, _ = opened(tmp_path)
    seeds = []
    for number, settings, token in (
        (0, {"seed": 7}, 1),
        (1, {"seed": 7}, 1),
        (0, {}, 1),
        (1, {}, 1),
        (1, {"seed": 7}, 2),
    ):
        server.create_sampler(wire.CreateSampler(session_id=session, sampling_session_seq_id=number), owner)
        sample: Any = {"prompt": {"chunks": [{"tokens": [token]}]}, "sampling_params": {**settings, "stop": []}}
        sample |= {"num_samples": 2, "sampling_session_id": f"{session}:sample:{number}", "seq_id": len(seeds)}
        ask(server, "asample", sample)
        seeds.append(server._samples[-1].request.seeds)
    assert seeds[0] == seeds[1] and len({one for pair in seeds for one in pair}) == 8


def test_samples_do_not_depend_on_how_often_the_client_had_to_ask(tmp_path: Path) -> None:
    """Its sampling_session_seq_id counts attempts to save weights, also those that found no server."""
    seeds = []
    for number in (0, 3):
        server, _, _, model = opened(tmp_path / str(number))
        save = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": number}
        ask(server, "save_weights_for_sampler", save)
        assert run_all(server) == ["create", "snapshot"]
        sampler = json.loads(server._stored_answer(f"{model}:1", next(iter(server.owners.values()))).body)
        sample: Any = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {}, "seq_id": 0}
        ask(server, "asample", {**sample, **sampler})
        seeds.append(server._samples[-1].request.seeds)
    assert seeds[0] == seeds[1]


def test_wrong_json_is_refused_in_words() -> None:
    create = b'{"session_id": "s", "model_seq_id": 0, "base_model": "b", "user_metadata": {"a": %s}}'
    for kind, body, words in (
        (wire.CreateModel, b"{", "^Invalid JSON"),
        (wire.CreateModel, create % b"NaN", "^user_metadata: Out of range float values"),
        (wire.SaveWeights, b'{"model_id": "m", "seq_id": 1, "path": "a/b"}', "^path: a name is 1 to 128 letters"),
        (wire.TextChunk, b'{"tokens": [], "type": "image"}', "^type: only 'encoded_text' is served"),
        (wire.CreateSampler, create % b"1", "; user_metadata: is not served"),
    ):
        with pytest.raises(RequestError, match=words):
            read_json_request(kind, body)
    assert read_json_request(wire.CreateModel, create % b"1.5").user_metadata == {"a": 1.5}


def test_many_wrong_fields_are_only_counted() -> None:
    with pytest.raises(RequestError, match="2001 fields are wrong"):
        read_json_request(wire.OfSession, json.dumps({str(n): n for n in range(2000)}).encode())


def test_connections_and_json_are_bounded(tmp_path: Path) -> None:
    """A connection that has been used and then sends a part of a request; JSON that no request needs."""
    server, *_ = opened(tmp_path)
    server.config = ServiceConfig(port=0)
    client = RawClient("", (tmp_path / "token").read_text().strip())
    with mock.patch.object(http_module, "KEEP_ALIVE_S", 0.3), mock.patch.object(http_module, "HEADERS_S", 0.3):
        http = http_module.HttpServer(server)
        http.start()
        client.url = http.url
        status, content = client.ask("create_session", b"[" * 300_000)
        assert status == 413 and b"max_prompt_length" in content
        with socket.create_connection(http._socket.getsockname()[:2], timeout=10) as raw:
            raw.sendall(b"GET /api/v1/healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert raw.recv(1000).startswith(b"HTTP/1.1 200")
            for _ in range(100):
                try:
                    raw.sendall(b"G")
                    time.sleep(0.05)
                except OSError:
                    break
            else:
                raise AssertionError("the connection stays open")


def test_another_base_model_is_refused_where_models_are(tmp_path: Path) -> None:
    config = load_config(make_service(tmp_path), [f"trainer.output_dir={tmp_path}"], serve.service_defaults)
    store = Store(tmp_path / "service")
    store.write(store.folder / "base.json", {**serve.base_settings(config), "actor.lora.rank": 8})
    serve.check_base(config)  # no models
    store.create_model("x", {})
    with pytest.raises(ConfigError, match=r"actor.lora.rank=None: the models in .* began with 8; set that, or another"):
        serve.check_base(config)
    store.write(store.folder / "base.json", serve.base_settings(config))
    serve.check_base(config)


def test_numbers_that_float32_and_int32_cannot_have_are_refused() -> None:
    body = pass_body("m", 1, make_data(1, "ppo"), "ppo", clip_low_threshold=-1e300)
    with pytest.raises(wire.RequestError, match="finite in float32"):
        wire.read_pass(body, 100, 48)
    with pytest.raises(wire.RequestError, match="tokens"):
        wire.read_json_request(wire.TextChunk, b'{"tokens": [%d]}' % 10**30)


def test_a_dry_run_says_if_the_service_can_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = make_service(tmp_path)
    overrides = (*LORA, "trainer.n_gpus_per_node=2")
    assert serve.serve_training(serve.ServeOptions(config=file, overrides=overrides, dry_run=True), None) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "READY: without --dry-run the service starts"
    wrong = serve.ServeOptions(config=file, overrides=("rollout.temperature=0.5",), dry_run=True)
    with pytest.raises(ConfigError, match="rollout.temperature=0.5: each sampling request has its own"):
        serve.serve_training(wrong, None)
