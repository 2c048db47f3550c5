"""The public client and its cookbook, unmodified, against the command `serve-training` in a process of its own.

The cookbook is in the lock without tml-renderers, which it imports for Inkling and Kimi K3 only: no loop here does.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from tests.tiny import make_model, read_tensors

pytest.importorskip("tinker")
ROOT = Path(__file__).resolve().parents[2]
# The page's config, command of the server, and commands of the client, which run here as they stand.
CONFIG, SERVE, CLIENT, *_ = re.findall(r"```\w+\n(.*?)```", (ROOT / "docs/service.md").read_text(), re.DOTALL)
NAME: str = yaml.safe_load(CONFIG)["service"]["base_model"]  # a base model: its renderer in the cookbook is plain text
# What the page's config has for a large model, for a tiny one.
SMALL = (
    f"model.path={NAME}",
    "model.dtype=float32",
    "data.max_prompt_length=1536",
    "data.max_response_length=128",
    "actor.ppo_max_token_len_per_gpu=8192",
    "rollout.engine=transformers",
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=1",
    "service.port=0",
    "service.snapshot_steps=4",
)
GUESSES = [" Guess: 5", " Guess 5"]  # tokens; number guessing reads the first one only
QUESTION = " Provide a numerical answer without units, written inside \\boxed{}."


def write_byte_model(folder: Path, hidden: int) -> None:
    """A tiny model whose tokens are bytes, the end tokens of Qwen's tokenizer, and GUESSES."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    sizes = {"hidden_size": hidden, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    make_model(folder, "qwen2", **sizes, vocab_size=261, max_position_embeddings=2048)
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], pad_token=special[0])
    fast.add_special_tokens({"additional_special_tokens": special[1:]})
    fast.add_tokens(GUESSES)
    fast.save_pretrained(folder)


