"""The files that are copied with the weights (tokenizer, chat template, generation config, licence); a tokenizer check."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from grpo_megatron.convert import ConvertError, listing_error
from grpo_megatron.reading import read_json, shown
from grpo_megatron.storage.manifest import MANIFEST_FILE

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
