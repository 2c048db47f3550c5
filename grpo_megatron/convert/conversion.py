"""The two conversions. All checks come before the first byte is written; only input hashes are compared during writing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from grpo_megatron.convert import ConvertError, listing_error
from grpo_megatron.convert.hf import HFFolder, write_shards
from grpo_megatron.convert.layout import RELEASE, tracked_folder, write_tracker
from grpo_megatron.convert.megatron import FORMAT_FILE, MegatronFolder, write_checkpoint
from grpo_megatron.convert.output import Progress, check_target, output_folder
from grpo_megatron.convert.source import Source
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.heads.folder import WHAT
from grpo_megatron.reading import path_problem, read_json, shown, special_file_in
from grpo_megatron.storage.atomic import is_partial
from grpo_megatron.storage.manifest import MANIFEST_FILE, write_manifest
from grpo_megatron.storage.run_files import CRITIC_FOLDER, REWARD_MODEL_FOLDER, STEP_FILE

# -- The files that are copied with the weights (tokenizer, chat template, generation config, licence); a tokenizer chec

WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".gguf", ".onnx", ".distcp", ".npz"}
CODE = {".py", ".pyc", ".so", ".sh"}  # never copied: a loader with trust_remote_code would run it


def companions(folder: Path) -> list[Path]:
    """Files that are neither weights nor code. config.json is not among them: its dtype may change."""
    skipped = WEIGHTS | CODE
    files = [p for p in sorted(folder.iterdir()) if p.is_file() and not p.name.startswith(".")]
    files += sorted((folder / "chat_templates").glob("*.jinja"))  # where transformers puts named templates
    written_anew = {"config.json", MANIFEST_FILE, "trainer.json", "metadata.json"}
    return [
        p
        for p in files
        if p.suffix not in skipped and p.name not in written_anew and not p.name.endswith(".index.json")
    ]


def copy_companions(source: Path, target: Path) -> None:
    """Copy the `companions` of one folder to another."""
    for path in companions(source):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


def check_tokenizer(folder: Path, vocab_size: int) -> None:
    """Raise ConvertError unless every tokenizer id has a row of the embedding. A folder without a tokenizer passes."""
    problems = []
    for name, read in (("tokenizer.json", _fast), ("added_tokens.json", _added), ("tokenizer.model", _sentencepiece)):
        path = folder / name
        if path.exists():
            largest = read(path)
            if type(largest) is not int:
                problems.append(f"{name} has the id {shown(largest)}, which is no integer")
                continue
            if largest >= vocab_size:
                problems.append(
                    f"{name} has id {largest}, the embedding has {vocab_size} rows (vocab_size of config.json)"
                )
    if problems:
        raise listing_error(f"the tokenizer in {str(folder)!r} does not fit the model:", problems)


def _json(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise ConvertError(f"{path}: not readable JSON ({error})") from error


def _fast(path: Path) -> int:
    content = _json(path)
    try:
        vocab = content["model"]["vocab"]
        ids = list(vocab.values()) if isinstance(vocab, dict) else range(len(vocab))
        return max([*ids, *(token["id"] for token in content.get("added_tokens") or [])], default=-1)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConvertError(f"{path}: not a tokenizer ({type(error).__name__}: {error})") from error


def _added(path: Path) -> int:
    try:
        return max(_json(path).values(), default=-1)
    except (TypeError, AttributeError) as error:
        raise ConvertError(f"{path}: not a table of added tokens ({error})") from error


def _sentencepiece(path: Path) -> int:
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise ConvertError(f"{path}: to check its size, install the package sentencepiece") from error
    try:
        return int(SentencePieceProcessor(model_file=str(path)).get_piece_size()) - 1
    except (RuntimeError, OSError) as error:
        raise ConvertError(f"{path}: not a SentencePiece model ({str(error).splitlines()[0]})") from error


PART_FOLDERS = (CRITIC_FOLDER, REWARD_MODEL_FOLDER)  # of a training step, besides the policy
EXPORT_FOLDER = "hf"  # of a run's output folder
OVERHEAD_BYTES = 64 << 20  # estimated: tokenizer and tables of contents


def _model_in(folder: Path) -> Path | None:
    """The exported model of a run's output folder, or its newest step; its supervised stages have steps too."""
    if (folder / EXPORT_FOLDER / "config.json").exists():
        return folder / EXPORT_FOLDER
    for pattern in ("checkpoints/step_*", "**/step_*"):
        steps = sorted(step.parent.parent for step in folder.glob(f"{pattern}/state/{FORMAT_FILE}"))
        if steps := [step for step in steps if (step / STEP_FILE).exists()]:
            return steps[-1]
    return None


def open_source(
    folder: Path, *, hf: Path | None = None, allow_pickle: bool = False, family: str | None = None
) -> Source:
    """The model in `folder`, in either format. Raises ConvertError, UnsupportedModel.

    `family`: `package.module:FAMILY` of the user's own; None: the one that config.json names.
    """
    for path in filter(None, (folder, hf)):
        if problem := path_problem(path):
            raise ConvertError(f"{shown(str(path))} cannot be opened: {problem}")
        if not path.is_dir():
            raise ConvertError(f"{str(path)!r} is not a folder{_part_hint(path)}")
        if special := special_file_in(path):
            raise ConvertError(f"{str(path)!r} holds {special}; remove it")
    if is_partial(folder):
        raise ConvertError(f"{str(folder)!r} was left by an interrupted conversion; convert again, or remove it")
    if tracked_folder(folder.parent) == folder:
        folder = folder.parent
    places = (folder, folder / "state", tracked_folder(folder) or folder)
    if any((place / FORMAT_FILE).exists() for place in places):
        return MegatronFolder(folder, hf, family)
    if (folder / "config.json").exists():
        return HFFolder(folder, allow_pickle, family)
    inside = _model_in(folder)
    hint = f"; did you mean {str(inside)!r}?" if inside is not None else f" (no config.json, no {FORMAT_FILE})"
    raise ConvertError(f"{str(folder)!r} is neither a Hugging Face folder nor a Megatron-Core checkpoint{hint}")


