"""Images of rows: from a file or bytes to the pixels that the model reads, and to the places of their tokens.

A row has images in one of these forms, with any number of images:

    {"images": [IMAGE, ...], ...}, {"image": IMAGE, ...}             verl's and TRL's columns
    {"prompt": [{"role": "user", "content": [{"type": "image", "image": IMAGE}, {"type": "text", "text": "..."}]}]}

IMAGE is a path (relative to the data file), {"path": ...}, {"bytes": ...}, a data: URI, or base64 text, which bytes in Parquet
and Arrow columns are read as. `<image>` in the texts of such a row marks a place; without any, the images come before the last
message's text. In a row without images `<image>` is text.

Everything after that counts places, never token ids: a prompt stores each image with its first token. So a placeholder that
the policy draws is an ordinary token.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.reading import ReadError, check_regular, cut, read_json, reason_of, shown
from grpo_megatron.types import PromptImage

MARK = "<image>"
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # 8 bits; others would be cut off without a word
MAX_BYTES = 1 << 26  # of a file
MAX_DECODED = 1 << 26  # pixels of a file: 200 MB as RGB
MAX_ASPECT = 200  # as the published processor
DATA_URI = "data:image/"
# CLIP's, which all models of the families use. Others in preprocessor_config.json are refused.
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class ImageFormat:
    """How a model reads images: cells of `cell` x `cell` pixels become one token each.

    `token` is the placeholder that the chat template writes. An image has `min_pixels` to `max_pixels` after resizing.
    """

    token: str
    token_id: int
    cell: int
    min_pixels: int
    max_pixels: int
    max_count: int

    @classmethod
    def of(cls, folder: Path, config: Mapping[str, Any], tokenizer: Any, data: DataConfig) -> ImageFormat:
        """Of a model folder with its config.json, as `data` limits it. Raises ConfigError.

        The limits of preprocessor_config.json hold where `data` has none, otherwise those of the published models.
        """
        path, given = folder / "preprocessor_config.json", {}
        try:
            given = read_json(path) if path.exists() else {}
        except (OSError, ReadError) as error:
            raise ConfigError(f"cannot read {shown(str(path))}: {reason_of(error)}") from error
        if not isinstance(given, dict):
            raise ConfigError(f"{shown(str(path))} is not an object")
        wrong = [n for n, v in (("image_mean", MEAN), ("image_std", STD)) if not np.allclose(given.get(n) or v, v)]
        if wrong:
            raise ConfigError(f"{shown(str(path))}: {wrong[0]}={given[wrong[0]]}; only CLIP's is supported")
        vision, token_id = config["vision_config"], config["image_token_id"]
        size = given.get("size") or {}
        low = data.image_min_pixels or given.get("min_pixels") or size.get("shortest_edge") or 3136
        high = data.image_max_pixels or given.get("max_pixels") or size.get("longest_edge") or 12845056
        cell = vision.get("patch_size", 14) * vision.get("spatial_merge_size", 2)
        if not cell * cell <= high or low > high:
            raise ConfigError(
                f"data.image_min_pixels={low}, data.image_max_pixels={high}: an image token is {cell} x {cell} pixels, so set"
                f" {cell * cell} <= image_max_pixels, and image_min_pixels <= image_max_pixels"
            )
        token = tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(token, str):
            raise ConfigError(f"the tokenizer has no token {token_id}, which config.json names as image_token_id")
        return cls(token, token_id, cell, low, high, data.max_images)

    def size(self, width: int, height: int) -> tuple[int, int]:
        """(rows, columns) of tokens for an image of this size. Raises ValueError for one that is too long.

        The rule of the published processor: both edges to whole cells, then both scaled into the limits.
        """
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise ValueError(f"is {width} x {height}; one edge may be {MAX_ASPECT} times the other")
        edges = [max(self.cell, round(edge / self.cell) * self.cell) for edge in (height, width)]
        if edges[0] * edges[1] > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            edges = [max(self.cell, math.floor(e / scale / self.cell) * self.cell) for e in (height, width)]
        elif edges[0] * edges[1] < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            edges = [math.ceil(edge * scale / self.cell) * self.cell for edge in (height, width)]
        return edges[0] // self.cell, edges[1] // self.cell

    def check(self, row: Mapping[str, Any], folder: Path) -> list[tuple[int, int]]:
        """Decodes every image of a row; their sizes in tokens. Raises ValueError that says which one is wrong."""
        sources = image_sources(row)
        if len(sources) > self.max_count:
            raise ValueError(f"has {len(sources)} images; data.max_images={self.max_count} is the most per prompt")
        return [self.size(*image.size) for image in _decoded(sources, folder)]

    def read(self, row: Mapping[str, Any], folder: Path) -> list[PromptImage]:
        """The images of a row as the model reads them, before their places are known. Raises ValueError."""
        from PIL import Image

        found = []
        for image in _decoded(image_sources(row), folder):
            rows, columns = self.size(*image.size)
            edges = columns * self.cell, rows * self.cell
            pixels = (image if image.size == edges else image.resize(edges, Image.Resampling.BICUBIC)).tobytes()
            digest = hashlib.sha256(f"{rows} {columns} ".encode() + pixels).hexdigest()
            found.append(PromptImage(digest, (rows, columns), -1, pixels))
        return found

    def messages(self, messages: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
        """The messages with their `count` images as content parts, for the chat template. Raises ValueError."""
        texts = [message["content"] if isinstance(message["content"], str) else "" for message in messages]
        if any(self.token in text for text in texts):
            raise ValueError(f"the text has {self.token!r}, which the chat template writes for an image; remove it")
        marks = sum(text.count(MARK) for text in texts)
        if marks not in (0, count):
            raise ValueError(f"the text has {MARK} {marks} times, and the row has {count} images; mark each once, or none")
        out = [dict(message, content=_parts(text) if MARK in text else text) for message, text in zip(messages, texts)]
        if not marks:
            out[-1]["content"] = [{"type": "image"}] * count + [{"type": "text", "text": texts[-1]}]
        return out

    def placed(self, ids: Sequence[int], images: Sequence[PromptImage]) -> tuple[list[int], list[PromptImage]]:
        """Tokens with one placeholder per image -> with one per cell, and the images with their places. Raises ValueError."""
        if (count := ids.count(self.token_id)) != len(images):
            raise ValueError(
                f"the chat template writes {self.token!r} {count} times for {len(images)} images; set data.chat_template to"
                " one for images"
            )
        whole: list[int] = []
        waiting, found = iter(images), []
        for token in ids:
            if token == self.token_id:
                image = replace(next(waiting), first=len(whole))
                found.append(image)
                whole += [token] * image.num_tokens
            else:
                whole.append(token)
        return whole, found


def _parts(text: str) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(MARK)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


# -- rows --------------------------------------------------------------------------------------------------------------


def has_images(row: Mapping[str, Any]) -> bool:
    """Whether a row has images, right or wrong."""
    return bool(row.get("images") or row.get("image")) or any(True for _ in _content_images(row))


def image_sources(row: Mapping[str, Any]) -> list[Any]:
    """The images of a row as it names them. Raises ValueError when it names them in two ways."""
    given = row.get("images") or row.get("image") or []
    listed = given if isinstance(given, list) else [given]
    inside = [source for source in _content_images(row) if source is not None]
    if inside and listed:
        raise ValueError("has images in a column and in the content of messages; name them in one way")
    return listed or inside


def _content_images(row: Mapping[str, Any]) -> Iterator[Any]:
    """The image parts of all messages: their images, or None where a column has them."""
    for name in ("prompt", "messages"):
        for message in row[name] if isinstance(row.get(name), list) else ():
            content = message.get("content") if isinstance(message, dict) else None
            for part in content if isinstance(content, list) else ():
                if isinstance(part, dict) and part.get("type") in ("image", "image_url"):
                    url = part.get("image_url")
                    yield part.get("image") or (url.get("url") if isinstance(url, dict) else url)


def plain_row(row: Mapping[str, Any], sizes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """The row with texts in place of content parts, and with facts in place of pixels: what tasks and rewards read."""
    facts = [{"rows": rows, "columns": columns} for rows, columns in sizes]
    out = {name: value for name, value in row.items() if name not in ("image", "images")} | {"images": facts}
    for name in ("prompt", "messages"):
        if isinstance(messages := row.get(name), list):
            out[name] = [_flat(message) for message in messages]
    return out


def _flat(message: Any) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "image", "image_url"):
            raise ValueError(f"a message has a content part of type {shown(kind)}; text and image are supported")
        texts.append(MARK if kind != "text" else str(part.get("text") or ""))
    return {**message, "content": "".join(texts)}


# -- files -------------------------------------------------------------------------------------------------------------


def _decoded(sources: Sequence[Any], folder: Path) -> Iterator[Any]:
    for number, source in enumerate(sources):
        try:
            yield _decode(_bytes_of(source, folder))
        except ValueError as error:
            raise ValueError(f"image {number} {error}") from error


def _bytes_of(source: Any, folder: Path) -> bytes:
    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path") or source.get("url")
    if not isinstance(source, str):
        raise ValueError("is neither a path nor bytes")
    if source.startswith(DATA_URI) or (len(source) > 255 or "." not in source):
        try:
            data = base64.b64decode(source.partition(",")[2] if source.startswith(DATA_URI) else source, validate=True)
        except (binascii.Error, ValueError):
            raise ValueError(f"({cut(source, 40)!r}) is neither a path nor base64") from None
    else:
        path = folder / source.removeprefix("file://")
        try:
            check_regular(path)
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except (OSError, ReadError, ValueError) as error:
            raise ValueError(f"{shown(str(path))} cannot be read ({reason_of(error)})") from error
    if not 0 < len(data) <= MAX_BYTES:
        raise ValueError(f"has {len(data):,} bytes or more; 1 to {MAX_BYTES:,} are read")
    return data


def _decode(data: bytes) -> Any:
    """The image as 8-bit RGB, upright; transparent parts are white. Raises ValueError."""
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of large images, and of damaged metadata
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            if image.width * image.height > MAX_DECODED:
                raise ValueError(f"has {image.width} x {image.height} pixels; at most {MAX_DECODED:,} are decoded")
            if getattr(image, "n_frames", 1) > 1:
                raise ValueError(f"has {image.n_frames} frames; one is supported")
            if image.mode not in MODES:
                raise ValueError(f"is of the mode {image.mode}; 8 bits per channel are supported")
            image.load()
            image = ImageOps.exif_transpose(image)
            if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            return image.convert("RGB")
    except ValueError:
        raise
    except Exception as error:  # Pillow's decoders raise errors of many types
        raise ValueError(f"cannot be decoded ({cut(f'{type(error).__name__}: {error}', 120)})") from error


# -- what a model reads ------------------------------------------------------------------------------------------------


def image_patches(image: PromptImage, patch: int, merge: int) -> np.ndarray[Any, Any]:
    """float32 [patches, 3 * 2 * patch * patch], normalised, as Qwen2VLImageProcessor lays them out: cell by cell."""
    rows, columns = image.size
    pixels = np.frombuffer(image.pixels, np.uint8).reshape(rows * merge * patch, columns * merge * patch, 3)
    values = (pixels.astype(np.float32) / np.float32(255) - np.float32(MEAN)) / np.float32(STD)
    cells = values.reshape(rows, merge, patch, columns, merge, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    frames = np.repeat(cells[:, :, :, :, :, None], 2, axis=5)  # a still image is two equal frames
    return np.ascontiguousarray(frames.reshape(rows * columns * merge * merge, -1))


def rope_positions(length: int, images: Sequence[PromptImage]) -> np.ndarray[Any, Any]:
    """int64 [3, length]: the time, row and column at which M-RoPE (arXiv 2409.12191) turns each token of a sequence.

    They follow from the images' places alone, so a response that goes on later has the same. A text token has three equal
    numbers, one more than the largest before it.
    """
    out, start, following = np.empty((3, length), np.int64), 0, 0
    for image in images:
        rows, columns = image.size
        gap, end = image.first - start, image.first + image.num_tokens
        out[:, start : image.first] = np.arange(following, following + gap)
        following += gap
        row, column = np.divmod(np.arange(image.num_tokens), columns)
        out[:, image.first : end] = following + np.stack([np.zeros_like(row), row, column])
        start, following = end, following + max(rows, columns)
    out[:, start:] = np.arange(following, following + length - start)
    return out
