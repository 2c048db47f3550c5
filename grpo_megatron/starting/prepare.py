"""Make the inputs of a run: the generated data of an example, or a Hugging Face folder with random weights.

OUT is complete or absent (storage/files.py). --force replaces an existing one.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.config.options import Argument, Option, Options
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.registry import did_you_mean
from grpo_megatron.starting.generated import write_example
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.files import new_folder
from grpo_megatron.untrusted import ReadError, read_json


class PrepareOptions(Options):
    """The command `prepare`, whose actions have the options. `marker`: a file that a folder of the action always has."""

    program = "prepare"
    description = "Make the inputs of a run: an example's data, or a model with random weights."
    epilog = """
  grpo-megatron prepare arithmetic OUT    for examples/quickstart.yaml
  grpo-megatron prepare feedback OUT      for examples/reward_models/
  grpo-megatron prepare products OUT      for examples/agents/calculator.yaml
  grpo-megatron prepare two_hops OUT      for examples/agents/search.yaml
  grpo-megatron prepare shell OUT         for examples/agents/shell.yaml
  grpo-megatron prepare model OUT --preset quickstart --tokenizer DATA/tokenizer
  grpo-megatron prepare model CONFIG_JSON OUT --tokenizer DIR \\
      --set num_hidden_layers=2 --set hidden_size=128 \\
      --set num_attention_heads=4 --set num_key_value_heads=2
"""
    action_metavar = "WHAT"
    marker: ClassVar[str] = "sft.jsonl"
    out: Annotated[Path, Argument("a new folder", "OUT")]
    seed: Annotated[int, Option("of what is sampled (default 0)", "N", place=1)] = 0
    force: Annotated[bool, Option("replace OUT if it exists", place=1)] = False

    def write(self, folder: Path) -> None:
        """Write the files into an existing folder. Raises ConfigError."""
        raise NotImplementedError


class DataOptions(PrepareOptions):
    """The options of `prepare` for an example's data. `example`: its name in EXAMPLES."""

    example: ClassVar[str]
    num_train: Annotated[int, Option("rows (default 4096)", "N")] = 4096
    num_val: Annotated[int, Option("held-out rows (default 256)", "N")] = 256

    def write(self, folder: Path) -> None:
        """Write the rows and the tokenizer."""
        write_example(self.example, folder, self.seed, self.num_train, self.num_val)


class ArithmeticOptions(DataOptions):
    """`prepare arithmetic`."""

    example, summary = "arithmetic", "the quickstart's jsonl files and tokenizer/"


class FeedbackOptions(DataOptions):
    """`prepare feedback`."""

    example, summary = "feedback", "the reward model examples' jsonl files and tokenizer/"
    marker = "pairs.jsonl"


class ProductsOptions(DataOptions):
    """`prepare products`."""

    example, summary = "products", "the calculator example's jsonl files and tokenizer/"


class TwoHopsOptions(DataOptions):
    """`prepare two_hops`."""

    example, summary = "two_hops", "the search example's jsonl files and tokenizer/"


class ShellOptions(DataOptions):
    """`prepare shell`."""

    example, summary = "shell", "the shell example's task folders, jsonl file and tokenizer/"


class ModelOptions(PrepareOptions):
    """The options of `prepare model`."""

    summary = "a Hugging Face folder with random weights"
    marker = "config.json"
    config: Annotated[Path | None, Argument("a config.json; or use --preset", "CONFIG_JSON", place=-1)] = None
    preset: Annotated[Literal["quickstart"] | None, Option("a built-in config instead of a file")] = None
    tokenizer: Annotated[Path, Option("folder whose tokenizer files are copied", "DIR")]
    eos_token: Annotated[str | None, Option("for a tokenizer folder that names none, e.g. '<|im_end|>'", "TOKEN")] = (
        None
    )
    pad_token: Annotated[str | None, Option("the same for padding", "TOKEN")] = None
    std: Annotated[float, Option("standard deviation of every matrix (default 0.05)", "X")] = 0.05
    set: Annotated[tuple[str, ...], Option("change a key of the config", "KEY=VALUE", repeated=True)] = ()

    def problems(self) -> Iterator[str]:
        """Yields two models, or none."""
        if (self.config is None) == (self.preset is None):
            yield "give either CONFIG_JSON or --preset (model [CONFIG_JSON] OUT [--preset NAME] --tokenizer DIR)"

    def write(self, folder: Path) -> None:
        """Write the model and the tokenizer."""
        write_model(folder, self)


