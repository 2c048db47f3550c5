"""The policy as a Hugging Face folder that transformers and vLLM load: shards, config.json, tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.types import WeightBucket

COMPANIONS = (  # what travels with the weights, where the source folder has it
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def save_hf(
    stream: Iterator[WeightBucket],
    source: Path,
    tokenizer_source: Path,
    target: Path,
    mesh: Mesh,
    shard_bytes: int = 4 << 30,
) -> None:
    """Collective: drain `stream`; rank 0 writes `target` through a temporary sibling, renamed when complete.

    The config.json is the source's own, with its dtype set to the tensors'; an existing `target` is replaced. Raises
    RankError on every rank when rank 0 cannot write.
    """
    writer = _Writer(target, shard_bytes) if mesh.rank == 0 else None
    for bucket in stream:
        problem = None
        if writer is not None:
            try:
                writer.add(bucket)
            except OSError as error:
                problem = f"cannot write {target}: {error}"
        mesh.agree(problem)
    problem = None
    if writer is not None:
        try:
            writer.finish(source, tokenizer_source)
        except OSError as error:
            problem = f"cannot write {target}: {error}"
    mesh.agree(problem)


class _Writer:
    def __init__(self, target: Path, shard_bytes: int) -> None:
        self.target, self.shard_bytes = target, shard_bytes
        self.partial = target.with_name(f".{target.name}.partial")
        self.held: dict[str, Tensor] = {}
        self.shards: list[list[str]] = []
        self.total, self.dtype = 0, "float32"
        shutil.rmtree(self.partial, ignore_errors=True)

    def add(self, bucket: WeightBucket) -> None:
        for name, tensor in bucket:
            self.held[name] = tensor.detach().cpu().contiguous()
            self.dtype = str(tensor.dtype).removeprefix("torch.")
        if sum(t.nbytes for t in self.held.values()) >= self.shard_bytes:
            self._flush()

    def _flush(self) -> None:
        self.partial.mkdir(parents=True, exist_ok=True)
        save_file(self.held, self.partial / f"{len(self.shards)}.safetensors", metadata={"format": "pt"})
        self.total += sum(t.nbytes for t in self.held.values())
        self.shards.append(list(self.held))
        self.held = {}

    def finish(self, source: Path, tokenizer_source: Path) -> None:
        if self.held:
            self._flush()
        count = len(self.shards)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        if count == 1:
            names = ["model.safetensors"]
        for i, name in enumerate(names):
            (self.partial / f"{i}.safetensors").rename(self.partial / name)
        if count > 1:
            weight_map = {t: name for name, tensors in zip(names, self.shards, strict=True) for t in tensors}
            index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
            (self.partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        config = json.loads((source / "config.json").read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = self.dtype
        (self.partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for name in COMPANIONS:
            folder = source if name == "generation_config.json" else tokenizer_source
            if (folder / name).exists():
                shutil.copyfile(folder / name, self.partial / name)
        if self.target.exists():
            shutil.rmtree(self.target)
        self.partial.rename(self.target)
