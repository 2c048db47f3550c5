"""The vision tower of a model that reads images: transformers' own module, replicated on every rank of the first stage.

It is part of the Megatron-Core model: loader, converter, export, sync, optimizer and checkpoints have its tensors by the weight
table. Features go to the places of the images' tokens in the prompt, never to where a token has some id. Each image is computed
alone, so its features do not depend on the rest of the micro-batch. The embeddings have the same gradient on all
tensor-parallel ranks (Megatron-Core's regions sum it), so the tower's needs no further sum (`wrap_ddp` averages it).
"""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_rank
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, scatter_to_sequence_parallel_region
from torch import Tensor, nn

from grpo_megatron.config import VisionConfig
from grpo_megatron.data.images import image_patches
from grpo_megatron.models.architecture import MAX_KEPT, MERGERS, Vision
from grpo_megatron.models.layers.modules import packed_attention
from grpo_megatron.types import PromptImage

# transformers gives all windows in one call only to an attention with "flash" in its name; others are called for each.
ATTENTION = "flash_of_equal_windows"
PLACED = list[tuple[int, PromptImage]]  # the first token in a pack, and the image there


def build_tower(
    vision: Vision, hidden_size: int, dtype: torch.dtype, device: torch.device, *, recomputes: bool = False
) -> nn.Module:
    """Builds transformers' tower with undefined weights of `dtype`. It computes with torch's own attention, by `_attention`.

    `recomputes`: it keeps only the inputs of its layers. The backward pass computes the layers again, one by one.
    """
    if vision.positions:
        from transformers.models.qwen3_vl import modeling_qwen3_vl as module
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig as Config

        built: Any = module.Qwen3VLVisionModel
    elif vision.gated:
        from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as module
        from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig as Config

        built = module.Qwen2_5_VisionTransformerPretrainedModel
    else:
        from transformers.models.qwen2_vl import modeling_qwen2_vl as module
        from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig as Config

        built = module.Qwen2VisionTransformerPretrainedModel
    from transformers import AttentionInterface

    out = {"out_hidden_size": hidden_size} if vision.gated or vision.positions else {}
    config = Config(**{**json.loads(vision.config), **out})
    config._attn_implementation = "sdpa"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tower: nn.Module = built(config).to(device)
    AttentionInterface.register(ATTENTION, _attention)
    config._attn_implementation = ATTENTION
    if recomputes:
        tower._input_embed_layer = "patch_embed"  # type: ignore[assignment] # Qwen3-VL's does not say, and transformers warns
        tower.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    for parameter in tower.parameters():
        parameter.data = parameter.data.to(dtype)
    for module in tower.modules():  # angles stay float32: Megatron-Core's bfloat16 wrapper converts every buffer
        for name in list(module._buffers):
            buffer = module._buffers.pop(name)
            setattr(module, name, None if buffer is None else buffer.detach().clone())
    return tower


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *, cu_seq_lens_q: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attends within the windows that end at `cu_seq_lens_q`: [1, H, t, d] -> [1, t, H, d]. All of a size are one kernel call."""
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    return packed_attention(q, k, v, cu_seq_lens_q, scale=scaling)[None], None


@functools.lru_cache(maxsize=4096)
def _geometry(merge: int, patch: int, window: int | None, positions: int, rows: int, columns: int) -> dict[str, Tensor]:
    """Returns what the tower computes from an image's size [rows, columns] in tokens, on the host: nothing waits for a device.

    Windows are in the order of their sizes, so that equal ones are neighbours. `window`: their edge in pixels, if there are any.
    `positions`: the learned position embeddings, if there are any.
    """
    from transformers import vision_utils

    grid = torch.tensor([[1, rows * merge, columns * merge]])
    tensors = {"grid_thw": grid, "position_ids": vision_utils.get_vision_position_ids(grid, merge)}
    tensors["cu_seqlens"] = vision_utils.get_vision_cu_seqlens(grid)
    if window is not None:
        index, cuts = vision_utils.get_vision_window_index(grid, merge, window, patch)
        lengths, order = cuts.diff().sort(stable=True)
        windows = index.split((cuts.diff() // merge**2).tolist())
        tensors["window_index"] = torch.cat([windows[number] for number in order.tolist()])
        tensors["cu_window_seqlens"] = nn.functional.pad(lengths.cumsum(0), (1, 0))
    if positions:
        resample = vision_utils.get_vision_interpolation_indices_and_weights
        side = math.isqrt(positions)
        indices, weights = resample(grid, side, align_corners=True, spatial_merge_size=merge)
        tensors |= {"interp_indices": indices, "interp_weights": weights}
    return tensors


def set_trainable(tower: nn.Module, config: VisionConfig) -> None:
    """Mark which parameters `actor.vision` trains."""
    for name, parameter in tower.named_parameters():
        is_merger = f"visual.{name}".startswith(MERGERS)
        parameter.requires_grad_(not (config.freeze_merger if is_merger else config.freeze_tower))


class Features:
    """The features of images by a tower, [tokens, (1 + levels) hidden] each. A frozen tower computes an image once in a run."""

    def __init__(self, vision: Vision, dtype: torch.dtype) -> None:
        self._vision, self._dtype = vision, dtype
        self._cache: dict[str, Tensor] = {}  # digest -> features, on the host
        self._version, self._bytes = -1, 0  # version: of the weights that computed them
        self.num_computed = 0  # images, so far

    def of(self, tower: nn.Module, images: Sequence[PromptImage]) -> dict[str, Tensor]:
        """Returns digest -> features of the images, each computed once."""
        device = next(tower.parameters()).device
        different = {image.digest: image for image in images}
        if any(parameter.requires_grad for parameter in tower.parameters()):
            return {digest: self._computed(tower, image) for digest, image in different.items()}
        # A load, and a copy of another model's weights, count up the version of what they write to.
        version = sum(parameter._version for parameter in tower.parameters())
        if version != self._version:
            self._cache.clear()
            self._version, self._bytes = version, 0
        features = {}
        for digest, image in different.items():
            if digest in self._cache:
                features[digest] = self._cache[digest].to(device)
                continue
            with torch.no_grad():
                features[digest] = self._computed(tower, image)
            self._add(digest, features[digest].cpu())
        return features

    def _add(self, digest: str, features: Tensor) -> None:
        self._cache[digest] = features
        self._bytes += features.nbytes
        while self._bytes > MAX_KEPT and len(self._cache) > 1:
            self._bytes -= self._cache.pop(next(iter(self._cache))).nbytes

    def _computed(self, tower: nn.Module, image: PromptImage) -> Tensor:
        vision, device = self._vision, next(tower.parameters()).device
        patches = torch.from_numpy(image_patches(image, vision.patch, vision.merge, vision.norm)).to(
            device, self._dtype
        )
        window = getattr(tower.config, "window_size", None)
        geometry = dict(_geometry(vision.merge, vision.patch, window, vision.positions, *image.size))
        for name in geometry.keys() & {"position_ids", "window_index", "interp_indices", "interp_weights"}:
            geometry[name] = geometry[name].to(device)
        self.num_computed += 1
        output = tower(patches, **geometry)
        return torch.cat([getattr(output, "pooler_output", output), *getattr(output, "deepstack_features", ())], dim=1)


# -- DeepStack ---------------------------------------------------------------------------------------------------------
#
# Features of inner layers of the tower are added to hidden states between two layers of the decoder, where Megatron-Core
# passes nothing but hidden states. Layers that are recomputed run under a backward pass of their own, once per layer, and the
# graph of the tower can be used once only. So the layers get features without a graph. Each addition leaves its gradient
# in `Level`, and the node that puts images among the embeddings, which runs after all layers, hands them on to the tower.


class Level:
    """Features that are added behind one layer of the decoder, to this rank's part of a pack's tokens."""

    def __init__(self, places: Tensor, values: Tensor) -> None:
        self.places = places
        self.values: Tensor | None = values.detach()  # None after their use: packs live as long as their mini-batch
        self.gradient: Tensor | None = None


class _AddLevel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, level: Level) -> Tensor:
        ctx.level = level
        assert level.values is not None, "a layer is recomputed before its backward pass"
        return hidden.index_add(0, level.places, level.values.to(hidden.dtype).unsqueeze(1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        level = ctx.level
        level.gradient, level.values = grads[0][level.places].squeeze(1).to(level.values.dtype), None
        return grads[0], None


class _CollectLevels(torch.autograd.Function):
    """Forward: the embeddings. Backward: the features `values` of each level get the gradient that it has."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, levels: list[Level], *values: Tensor) -> Tensor:
        ctx.levels = levels
        return embeddings.view_as(embeddings)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [level.gradient for level in ctx.levels]
        ctx.levels.clear()
        return grads[0], None, *gradients