PrepareOptions.actions = {
    "arithmetic": ArithmeticOptions,
    "feedback": FeedbackOptions,
    "products": ProductsOptions,
    "two_hops": TwoHopsOptions,
    "shell": ShellOptions,
    "model": ModelOptions,
}


def prepare_inputs(options: PrepareOptions) -> int:
    """Write the folder; returns the exit code. Raises ConfigError."""
    out = options.out.absolute()
    if out.exists() and not options.force:
        raise ConfigError(f"{str(out)!r} exists; give another folder, or --force to replace it")
    if out.exists() and not (out / options.marker).is_file():
        raise ConfigError(
            f"{str(out)!r} has no {options.marker}: it was not made by this command, and --force would delete it"
        )
    try:
        with new_folder(out) as folder:
            options.write(folder)
    except StorageError as error:
        raise ConfigError(str(error)) from error
    print(f"wrote {options.out}")
    return 0


# -- a model with random weights, sampled from a seed ---------------------------------------------------------------------

# 405 k parameters: learns the sums of grpo_megatron/starting/generated.py in about two minutes on two cores
QUICKSTART_MODEL = Path(__file__).with_name("quickstart.json")
_TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt"
)
COPIED_FILES = (*_TOKENIZER_FILES.split(), "tokenizer.model", "chat_template.jinja")


def write_model(out: Path, options: ModelOptions) -> None:
    """Write config.json, model.safetensors and the tokenizer's files into the existing folder `out`.

    Every tensor of two or more dimensions is normal(0, std) in float32, sampled from (seed, its name). The others keep
    their initial values (biases 0, norms 1; Gemma's norms 0, which means 1). config.json is the preset, or the given file, with
    the overrides, dtype float32 and the special ids of the tokenizer. Raises ConfigError.
    """
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    raw = _read_config(options.config or QUICKSTART_MODEL)
    tokenizer_dir = options.tokenizer
    build: Any = AutoModelForCausalLM.from_config
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    for file in COPIED_FILES:
        if (tokenizer_dir / file).exists():
            shutil.copyfile(tokenizer_dir / file, out / file)
    named = _name_tokens(out, options)
    try:
        tokenizer = load_tokenizer(out if named else tokenizer_dir, DataConfig())
    except ConfigError as error:
        text = str(error).partition(", so no response could end; ")
        remedy = "name one: --eos-token TOKEN" if text[1] else ""
        raise ConfigError(
            "".join(text[:2]).replace("set model.tokenizer_path to", "--tokenizer names") + remedy
        ) from error
    if "model_type" not in raw:
        raise ConfigError("the model config has no model_type; is it a Hugging Face config.json?")
    if named:  # else transformers warns that the tokenizer may be one of Mistral's
        raw.setdefault("transformers_version", transformers.__version__)
    raw["dtype" if "dtype" in raw else "torch_dtype"] = "float32"  # loaders use the dtype of the config
    for role in ("bos", "eos", "pad"):
        if getattr(tokenizer, f"{role}_token_id") is not None:
            raw[f"{role}_token_id"] = getattr(tokenizer, f"{role}_token_id")
    _apply_overrides(raw, options.set)
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
                digest = hashlib.sha256(f"{options.seed}/{name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * options.std)
    model.save_pretrained(out, max_shard_size="1000GB")
    (out / "config.json").write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n")
    shutil.copymode(out / "config.json", out / "model.safetensors")  # transformers makes it 0600
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, vocabulary {model.config.vocab_size}")


def _name_tokens(folder: Path, options: ModelOptions) -> bool:
    """Name special tokens in the folder's tokenizer_config.json. Returns whether there are any to name."""
    from tokenizers import Tokenizer

    given = {name: token for name in ("eos_token", "pad_token") if (token := getattr(options, name))}
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


def _apply_overrides(raw: dict[str, Any], overrides: Sequence[str]) -> None:
    """Applies `key=value` or `table.key=value`, the value in JSON or else a string. Raises ConfigError for an unknown key."""
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
            text = f"--set {override!r}: a {raw['model_type']} config has no key {top!r}"
            raise ConfigError(text + did_you_mean(top, known))
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


def _read_config(path: Path) -> dict[str, Any]:
    try:
        raw = read_json(path)
    except (OSError, ReadError) as error:
        raise ConfigError(f"cannot read the model config {str(path)!r}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"the model config {str(path)!r} is not a JSON object")
    return raw