def _part_hint(path: Path) -> str:
    """A hint for the folder of a critic or a reward model that a checkpoint does not have."""
    step = path.parent
    if path.name not in PART_FOLDERS or not (step / STEP_FILE).exists():
        return ""
    found = [step, *(step / name for name in PART_FOLDERS if (step / name).is_dir())]
    return f": its run saved no {path.name}; name {' or '.join(repr(str(folder)) for folder in found)}"


def model_layout_problems(arch: Architecture, tp: int = 1, pp: int = 1, ep: int = 1) -> list[str]:
    """Returns the reasons why the model cannot be divided over such a layout."""
    wanted = (
        ("tp", tp, "num_attention_heads", arch.num_attention_heads),
        ("tp", tp, "the MLP's intermediate size", arch.ffn_hidden_size),
        ("tp", tp, "the intermediate size of the dense layers", arch.dense_ffn_hidden_size),
        ("tp", tp, "the intermediate size of the shared experts", arch.shared_ffn_hidden_size),
        ("pp", pp, "num_hidden_layers", arch.num_layers),
        ("ep", ep, "the number of experts", arch.num_experts or ep),
    )
    found = [f"{axis} {size} does not divide {what} {count}" for axis, size, what, count in wanted if count % size]
    groups = arch.num_query_groups
    if max(tp, groups) % min(tp, groups):
        found.append(f"tp {tp} and num_key_value_heads {groups}: one must divide the other")
    if ep > 1 and not arch.num_experts:
        found.append(f"ep {ep}: the model has no experts")
    return found


def check_model_layout(arch: Architecture, tp: int, pp: int, ep: int) -> None:
    """Raise ConvertError, with the sizes that are possible, unless the model can be divided over this layout."""
    problems = model_layout_problems(arch, tp, pp, ep)
    if problems:
        sizes = [n for n in range(1, 65) if not model_layout_problems(arch, tp=n)]
        raise ConvertError(f"{'; '.join(problems)} (tp can be {', '.join(map(str, sizes))})")


def to_megatron(
    source: Path | str,
    target: Path | str,
    *,
    dtype: str | None = None,
    layout: tuple[int, int, int] = (1, 1, 1),
    force: bool = False,
    allow_pickle: bool = False,
    check_hashes: bool = True,
    quiet: bool = False,
    family: str | None = None,
) -> None:
    """Hugging Face folder -> a folder that Megatron-LM loads (`load_layout`), with config.json and tokenizer in hf/.

    `layout` (tp, pp, ep) is only checked: the result can be loaded in any layout. Raises ConvertError, StorageError,
    UnsupportedModel.
    """
    source, target = Path(source), Path(target)
    check_target(target, source, force)
    model = open_source(source, allow_pickle=allow_pickle, family=family)
    if not isinstance(model, HFFolder):
        raise ConvertError(f"{str(source)!r} is a Megatron-Core checkpoint already; to-hf converts it")
    if model.head:
        raise ConvertError(
            f"{str(source)!r} is {WHAT[model.head]}. Nothing reads such a model from a Megatron-Core checkpoint: critic.path,"
            " reward_model.path and the model.path of train-reward take this folder as it is"
        )
    check_model_layout(model.arch, *layout)
    check_tokenizer(model.tokenizer_folder, model.arch.vocab_size)
    wanted = model.dtype(dtype)
    total = model.num_bytes(wanted)
    with output_folder(target, total + OVERHEAD_BYTES) as folder:
        with model.checked(check_hashes):
            with Progress("to-megatron", total, quiet) as progress:
                (folder / RELEASE).mkdir()
                hashes = write_checkpoint(model, folder / RELEASE, wanted, progress)
            write_tracker(folder)
            _copy_config(model, folder / "hf", wanted)
        write_manifest(folder, "megatron", {f"{RELEASE}/{name}": sha256 for name, sha256 in hashes.items()})


def to_hf(
    source: Path | str,
    target: Path | str,
    *,
    dtype: str | None = None,
    shard_bytes: int = 5 << 30,
    hf: Path | str | None = None,
    force: bool = False,
    check_hashes: bool = True,
    quiet: bool = False,
    family: str | None = None,
) -> None:
    """Distributed checkpoint (converted, a training step, or its critic/ or reward_model/) -> Hugging Face folder.

    A model with a scalar head is written as the end of its run exports it. Raises ConvertError, StorageError.
    """
    source, target = Path(source), Path(target)
    check_target(target, source, force)
    model = open_source(source, hf=None if hf is None else Path(hf), family=family)
    if not isinstance(model, MegatronFolder):
        raise ConvertError(f"{str(source)!r} is a Hugging Face folder already; to-megatron converts it")
    check_tokenizer(model.tokenizer_folder, model.arch.vocab_size)
    wanted = model.dtype(dtype)
    total = model.num_bytes(wanted)
    with output_folder(target, total + OVERHEAD_BYTES) as folder:
        with model.checked(check_hashes):
            with Progress("to-hf", total, quiet) as progress:
                hashes = write_shards(model, folder, wanted, shard_bytes, progress)
            _copy_config(model, folder, wanted)
        write_manifest(folder, "hf", hashes)


def _copy_config(model: Source, target: Path, dtype: torch.dtype) -> None:
    """config.json, tokenizer and the like."""
    target.mkdir(exist_ok=True)
    (target / "config.json").write_bytes(model.config_text(dtype))
    copy_companions(model.tokenizer_folder, target)
