"""A tiny service: its config, data of the protocol, and its requests in the client's exact form, without the client."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from grpo_megatron.service.losses import NEEDED
from grpo_megatron.service.wire import FLOAT32, INT64, MESSAGE_CLASSES, WireDatum
from tests.runs import SIZES, write_tokenizer
from tests.tiny import make_model

LORA = ["actor.lora.rank=6", "actor.lora.alpha=12"]


def make_service(folder: Path) -> Path:
    """Write a model and `folder`/serve.yaml, the config of a service that trains all weights. Returns the file."""
    make_model(folder / "model", "qwen2", **{**SIZES, "num_hidden_layers": 2})
    write_tokenizer(folder / "model")
    config = {
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"max_prompt_length": 24, "max_response_length": 24},
        "actor": {"ppo_max_token_len_per_gpu": 64},
        "rollout": {"engine": "transformers"},
        "trainer": {"device": "cpu", "output_dir": str(folder / "out")},
        "service": {"port": 0, "base_model": "tiny"},
    }
    (folder / "serve.yaml").write_text(yaml.safe_dump(config))
    return folder / "serve.yaml"


def make_data(count: int, loss: str, seed: int = 0) -> list[WireDatum]:
    """Data of different lengths, with tokens outside the loss, whose targets are not the next tokens."""
    generator = torch.Generator().manual_seed(seed)
    data = []
    for _ in range(count):
        size = int(torch.randint(1, 30, (), generator=generator))
        tokens = torch.randint(0, SIZES["vocab_size"], (size + 1,), generator=generator).numpy()
        masked = size // 3
        targets = tokens[1:].copy()
        targets[:masked] = 0
        columns = {
            "weights": torch.rand(size, generator=generator),
            "advantages": torch.randn(size, generator=generator),
            "logprobs": -4.6 + 0.3 * torch.randn(size, generator=generator),
            "sequence_ratio_mask": torch.ones(size),
        }
        for column in columns.values():
            column[:masked] = 0
        chosen = {name: column.numpy() for name, column in columns.items() if name in NEEDED[loss]}
        data.append(WireDatum(tokens[:-1], targets, chosen))
    return data


def pass_body(model_id: str, seq_id: int, data: list[WireDatum], loss: str, **settings: float) -> bytes:
    """A ForwardBackwardRequest, as the client writes it."""
    message = MESSAGE_CLASSES["ForwardBackwardRequest"](model_id=model_id, seq_id=seq_id, loss_fn=loss)
    for name, value in settings.items():
        message.loss_fn_config_v2[name].number = value
    for datum in data:
        part = message.data.add()
        part.model_input.add().encoded_text.tokens = datum.tokens.astype("<i4").tobytes()
        for name, column in {"target_tokens": datum.targets, **datum.columns}.items():
            tensor, is_int = part.loss_fn_inputs[name], name == "target_tokens"
            tensor.dtype = INT64 if is_int else FLOAT32
            tensor.dense = np.asarray(column, "<i8" if is_int else "<f4").tobytes()
            tensor.shape.append(len(column))
    return bytes(message.SerializeToString())


class RawClient:
    """Speaks the protocol by hand. `url` may change: a request that finds nobody is sent again for a while."""

    def __init__(self, url: str, token: str) -> None:
        self.url, self.token = url, token
        self.session = ""

    def ask(self, path: str, body: Any = None, method: str = "POST", **headers: str) -> tuple[int, bytes]:
        """Status and body of the answer. `body`: bytes, or what becomes JSON."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {"X-API-Key": self.token, "Content-Type": "application/json", **headers}
        for _ in range(300):
            request = urllib.request.Request(f"{self.url}/api/v1/{path}", data, headers, method=method)
            try:
                with urllib.request.urlopen(request, timeout=3) as response:
                    return response.status, response.read()
            except urllib.error.HTTPError as error:
                return error.code, error.read()
            except OSError:
                time.sleep(0.1)
        raise AssertionError(f"no server at {self.url}")

    def send(self, path: str, body: Any) -> Any:
        """The JSON of a good answer."""
        status, content = self.ask(path, body)
        assert status == 200, (path, status, content)
        return json.loads(content)

    def result(self, future: Any) -> bytes:
        """The answer to a request, waited for."""
        while True:
            status, content = self.ask("retrieve_future", {"request_id": future["request_id"]})
            if status != 408:
                assert status == 200, content
                return content

    def open(self) -> None:
        """Begin a session."""
        self.session = self.send("create_session", {"tags": [], "sdk_version": "0.38.0"})["session_id"]

    def create(self, number: int, **lora: Any) -> str:
        """Begin a model; returns its id."""
        body: Any = {"session_id": self.session, "model_seq_id": number, "base_model": "tiny"}
        body |= {"lora_config": {"rank": 3, **lora}}
        return str(json.loads(self.result(self.send("create_model", body)))["model_id"])


def read(name: str, content: bytes) -> Any:
    """A protobuf answer; JSON is the answer to a failed request."""
    assert content[:1] != b"{", content
    message = MESSAGE_CLASSES[name]()
    message.ParseFromString(content)
    return message


def loop(client: RawClient, steps: int, seed: int = 0, rank: int = 3, first: int = 0) -> list[Any]:
    """A small RL loop: two passes, a step, weights for a sampler, samples. Returns all numbers of the answers.

    `first` > 0: it goes on in the client's session.
    """
    if first == 0:
        client.open()
        client.create(0, seed=seed, rank=rank)
    model, found, seq = f"{client.session}:train:0", list[Any](), 4 * first
    for step in range(first, steps):
        futures: list[tuple[str, Any]] = []
        for part in range(2):
            data = make_data(3, "cross_entropy", seed=10 * step + part)
            seq += 1
            body = pass_body(model, seq, data, "cross_entropy")
            futures.append(("ForwardBackwardOutput", client.send("forward_backward", body)))
        seq += 2
        adam = {"learning_rate": 0.02}
        futures.append(("", client.send("optim_step", {"adam_params": adam, "model_id": model, "seq_id": seq - 1})))
        save = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": step}
        sampler = json.loads(client.result(client.send("save_weights_for_sampler", save)))["sampling_session_id"]
        for number in range(2):
            prompt = {"chunks": [{"tokens": [5, 9, number], "type": "encoded_text"}]}
            sample: Any = {"prompt": prompt, "num_samples": 2, "sampling_params": {"max_tokens": 6}}
            sample |= {"sampling_session_id": sampler, "seq_id": number, "prompt_logprobs": True}
            futures.append(("SampleResponse", client.send("asample", sample)))
        for kind, future in futures:
            content = client.result(future)
            found.append(str(read(kind, content)) if kind else json.loads(content))
    return found
