"""Images in vLLM without vLLM's processor, which would need torchvision, resize again, and look for placeholder ids.

A prompt is given to vLLM with each image's pixels and place. vLLM's features and M-RoPE positions go by these places, so a
sampled `<|image_pad|>` is an ordinary token. An image's digest is its key among the features that vLLM keeps. With its place
it is part of the keys of cached prefixes.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from grpo_megatron.data.images import image_patches, published_processor
from grpo_megatron.types import PromptImage


class EngineInputs:
    """Prompts in the form that vLLM's engine takes. `config`: transformers' config of the model."""

    def __init__(self, config: Any) -> None:
        from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFlatField

        vision = getattr(config, "vision_config", None)
        patch, merge = getattr(vision, "patch_size", 0), getattr(vision, "spatial_merge_size", 0)
        norm = published_processor(config.model_type)[:2]

        class Patches(MultiModalFlatField):
            """Patches made when the tower runs: until then a request has the pixels, an eighth of the bytes."""

            def _reduce_data(self, batch: list[Any], *, pin_memory: bool) -> Any:
                return torch.cat([torch.from_numpy(image_patches(image, patch, merge, norm)) for image in batch])

        self._merge = merge
        self._patches, self._grid = Patches(slices=[]), MultiModalBatchedField(keep_on_cpu=True)

    def prompt(self, prompt_ids: Sequence[int], images: Sequence[PromptImage] = ()) -> Any:
        """Makes a prompt with images at their places, in increasing order."""
        from vllm.inputs import mm_input, tokens_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        if not images:
            return tokens_input(list(prompt_ids))
        items = MultiModalKwargsItems({"image": [self._item(image) for image in images]})
        places = [PlaceholderRange(offset=image.first, length=image.num_tokens) for image in images]
        return mm_input(list(prompt_ids), items, {"image": [image.digest for image in images]}, {"image": places})

    def _item(self, image: PromptImage) -> Any:
        from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem

        pixels: Any = image
        grid = torch.tensor([1, image.size[0] * self._merge, image.size[1] * self._merge])
        return MultiModalKwargsItem(
            {
                "pixel_values": MultiModalFieldElem(data=pixels, field=self._patches),
                "image_grid_thw": MultiModalFieldElem(data=grid, field=self._grid),
            }
        )


def serve_images(model: Any, max_tokens: int) -> None:
    """Makes vLLM take `EngineInputs` for a class of models. `max_tokens`: of all images of a step, and of all kept features."""
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo

    class Info(BaseProcessingInfo):
        def get_supported_mm_limits(self) -> Any:
            return {"image": None}

        def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Any) -> Any:
            return {"image": max_tokens}

    class Empty(BaseDummyInputsBuilder[Info]):
        def get_dummy_text(self, mm_counts: Any) -> str:
            return ""

        def get_dummy_mm_data(self, seq_len: int, mm_counts: Any, mm_options: Any) -> Any:
            return {}

    class Given(BaseMultiModalProcessor[Info]):
        requires_tokenizer = False

        def _get_mm_fields_config(self, *inputs: Any) -> Any:
            return {}

        def _get_prompt_updates(self, *inputs: Any) -> Any:
            return []

        def apply(self, *inputs: Any, **named: Any) -> Any:
            """Returns the largest image. vLLM calls this only to measure the memory that the tower needs."""
            config, count = self.info.get_hf_config(), self.info.ctx.model_config.max_model_len
            edge, vision = math.isqrt(count), config.vision_config
            pixels = bytes(3 * (edge * vision.patch_size * vision.spatial_merge_size) ** 2)
            return EngineInputs(config).prompt([0] * count, [PromptImage("", (edge, edge), 0, pixels)])

    MULTIMODAL_REGISTRY.register_processor(Given, info=Info, dummy_inputs=Empty)(model)
    prefixes = dict(model.hf_to_vllm_mapper.orig_to_new_prefix)
    if not any("model.layers.".startswith(prefix) for prefix in prefixes):  # Qwen3-VL: the names of its files only
        prefixes["model."] = "language_model.model."
        model.hf_to_vllm_mapper = replace(model.hf_to_vllm_mapper, orig_to_new_prefix=prefixes)


@contextlib.contextmanager
def importing_models() -> Iterator[None]:
    """Lets vLLM's Qwen2-VL be imported without torchvision. It needs one function, which another file has too."""
    name = "transformers.models.qwen2_vl.image_processing{}_qwen2_vl"
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    sys.modules[name.format("")] = importlib.import_module(name.format("_pil"))
    logging.disable(logging.WARNING)  # transformers recommends torchvision
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        del sys.modules[name.format("")]