def prefer_guesses(folder: Path) -> None:
    """Change the model: whatever it has read, it answers one of GUESSES, and the second four times as often."""
    tensors = read_tensors(folder)
    tensors["model.embed_tokens.weight"][:, :2] = torch.tensor([3.0, 0.0])
    tensors["lm_head.weight"][-2:, :2] = torch.tensor([[1.3, 1.0], [1.5, -1.0]])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def write_rows(folder: Path) -> None:
    """Stand-ins for the cookbook's data sets, where `load_dataset` finds them by their names in the current folder."""
    rng = random.Random(0)
    chats, sums = folder / "HuggingFaceH4/no_robots", folder / "openai/gsm8k"
    for path in (chats, sums):
        path.mkdir(parents=True)
    rows = [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"{n} {n}"}]}
        for n in (rng.randrange(100) for _ in range(96))
    ]
    (chats / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"question": f"What is {n % 3}+{2 - n % 3}?", "answer": "sum\n#### 2"} for n in range(400)]
    (sums / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (sums / "README.md").write_text("---\nconfigs:\n- config_name: main\n  data_files: train.jsonl\n---\n")


def page_command(text: str, words: str, *options: str) -> list[str]:
    """A block of the page as a command. `words`, with which its last line begins, get further options."""
    name, _, rest = words.partition(" ")
    program = shlex.join([sys.executable, *rest.split()])
    function = f'{name}() {{ exec {program} "$@" {shlex.join(options)}; }}'
    return ["bash", "-c", f"set -e\n{function}\n{text}"]


class Service:
    """`serve-training` in a process. The current folder of clients is `folder`."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder, self.out, self.overrides = folder, folder / "outputs/service", overrides
        self.start()

    def start(self) -> None:
        command = page_command(SERVE, "grpo-megatron -m grpo_megatron", *SMALL, *self.overrides)
        log = (self.folder / "log").open("a")
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        (self.out / "service" / "url").unlink(missing_ok=True)
        self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=self.folder)
        while not (self.out / "service" / "url").exists():
            assert self.process.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.1)

    def env(self) -> dict[str, str]:
        url, token = ((self.out / "service" / name).read_text().strip() for name in ("url", "token"))
        offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(self.folder / "cache")}
        return {**os.environ, **offline, "TINKER_BASE_URL": url, "TINKER_API_KEY": token, "PYTHONPATH": str(ROOT)}

    def page_client(self, *options: str) -> list[str]:
        """The page's client with further options."""
        port = (self.out / "service" / "url").read_text().strip().rpartition(":")[2]
        return page_command(CLIENT.replace(":8400", f":{port}"), "python", *options)

    def run(self, *arguments: str) -> str:
        """Returns what a client prints: the arguments of Python, or a command of bash."""
        command = [*arguments] if arguments[0] == "bash" else [sys.executable, *arguments]
        options = {"text": True, "cwd": self.folder, "timeout": 900}
        done = subprocess.run(command, env=self.env(), stdout=-1, stderr=subprocess.STDOUT, check=False, **options)  # type: ignore[call-overload]
        assert done.returncode == 0, done.stdout[-6000:] + (self.folder / "log").read_text()[-3000:]
        return str(done.stdout)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


def make_folder(folder: Path, hidden: int = 64) -> None:
    write_byte_model(folder / NAME, hidden)
    write_rows(folder)
    (folder / "serve.yaml").write_text(CONFIG)


@pytest.fixture
def lora(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Service]:
    overrides = getattr(request, "param", ())
    make_folder(tmp_path, 128 if overrides else 64)  # vLLM's Qwen2 has heads of hidden / 4
    service = Service(tmp_path, "actor.lora.alpha=12", *overrides)
    yield service
    assert service.stop() == 0, (tmp_path / "log").read_text()
    assert "stopped by a signal; the same command goes on" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    "lora",
    [
        (),
        pytest.param(("rollout.engine=vllm",), marks=pytest.mark.soak),
        pytest.param(("rollout.engine=vllm", "actor.lora.rank=null"), marks=pytest.mark.soak),
    ],
    ids=["transformers", "vllm", "vllm, all weights"],
    indirect=True,
)
@pytest.mark.slow
def test_the_public_client_runs_unmodified(lora: Service) -> None:
    is_whole = "actor.lora.rank=null" in lora.overrides
    path = re.findall("tinker://.*", lora.run("-m", "tests.service.client_calls", NAME, "0" if is_whole else "4"))[0]
    exported = lora.out / "service" / "models" / path.removeprefix("tinker://")
    files = {"config.json", "model.safetensors"} if is_whole else {"adapter_config.json", "adapter_model.safetensors"}
    assert files <= {file.name for file in exported.iterdir()}


def metrics(folder: Path, name: str) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


@pytest.mark.slow
def test_the_cookbooks_supervised_and_multi_turn_loops_learn(tmp_path: Path) -> None:
    pytest.importorskip("tinker_cookbook")
    make_folder(tmp_path)
    prefer_guesses(tmp_path / NAME)
    lora = Service(tmp_path, "actor.lora.alpha=12")
    options = [f"model_name={NAME}", "learning_rate=1e-2"]
    log = lora.folder / "sl"
    lora.run("-m", "tinker_cookbook.recipes.sl_loop", *options, f"log_path={log}", "batch_size=8", "lora_rank=8")
    losses = metrics(log, "train_mean_nll")
    assert len(losses) == 12 and sum(losses[-3:]) < 0.95 * sum(losses[:3]), losses
    options += ["group_size=4", "batch_size=2", "max_tokens=1", "max_steps=4", "eval_every=0"]
    log = lora.folder / "guess"
    options += ["renderer_name=role_colon", f"log_path={log}"]
    lora.run("-m", "tinker_cookbook.recipes.multiplayer_rl.guess_number.train", *options)
    turns, rewards = metrics(log, "env/all/turns_per_episode"), metrics(log, "env/all/reward/total")
    assert turns == [10.0] * 4 and rewards[-1] > rewards[0] + 2, rewards
    assert lora.stop() == 0


