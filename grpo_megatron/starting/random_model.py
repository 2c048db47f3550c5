"""A Hugging Face folder with random weights, drawn from a seed: what the examples train where no real model is at hand."""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.data import arithmetic
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.reading import read_json

PRESETS: dict[str, dict[str, Any]] = {
    "quickstart": {  # 405 k parameters: learns data/arithmetic.py in about two minutes on two cores
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 128,
        "initializer_range": 0.05,
        "intermediate_size": 384,
        "max_position_embeddings": 128,
        "model_type": "qwen2",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": arithmetic.VOCABULARY_SIZE,
    },
}
COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class SpecialTokens:
    """Tokens to name in tokenizer_config.json; None: as the tokenizer's folder has them."""

    eos: str | None = None
    pad: str | None = None


def write_model(
    raw: dict[str, Any],
    out: Path,
    tokenizer_dir: Path,
    seed: int,
    std: float,
    overrides: list[str],
    special: SpecialTokens | None = None,
) -> None:
    """Write config.json, model.safetensors and the tokenizer's files into the existing folder `out`.

    Every tensor of two or more dimensions is normal(0, std) in float32, drawn from (seed, its name). The others keep
    their initial values (biases 0, norms 1; Gemma's norms 0, which means 1). config.json is `raw` with the overrides, dtype
    float32 and the special ids of the tokenizer. Raises ConfigError.
    """
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    quiet: Any = logging.disable_progress_bar
    build: Any = AutoModelForCausalLM.from_config
    quiet()
    for file in COPIED_FILES:
        if (tokenizer_dir / file).exists():
            shutil.copyfile(tokenizer_dir / file, out / file)
    named = _name_tokens(out, special or SpecialTokens())
    tokenizer = load_tokenizer(out if named else tokenizer_dir, DataConfig())
    if "model_type" not in raw:
        raise ConfigError("the model config has no model_type; is it a Hugging Face config.json?")
    raw = copy.deepcopy(raw)
    if named:  # else transformers warns that the tokenizer may be one of Mistral's
        raw.setdefault("transformers_version", transformers.__version__)
    raw["dtype" if "dtype" in raw else "torch_dtype"] = "float32"  # loaders use the dtype of the config
    for role in ("bos", "eos", "pad"):
        if getattr(tokenizer, f"{role}_token_id") is not None:
            raw[f"{role}_token_id"] = getattr(tokenizer, f"{role}_token_id")
    _apply_overrides(raw, overrides)
    needed = max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)  # ids may have gaps
    if raw.get("vocab_size", needed) < needed:
        raise ConfigError(
            f"vocab_size={raw['vocab_size']} does not fit the tokenizer in {str(tokenizer_dir)!r}, whose largest id is"
            f" {needed - 1}; add --set vocab_size={needed}"
        )
    try:
        model = build(AutoConfig.for_model(**copy.deepcopy(raw)), dtype=torch.float32)
    except Exception as error:  # inconsistent sizes raise many types of error
        raise ConfigError(f"transformers cannot build this config: {type(error).__name__}: {error}") from error
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # a tied tensor comes once, under its first name
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=_generator(seed, name)) * std)
    model.save_pretrained(out, max_shard_size="1000GB")
    (out / "config.json").write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n")
    shutil.copymode(out / "config.json", out / "model.safetensors")  # transformers makes it 0600
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, vocabulary {model.config.vocab_size}")


def _name_tokens(folder: Path, special: SpecialTokens) -> bool:
    """Name special tokens in the folder's tokenizer_config.json. Returns whether there are any to name."""
    from tokenizers import Tokenizer

    given = {f"{role}_token": token for role, token in (("eos", special.eos), ("pad", special.pad)) if token}
    if not given:
        return False
    if not (folder / "tokenizer.json").exists():
        raise ConfigError("--eos-token and --pad-token need a tokenizer folder with tokenizer.json; leave them out")
    known = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for key, token in given.items():
        if known.token_to_id(token) is None:
            some = ", ".join(repr(added.content) for added in list(known.get_added_tokens_decoder().values())[:8])
            raise ConfigError(
                f"--{key.replace('_', '-')} {token!r} is no token of the tokenizer{f'; it has {some}' if some else ''}"
            )
    file = folder / "tokenizer_config.json"
    about = read_json(file) if file.exists() else {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps({**about, **given}, indent=2, sort_keys=True) + "\n")
    return True


def _generator(seed: int, name: str) -> Any:
    import torch

    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _apply_overrides(raw: dict[str, Any], overrides: list[str]) -> None:
    """`key=value` or `table.key=value`, the value in JSON or else a string. Raises ConfigError for an unknown key."""
    from transformers import AutoConfig

    try:
        known = {*raw, *AutoConfig.for_model(raw["model_type"]).to_dict()}
    except ValueError as error:
        raise ConfigError(f"transformers knows no model_type {raw['model_type']!r}") from error
    for override in overrides:
        key, equals, text = override.partition("=")
        top, *rest = key.split(".")
        if not equals:
            raise ConfigError(f"--set {override!r} is not of the form key=value")
        if top not in known:
            close = difflib.get_close_matches(top, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"--set {override!r}: a {raw['model_type']} config has no key {top!r}{hint}")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text
        node, path = raw, [top, *rest]
        for part in path[:-1]:
            node[part] = node.get(part) or {}
            node = node[part]
            if not isinstance(node, dict):
                raise ConfigError(f"--set {override!r}: {part!r} is a value, not a table")
        node[path[-1]] = value
