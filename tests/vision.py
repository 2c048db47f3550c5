"""Tiny random models that read images, as Hugging Face folders; sampled images; and transformers' log-probabilities.

transformers' own forward of such a model takes every `<|image_pad|>` for an image's token, also one that the policy has sampled.
The oracle here gives it embeddings and positions instead, so that only places count.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
CHARACTERS = ["\n", *map(chr, range(32, 127))]
VOCABULARY = [*SPECIAL, "<|video_pad|>", *CHARACTERS]
IMAGE_PAD, EOS = VOCABULARY.index("<|image_pad|>"), VOCABULARY.index("<|im_end|>")
PATCH, MERGE = 14, 2
CELL = PATCH * MERGE  # pixels of one token's edge
COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,  # vLLM's attention on CPU needs heads of a multiple of 32
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "vocab_size": len(VOCABULARY),
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "bos_token_id": VOCABULARY.index("<|endoftext|>"),
    "eos_token_id": EOS,
    "vision_start_token_id": VOCABULARY.index("<|vision_start|>"),
    "vision_end_token_id": VOCABULARY.index("<|vision_end|>"),
    "image_token_id": IMAGE_PAD,
    "video_token_id": VOCABULARY.index("<|video_pad|>"),
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
}
# Features of two layers of the tower are added in two of four: with PP2 in all of the first stage's.
QWEN3: dict[str, Any] = {
    "head_dim": 32,
    "num_hidden_layers": 4,
    "rope_theta": 100.0,  # so that the last angles, which turn with the time alone, matter
    "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [8, 4, 4]},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
TOP_LEVEL = {"tie_word_embeddings", *(name for name in COMMON if name.endswith("token_id") and "os_" not in name)}
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_heads": 2,
        "in_chans": 3,
        "out_hidden_size": 64,
        # A window of 2 x 2 tokens in the first layer: larger images have several.
        "window_size": 2 * CELL,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
        "hidden_act": "silu",
    },
    "qwen2_vl": {"depth": 2, "embed_dim": 64, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 2, "in_channels": 3},
    "qwen3_vl": {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 9,  # 3 x 3, which every image resamples
        "deepstack_visual_indexes": [0, 2],
        "hidden_act": "gelu_pytorch_tanh",
    },
}
TOWERS["qwen3_vl_moe"] = TOWERS["qwen3_vl"]
TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{ message.content }}"
    "{%- else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_config(family: str = "qwen2_5_vl", tower: dict[str, Any] | None = None, **changes: Any) -> Any:
    """transformers' config of a tiny model. `tower` changes its vision_config."""
    from transformers import AutoConfig

    vision = {**TOWERS[family], "patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 2}
    older = family not in ("qwen3_vl", "qwen3_vl_moe")
    own = {} if older else QWEN3 if family == "qwen3_vl" else QWEN3 | EXPERTS
    settings, vision = {**COMMON, **own, **changes}, {**vision, **(tower or {})}
    if older:
        return AutoConfig.for_model(family, **settings, vision_config=vision)
    top = {name: settings.pop(name) for name in TOP_LEVEL}
    return AutoConfig.for_model(family, **top, text_config=settings, vision_config=vision)


def make_model(folder: Path, family: str = "qwen2_5_vl", *, seed: int = 0, std: float = 0.08, **changes: Any) -> Path:
    """Write a random float32 model with its tokenizer. Norms and biases are not 1 and 0."""
    from transformers import AutoModelForImageTextToText

    from tests.tiny import randomise

    model = AutoModelForImageTextToText.from_config(make_config(family, **changes), dtype=torch.float32)
    randomise(model, seed, std)
    model.save_pretrained(folder)
    if family == "qwen3_vl_moe":  # as published; transformers reads both
        file = folder / "model.safetensors"
        stacks = {n: t.transpose(-1, -2).contiguous() if ".experts." in n else t for n, t in load_file(file).items()}
        save_file(stacks, file, {"format": "pt"})
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A token for each character and each special token, with a chat template that has places for images."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(VOCABULARY)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in [*SPECIAL, "<|video_pad|>"]])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)


def draw(seed: int, width: int = 2 * CELL, height: int = 2 * CELL) -> Any:
    """A picture of random blocks."""
    from PIL import Image

    blocks = np.random.default_rng(seed).integers(
        0, 256, (max(1, height // 14), max(1, width // 14), 3), dtype=np.uint8
    )
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)


def png(image: Any) -> bytes:
    """The bytes of its file."""
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def placed(seed: int, first: int, rows: int = 2, columns: int = 2) -> Any:
    """A sampled image of rows x columns tokens, whose first token is the prompt's token `first`."""
    from grpo_megatron.types import PromptImage

    pixels = draw(seed, columns * CELL, rows * CELL).tobytes()
    return PromptImage(f"{seed}/{rows}x{columns}", (rows, columns), first, pixels)


def make_prompts() -> list[tuple[list[int], tuple[Any, ...], list[int]]]:
    """(prompt ids, images, response) of rows with 1, 0, 2, 1 images of several sizes. Each response has an `<|image_pad|>`."""
    generator = torch.Generator().manual_seed(3)

    def text(count: int) -> list[int]:
        return torch.randint(len(SPECIAL) + 1, len(VOCABULARY), (count,), generator=generator).tolist()

    rows = []
    for number, sizes in enumerate([[(2, 2)], [], [(2, 3), (4, 2)], [(3, 3)]]):
        ids, images = text(3 + number), []
        for image, (height, width) in enumerate(sizes):
            images.append(placed(10 * number + image, len(ids), height, width))
            ids += [IMAGE_PAD] * (height * width) + text(2 + image)
        rows.append((ids, tuple(images), [*text(3), IMAGE_PAD, *text(2 + 3 * number)]))
    return rows


def load(folder: Path) -> Any:
    """transformers' model, float32. Every tensor of the folder is in it."""
    from transformers import AutoModelForImageTextToText

    model, lost = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(lost[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), lost
    return model.eval()


def pixel_values(images: Sequence[Any], family: str = "qwen2_5_vl") -> tuple[torch.Tensor, torch.Tensor]:
    """The patches and grids [n, 3] of images, by transformers' own processor."""
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    norm = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} if family.startswith("qwen3_vl") else {}
    processor = Qwen2VLImageProcessorPil(min_pixels=CELL * CELL, max_pixels=1 << 24, **norm)
    edges = [(image.size[1] * CELL, image.size[0] * CELL) for image in images]
    pictures = [Image.frombytes("RGB", size, image.pixels) for size, image in zip(edges, images, strict=True)]
    out = processor(pictures, return_tensors="pt")
    return out["pixel_values"], out["image_grid_thw"]


def logits(model: Any, ids: Sequence[int], images: Sequence[Any]) -> torch.Tensor:
    """[T, V] by transformers, from embeddings with each image's features in its place. Differentiable."""
    tokens, kinds = torch.tensor([list(ids)]), torch.zeros(1, len(ids), dtype=torch.int64)
    embeddings, grids, deep = model.get_input_embeddings()(tokens), None, dict[str, Any]()
    if images:
        pixels, grids = pixel_values(images, model.config.model_type)
        features = model.model.visual(pixels, grid_thw=grids)
        levels, features = getattr(features, "deepstack_features", None), getattr(features, "pooler_output", features)
        places = torch.cat([image.first + torch.arange(image.num_tokens) for image in images])
        embeddings, kinds[0, places] = embeddings.index_copy(1, places, features.unsqueeze(0)), 1
        deep = {} if levels is None else {"deepstack_visual_embeds": levels, "visual_pos_masks": kinds == 1}
    positions, _ = model.model.get_rope_index(tokens, mm_token_type_ids=kinds, image_grid_thw=grids)
    states = model.model.language_model(inputs_embeds=embeddings, position_ids=positions, **deep).last_hidden_state
    return model.lm_head(states)[0].float()  # type: ignore[no-any-return]


def logprobs(
    model: Any, prompt: Sequence[int], images: Sequence[Any], response: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """[R]: log-probabilities of a response, by transformers."""
    after = logits(model, [*prompt, *response], images)[len(prompt) - 1 : -1] / temperature
    return after.log_softmax(-1).gather(1, torch.tensor(list(response)).unsqueeze(1))[:, 0]


def flat_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json as the published folders have it: the decoder's settings at the top."""
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    section = {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    return {**text, **section, **config}


def in_file(name: str) -> str:
    """The name in files of a parameter of transformers' model."""
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")