TEACH = f"""
import json
import random
import tinker
from tinker import types
from tinker_cookbook import model_info, renderers
from tinker_cookbook.tokenizer_utils import get_tokenizer

tokenizer = get_tokenizer({NAME!r})
renderer = renderers.get_renderer(model_info.get_recommended_renderer_name({NAME!r}), tokenizer)
example = "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y."
example += " We have r's at positions 3, 8, and 9. \\\\boxed{{3}}"
chat = [{{"role": "user", "content": "How many r's are in strawberry?" + {QUESTION!r}}}]
chat.append({{"role": "assistant", "content": example}})
client = tinker.ServiceClient().create_lora_training_client(base_model={NAME!r}, rank=0).result()
rng = random.Random(1)

def datum():
    question = {{"role": "user", "content": f"What is {{rng.randrange(3)}}+{{rng.randrange(3)}}?" + {QUESTION!r}}}
    prompt = renderer.build_generation_prompt([*chat, question]).to_ints()
    answer = tokenizer.encode(f" \\\\boxed{{{{{{rng.randrange(4)}}}}}}" + renderer.get_stop_sequences()[0])
    weights = [0.0] * (len(prompt) - 1) + [1 / 16 / len(answer)] * len(answer)
    inputs = {{"target_tokens": (prompt + answer)[1:], "weights": weights}}
    return types.Datum(model_input=types.ModelInput.from_ints((prompt + answer)[:-1]), loss_fn_inputs=inputs)

for step in range(60):
    client.forward_backward([datum() for _ in range(16)], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=5e-3 if step < 40 else 1e-3, grad_clip_norm=1.0)).result()
record = {{"name": "000000", "batch": 0, "state_path": client.save_state("taught").result().path}}
for name in ("rl", "killed"):
    open(f"{{name}}/checkpoints.jsonl", "w").write(json.dumps(record) + "\\n")
"""


def learn(tmp_path: Path) -> tuple[Service, list[str], list[float]]:
    """A model that knows the form of an answer, and that all of four digits are as likely, learns that 2 is right.

    Returns the service, the options of the page's client without its folder, and the rewards.
    """
    pytest.importorskip("tinker_cookbook")
    make_folder(tmp_path)
    for name in ("rl", "killed"):
        (tmp_path / name).mkdir()
    service = Service(tmp_path, "~actor.lora.rank")
    service.run("-c", TEACH)
    options = ["batch_size=8", "group_size=8", "learning_rate=3e-3", "max_steps=14", "max_tokens=16", "save_every=5"]
    service.run(*service.page_client(*options, f"log_path={tmp_path / 'rl'}"))
    rewards = metrics(tmp_path / "rl", "reward/total")
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.9, rewards
    return service, options, rewards


@pytest.mark.slow
def test_the_cookbooks_rl_loop_learns(tmp_path: Path) -> None:
    service, *_ = learn(tmp_path)
    assert service.stop() == 0


@pytest.mark.soak
def test_the_cookbooks_rl_loop_survives_a_kill_bit_for_bit(tmp_path: Path) -> None:
    service, options, rewards = learn(tmp_path)
    port = (service.out / "service" / "url").read_text().strip().rpartition(":")[2]
    command = service.page_client(*options, f"log_path={tmp_path / 'killed'}")
    with (tmp_path / "killed.log").open("w") as log:
        client = subprocess.Popen(command, env=service.env(), cwd=tmp_path, stdout=log, stderr=log)
        while (
            not (tmp_path / "killed" / "metrics.jsonl").exists()
            or len(metrics(tmp_path / "killed", "reward/total")) < 6
        ):
            assert client.poll() is None, (tmp_path / "killed.log").read_text()[-3000:]
            time.sleep(0.05)
        assert service.stop(signal.SIGKILL) == -signal.SIGKILL
        service.overrides += (f"service.port={port}",)
        service.start()
        assert client.wait(600) == 0, (tmp_path / "killed.log").read_text()[-3000:]
    assert service.stop() == 0
    assert metrics(tmp_path / "killed", "reward/total") == rewards
    assert metrics(tmp_path / "killed", "grad_norm") == metrics(tmp_path / "rl", "grad_norm")
