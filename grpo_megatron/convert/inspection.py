"""inspect: describes the model in a folder from headers alone, or with every hash compared."""

from __future__ import annotations

import math
from collections import Counter

from grpo_megatron.convert import tokenizers
from grpo_megatron.convert.conversion import model_layout_problems
from grpo_megatron.convert.folder import format_bytes
from grpo_megatron.convert.load_layout import further_options, tracked_folder, unsupported_there
from grpo_megatron.convert.source import Source, dtype_name
from grpo_megatron.models.heads.folder import WHAT
from grpo_megatron.storage.manifest import MANIFEST_FILE, Verification, read_manifest

KINDS = {"hf": "Hugging Face safetensors", "megatron": "Megatron-Core distributed checkpoint (torch_dist)"}


def describe_model(source: Source, hashes: bool = False) -> str:
    """About fifteen lines of text. With `hashes` every file is read; raises StorageError for files that have changed."""
    arch = source.arch
    rope = f"theta {arch.rope_theta:g}"
    rope += f", llama3 x{arch.rope_factor:g}" if arch.rope_factor else ""
    rope += f", linear x{arch.rope_linear_factor:g}" if arch.rope_linear_factor else ""
    rope += f", yarn x{arch.rope_yarn.factor:g}" if arch.rope_yarn else ""
    counts = Counter(source.dtypes.values()).most_common()
    stored = sum(p.stat().st_size for p in source.data_folder.rglob("*") if p.is_file())
    num_in_head = sum(math.prod(row.local_shape(arch, 1)) for row in source.head_rows)
    lines = {
        "folder": str(source.folder),
        "format": KINDS[source.kind],
        "family": f"{arch.family} ({source.config.get('model_type')}), {_output(source)}",
        "parameters": f"{arch.num_parameters() + num_in_head:,}",
        "layers": f"{arch.num_layers} of hidden size {arch.hidden_size}, intermediate {arch.ffn_hidden_size}",
        "attention": f"{arch.num_attention_heads} heads of {arch.head_dim}, {arch.num_query_groups} key-value groups",
        "rope": rope,
        "vocabulary": f"{arch.vocab_size} (stored padded to {arch.padded_vocab_size(1)} by tp 1)",
        "dtype": ", ".join(f"{dtype_name(dtype)} ({count} tensors)" for dtype, count in counts),
        "layout": source.layout,
        "can be divided": f"tp {_sizes(source, 'tp')}; pp {_sizes(source, 'pp')}",
        "on disk": format_bytes(stored),
        "copied along": ", ".join(p.name for p in tokenizers.companions(source.tokenizer_folder)) or "nothing",
    }
    if source.kind == "megatron" and source.head is None and tracked_folder(source.folder) is not None:
        lines["Megatron-LM"] = _megatron_lm_options(source)
    if arch.num_experts:
        lines["experts"] = f"{arch.num_experts} per layer; ep {_sizes(source, 'ep')}"
    lines["hashes"] = _hashes(source, hashes)
    width = max(map(len, lines))
    return "\n".join(f"{key.ljust(width)}  {text}" for key, text in lines.items())


def _megatron_lm_options(source: Source) -> str:
    options = " ".join(filter(None, [f"--load {source.folder} --use-checkpoint-args", further_options(source.arch)]))
    missing = unsupported_there(source.arch)
    return options + (f" ({missing})" if missing else "")


def _output(source: Source) -> str:
    if source.head is None:
        return f"{'tied' if source.arch.tied else 'untied'} embeddings"
    return f"scalar head ({WHAT[source.head]})"


def _sizes(source: Source, axis: str) -> str:
    return ", ".join(str(n) for n in range(1, 129) if not model_layout_problems(source.arch, **{axis: n}))


def _hashes(source: Source, check: bool) -> str:
    files = read_manifest(source.folder)
    if files is None:
        if check and source.check_content():
            return f"no {MANIFEST_FILE}; checksums of all chunks agree"
        return f"no {MANIFEST_FILE}: nothing to compare with"
    if check:
        Verification(source.folder).finish()
        listed = "".join(f"\n  {entry['sha256']}  {name}" for name, entry in files.items())
        return f"sha256 of {len(files)} files agree{listed}"
    return f"sha256 of {len(files)} files in {MANIFEST_FILE} (compare them with --hashes)"