def add_level(index: int, layer: nn.Module, arguments: Any, inputs: dict[str, Any], outputs: Any) -> Any:
    """Adds the features of level `index`, if the pack has images: a forward hook of the decoder's layer `index`."""
    levels, (hidden, *others) = inputs["packed_seq_params"].levels, outputs
    return (_AddLevel.apply(hidden, levels[index]), *others) if levels else outputs


def with_images(
    embeddings: Tensor, placed: PLACED, tower: nn.Module, features: Features, *, is_cut: bool
) -> tuple[Tensor, list[Level]]:
    """Puts the images' features in their places among the embeddings [T, 1, h] of a pack. Returns the levels of DeepStack, too.

    `is_cut`: this rank's part of the tokens, for sequence parallelism.
    """
    values: list[Tensor] = []
    if placed:
        by_digest = features.of(tower, [image for _, image in placed])
        places = torch.cat([first + torch.arange(image.num_tokens) for first, image in placed]).to(embeddings.device)
        all_values = torch.cat([by_digest[image.digest] for _, image in placed]).to(embeddings.dtype)
        first_values, *values = all_values.split(embeddings.shape[-1], dim=1)
        embeddings = embeddings.index_copy(0, places, first_values.unsqueeze(1))
    elif torch.is_grad_enabled():
        # Every parameter is in every pass: data-parallel ranks wait for each other's gradients.
        trained = [parameter for parameter in tower.parameters() if parameter.requires_grad]
        embeddings = embeddings + sum((parameter.sum() * 0 for parameter in trained), torch.zeros(()).to(embeddings))
    if is_cut:
        embeddings = scatter_to_sequence_parallel_region(embeddings)
        if values:  # backward: the sum over ranks, each of which has the gradients of its tokens
            places = places - len(embeddings) * get_tensor_model_parallel_rank()
            is_local = (places >= 0) & (places < len(embeddings))
            places, values = places[is_local], [copy_to_tensor_model_parallel_region(part)[is_local] for part in values]
    levels = [Level(places, part) for part in values]
    if any(part.requires_grad for part in values):
        embeddings = _CollectLevels.apply(embeddings, levels, *values)
    return embeddings, levels
