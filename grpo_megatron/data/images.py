"""Images of rows: from a file or bytes to the pixels that the model reads, and to the places of their tokens.

`<image>` in the prompt's texts of a row with images marks a place. Without any, the images come first in the first user
turn, as in TRL. In a row without images `<image>` is text. Everything after that counts places, never token ids: a prompt
stores each image with its first token. So a placeholder that the policy samples is an ordinary token.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import itertools
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.types import PromptImage
from grpo_megatron.untrusted import MAX_PATH, ReadError, check_regular, cut, read_json, reason_of, shown

IMAGE_MARK = "<image>"
DATA_URI = "data:image;base64,"
NOT_FILES = "an environment is given the paths of its row's images; write them into files"
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
ENCODED = ("iVBORw0KGgo", "/9j/", "UklGR", "Qk", "R0lGOD")  # how their files begin in base64
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # 8 bits; others would be cut off without a word
MAX_BYTES = 1 << 26  # of a file
MAX_DECODED = 1 << 26  # pixels of a file; decoded they take 0.3 to 0.6 GB
MAX_ASPECT = 200  # as the published processor
TURNS = (None, None, 0, 3, 1, 5, 4, 6, 2)  # EXIF orientation -> Pillow's Transpose
# transformers 5 writes the second, and prefers it where both have settings of images
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


Channels = tuple[float, float, float]


class Published(NamedTuple):
    """The published image processor of a family: how it normalises channels, its patches, and its limits of pixels."""

    mean: Channels
    std: Channels
    patch: int
    min_pixels: int
    max_pixels: int


_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_QWEN2 = Published(*_CLIP, 14, 3136, 12845056)
_QWEN3 = Published((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 16, 65536, 16777216)


def published_processor(model_type: str) -> Published:
    """Returns the processor of a family that reads images."""
    return _QWEN3 if model_type.startswith("qwen3_vl") else _QWEN2


@dataclass(frozen=True)
class ImageFormat:
    """The reading of images by a model: cells of `cell` x `cell` pixels become one token each.

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
        """Read the format of a model folder with its config.json, as `data` limits it. Raises ConfigError.

        The limits of preprocessor_config.json apply where `data` has none, otherwise those of the published models.
        """
        supported, token_id = _processor(config), config["image_token_id"]
        path, given = _read_processor(folder)
        for name, value in supported.items():
            if given.get(name) is not None and not _equal(given[name], value):
                raise ConfigError(f"{path}: {name}={shown(given[name])} is not supported; {shown(value)} is")
        low, high = _limits(config, given, data.image_min_pixels, data.image_max_pixels)
        cell = supported["patch_size"] * supported["merge_size"]
        if not (isinstance(low, int) and isinstance(high, int)) or not max(cell * cell, low) <= high:
            raise ConfigError(
                f"data.image_min_pixels={shown(low)}, data.image_max_pixels={shown(high)} ({path} has them where data has"
                f" none): an image token is {cell} x {cell} pixels, so set {cell * cell} <= image_max_pixels, and"
                " image_min_pixels <= image_max_pixels"
            )
        token = tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(token, str):
            raise ConfigError(f"the tokenizer has no token {token_id}, which config.json names as image_token_id")
        return cls(token, token_id, cell, low, high, data.max_images)

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Compute (rows, columns) of tokens for an image of this size. Raises ValueError for one that is too long.

        The rule of the published processor: both edges to whole cells, then both scaled into the limits.
        """
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise ValueError(f"has {width} x {height} pixels; one edge may be {MAX_ASPECT} times the other")
        edges = [round(edge / self.cell) * self.cell for edge in (height, width)]
        if edges[0] * edges[1] > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            edges = [max(self.cell, math.floor(e / scale / self.cell) * self.cell) for e in (height, width)]
        elif edges[0] * edges[1] < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            edges = [math.ceil(edge * scale / self.cell) * self.cell for edge in (height, width)]
        return edges[0] // self.cell, edges[1] // self.cell

    def check(self, row: Mapping[str, Any], folder: Path) -> tuple[list[tuple[int, int]], list[bytes]]:
        """Decode every image of a row; returns their sizes in tokens, and digests. Raises ValueError that names the wrong one."""
        decoded = [(size, digest) for _, size, digest in self._decoded(row, folder)]
        return [size for size, _ in decoded], [digest for _, digest in decoded]

    def read(
        self, row: Mapping[str, Any], folder: Path, places: Sequence[int], digests: Sequence[bytes] | None = None
    ) -> tuple[PromptImage, ...]:
        """Read the images of a row for the model. `places`: their first tokens; `digests`: of `check`. Raises ValueError."""
        from PIL import Image

        images = []
        for first, (image, (rows, columns), _) in zip(places, self._decoded(row, folder, digests), strict=True):
            edges = columns * self.cell, rows * self.cell
            pixels = (image if image.size == edges else image.resize(edges, Image.Resampling.BICUBIC)).tobytes()
            digest = hashlib.sha256(f"{rows} {columns} ".encode() + pixels).hexdigest()
            images.append(PromptImage(digest, (rows, columns), first, pixels))
        return tuple(images)

    def _decoded(
        self, row: Mapping[str, Any], folder: Path, digests: Sequence[bytes] | None = None
    ) -> Iterator[tuple[Any, tuple[int, int], bytes]]:
        """Yield one decoded image after the other, with its size in tokens and a digest of its file.

        `digests`: those that the files had before, and must have.
        """
        sources = image_sources(row)
        if len(sources) > self.max_count:
            raise ValueError(f"has {len(sources)} images; data.max_images={self.max_count} is the most per prompt")
        for number, source in enumerate(sources):
            try:
                place = located(source, folder)
                content = _content(place)
                digest = hashlib.blake2b(content, digest_size=8).digest()
                if digests is not None and [digest] != digests[number : number + 1]:
                    raise ValueError(
                        f"{shown(image_name(place), 200)} was changed while it was in use; put the old file back and"
                        " resume, or start a new run"
                    )
                image = _decode(content)
                sized = image, self.size(*image.size), digest
            except ValueError as error:
                raise ValueError(f"images[{number}] {error}") from error
            yield sized

    def plain(self, row: Mapping[str, Any], folder: Path, sizes: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Make the row for tasks and rewards: texts in place of content parts, and facts in place of pixels."""
        images = []
        for source, (rows, columns) in zip(image_sources(row), sizes, strict=True):
            place = located(source, folder)
            size = {"width": columns * self.cell, "height": rows * self.cell, "rows": rows, "columns": columns}
            name = image_name(place)
            images.append({**size, "path": name if isinstance(place, Path) else None, "name": name})
        others = {name: value for name, value in row.items() if name not in ("image", "images")}
        lists = {name: [*map(flat_message, value)] for name, value in others.items() if isinstance(value, list)}
        return {**others, **lists, "images": images}

    def messages(self, messages: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
        """Put `count` images into the messages as content parts, for the chat template. Raises ValueError."""
        texts = [message["content"] for message in messages]
        if any(self.token in text for text in texts):
            raise ValueError(f"the prompt has {self.token!r}, which the chat template writes for an image; remove it")
        marks = sum(text.count(IMAGE_MARK) for text in texts)
        if marks not in (0, count):
            raise ValueError(
                f"the prompt has {IMAGE_MARK} {marks} times, and the row has {count} images; write it once for each"
            )
        parted = [
            dict(message, content=_parts(text) if IMAGE_MARK in text else text)
            for message, text in zip(messages, texts, strict=True)
        ]
        if not marks:
            place = next((number for number, message in enumerate(messages) if message["role"] == "user"), -1)
            parted[place]["content"] = [{"type": "image"}] * count + [{"type": "text", "text": texts[place]}]
        return parted

    def placed(self, ids: Sequence[int], sizes: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """Replace each image's placeholder by one per cell; returns the tokens and the images' places. Raises ValueError."""
        if (count := ids.count(self.token_id)) != len(sizes):
            raise ValueError(
                f"the chat template writes {self.token!r} {count} times for {len(sizes)} images; set data.chat_template to"
                " one for images"
            )
        expanded: list[int] = []
        places: list[int] = []
        for token in ids:
            rows, columns = sizes[len(places)] if token == self.token_id else (1, 1)
            places += [len(expanded)] if token == self.token_id else []
            expanded += [token] * (rows * columns)
        return expanded, places


def _processor(config: Mapping[str, Any]) -> dict[str, Any]:
    """Make the settings of the image processor that all models of a family have, without limits of sizes."""
    vision, published = config["vision_config"], published_processor(config["model_type"])
    settings = {
        "image_mean": published.mean,
        "image_std": published.std,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "temporal_patch_size": 2,
    }
    patch = vision.get("patch_size", published.patch)
    settings |= {"patch_size": patch, "merge_size": vision.get("spatial_merge_size", 2)}
    return settings | dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), True)


def _limits(config: Mapping[str, Any], given: Mapping[str, Any], low: int | None, high: int | None) -> tuple[Any, Any]:
    size, published = given.get("size"), published_processor(config["model_type"])
    size = size if isinstance(size, dict) else {}
    return (
        low or given.get("min_pixels") or size.get("shortest_edge") or published.min_pixels,
        high or given.get("max_pixels") or size.get("longest_edge") or published.max_pixels,
    )


def _read_processor(folder: Path) -> tuple[str, dict[str, Any]]:
    """Read the settings of the model's processor, and the file's path for messages."""
    path, given = folder, dict[str, Any]()
    for path in (folder / name for name in reversed(PROCESSOR_FILES)):
        try:
            given = read_json(path) if path.exists() else {}
        except (OSError, ReadError) as error:
            raise ConfigError(f"cannot read {shown(str(path))}: {error}") from error
        nested = given.get("image_processor") if isinstance(given, dict) else None
        given = given if nested is None else nested
        if not isinstance(given, dict):
            raise ConfigError(f"{shown(str(path))} is not an object")
        if nested is not None:
            break
    return shown(str(path)), given


def write_processor(folder: Path, config: Mapping[str, Any], low: int | None, high: int | None) -> None:
    """Put limits of image sizes into the processor's settings of an exported folder, which may have none yet.

    A server then resizes images as the run did. None: the folder's own limit. Raises ConfigError, OSError.
    """
    given = {"image_processor_type": "Qwen2VLImageProcessor", **_processor(config), **_read_processor(folder)[1]}
    low, high = _limits(config, given, low, high)
    size = {"shortest_edge": low, "longest_edge": high}
    settings = {**given, "min_pixels": low, "max_pixels": high, "size": size}
    flat, nesting = (folder / name for name in PROCESSOR_FILES)
    flat.write_text(json.dumps(settings, indent=2) + "\n")
    if nesting.exists() and "image_processor" in (content := read_json(nesting)):
        nesting.write_text(json.dumps({**content, "image_processor": settings}, indent=2) + "\n")


def _equal(given: Any, value: Any) -> bool:
    try:
        return bool(np.allclose(given, value, rtol=1e-4))
    except (TypeError, ValueError):
        return False


def _parts(text: str) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(IMAGE_MARK)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


# -- Rows --------------------------------------------------------------------------------------------------------------
# A row has images in one of these forms, with any number of images:
#
#     {"images": [IMAGE, ...], ...}, {"image": IMAGE, ...}             verl's and TRL's columns
#     {"prompt": [{"role": "user", "content": [{"type": "image", "image": IMAGE}, {"type": "text", "text": "..."}]}]}
#
# IMAGE is a path (relative to the data file's folder), a data: URI, {"bytes": BASE64} as bytes in Parquet and Arrow columns
# are read, {"path": PATH}, or the base64 text alone.


def has_images(row: Mapping[str, Any]) -> bool:
    """Tell whether a row has images, right or wrong."""
    return bool(row.get("images") or row.get("image")) or any(True for _ in _content_images(row))


def empty_images(row: Mapping[str, Any]) -> str | None:
    """Say which column of a row without images has an empty cell, if one has: the model would train on the text alone."""
    empty = [f"{name}={shown(row[name])}" for name in ("images", "image") if row.get(name) is not None]
    return (
        f"has the empty cell {', '.join(empty)}; name the image, or write null in a row without images"
        if empty
        else None
    )


def image_sources(row: Mapping[str, Any]) -> list[Any]:
    """List the images as a row names them. Raises ValueError when it names them in two ways, or none of its parts."""
    columns = [row[name] for name in ("images", "image") if row.get(name)]
    parts = list(_content_images(row))
    inside = [source for source in parts if source is not None]
    if len(columns) + bool(inside) > 1:
        raise ValueError("has images in several of: images, image, the content of messages; name them in one")
    listed = columns[0] if columns and isinstance(columns[0], list) else columns or inside
    if parts and len(parts) != len(listed):
        raise ValueError(f"has {len(parts)} image parts in its messages, and {len(listed)} images")
    return listed


def _content_images(row: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the image of each image part of all messages, or None where a column has it."""
    for name in ("prompt", "messages"):
        for message in row[name] if isinstance(row.get(name), list) else ():
            content = message.get("content") if isinstance(message, dict) else None
            for part in content if isinstance(content, list) else ():
                if isinstance(part, dict) and part.get("type") in ("image", "image_url"):
                    yield part.get("image") or part.get("image_url") or part.get("url") or part.get("path")


def flat_message(message: Any) -> Any:
    """Make a chat message with a text in place of content parts. Raises ValueError."""
    content = message.get("content") if isinstance(message, dict) and "role" in message else None
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "image", "image_url"):
            raise ValueError(f"a message has a content part of type {shown(kind)}; text and image are supported")
        texts.append(IMAGE_MARK if kind != "text" else str(part.get("text") or ""))
    return {**message, "content": "".join(texts)}


# -- Messages of environments -------------------------------------------------------------------------------------------
# A message may show images: {"role": ..., "content": "... <image> ...", "images": [IMAGE, ...]}, or content parts as above.
# IMAGE is as in a row, or bytes or a Pillow image; a path is relative to the environment's working folder. Between processes
# every image is a data: URI in a content part.


def are_files(row: Mapping[str, Any]) -> bool:
    """Tells whether all images of a plain row (`ImageFormat.plain`) are files, which an environment can read."""
    return all(image["path"] is not None for image in row.get("images") or ())


def illustrated(messages: Sequence[Mapping[str, Any]], images: Sequence[Any]) -> list[dict[str, Any]]:
    """Gives each message the images of its marks; without marks, all to the first user message."""
    counts, rest = [message["content"].count(IMAGE_MARK) for message in messages], iter(images)
    if not any(counts):
        counts[next((n for n, message in enumerate(messages) if message["role"] == "user"), -1)] = len(images)
    return [{**m, "images": [*itertools.islice(rest, n)]} for m, n in zip(messages, counts, strict=True)]


def sent_message(message: Any) -> Any:
    """Puts the images of an environment's message into its content, as data: URIs. Raises ValueError."""
    images = message.get("images") if isinstance(message, Mapping) else None
    if images and isinstance(message["content"], str):
        text, marks, rest = message["content"], message["content"].count(IMAGE_MARK), iter(images)
        if marks not in (0, len(images)):
            counts = f"{IMAGE_MARK} {marks} times, and {len(images)} images"
            raise ValueError(f"a message has {counts}; write it once for each, or not at all")
        parts = _parts(text if marks else IMAGE_MARK * len(images) + text)
        content = [{**part, "image": next(rest)} if part["type"] == "image" else part for part in parts]
    elif isinstance(message, Mapping) and isinstance(message.get("content"), list):
        if images:
            raise ValueError(
                "a message has images beside content parts; put each into a part, {'type': 'image', 'image': ...}"
            )
        content = message["content"]
    else:
        return message
    return {**{n: v for n, v in message.items() if n != "images"}, "content": [*map(_sent_part, content)]}


def _sent_part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("image", "image_url"):
        return part
    names = "image", "image_url", "url", "path"
    source: Any = next((part[name] for name in names if part.get(name) is not None), None)
    if hasattr(source, "save"):  # Pillow's
        file = io.BytesIO()
        source.save(file, format="PNG")
        source = file.getvalue()
    source = str(source) if isinstance(source, Path) else source
    content = source if isinstance(source, bytes) else _content(located(source, Path()))
    return {"type": "image", "image": f"{DATA_URI}{base64.b64encode(content).decode()}"}


def located(source: Any, folder: Path) -> Path | bytes:
    """Find the file that an entry of a row names, or the bytes in it. Raises ValueError."""
    if isinstance(source, dict):
        encoded = source.get("bytes")
        source = next((value for name in ("path", "image", "url") if (value := source.get(name))), None)
    else:
        encoded = None
    if encoded is None and isinstance(source, str):
        head, _, body = source.partition(",") if source.startswith("data:") else ("", "", source)
        if "://" in source[:10] and not source.startswith("file://"):
            raise ValueError(
                f"is the URL {shown(source, 80)}; a run downloads nothing: store the file and name its path"
            )
        if head and not (head.startswith("data:image") and head.endswith(";base64")):
            raise ValueError(f"begins with {shown(head, 40)}; of data: URIs only data:image/...;base64,... is read")
        if not head and len(source) <= MAX_PATH and ("." in source or not source.startswith(ENCODED)):
            return folder / source.removeprefix("file://")
        encoded = body
    if not isinstance(encoded, str):
        raise ValueError("is neither a path nor bytes")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"({cut(encoded, 40)!r}) is neither a path nor base64") from None


def check_image(uri: str) -> None:
    """Raises ValueError where a data: URI is no image that a run reads."""
    try:
        _decode(_content(located(uri, Path())))
    except ValueError as error:
        raise ValueError(f"an image {error}") from None


def image_files(row: Mapping[str, Any], folder: Path) -> list[Path]:
    """List the files of a row's images. Raises ValueError."""
    return [place for source in image_sources(row) if isinstance(place := located(source, folder), Path)]


def image_name(place: Path | bytes) -> str:
    """Name an image uniquely: by its full path, or the digest of its bytes."""
    return str(place.absolute()) if isinstance(place, Path) else f"sha256:{hashlib.sha256(place).hexdigest()}"


def _content(place: Path | bytes) -> bytes:
    if isinstance(place, Path):
        try:
            check_regular(place)
            with place.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except ReadError as error:
            raise ValueError(f"{shown(str(place))} {error}") from error
        except OSError as error:
            raise ValueError(f"{shown(str(place))} cannot be read ({reason_of(error)})") from error
    else:
        data = place
    if len(data) > MAX_BYTES:
        raise ValueError(f"has more than {MAX_BYTES:,} bytes, the most that are read")
    return data


def _decode(data: bytes) -> Any:
    """Decode an image as 8-bit RGB, upright; transparent parts are white. Raises ValueError."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of large images, and of damaged metadata
            image: Any = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
            if image.width * image.height > MAX_DECODED:
                raise ValueError(f"has {image.width} x {image.height} pixels; at most {MAX_DECODED:,} are decoded")
            # MPO: a photograph of a telephone, with a preview behind it
            if getattr(image, "is_animated", False) and image.format != "MPO":
                raise ValueError("has several frames; one is supported")
            if image.mode not in MODES:
                raise ValueError(f"is of the mode {image.mode}; 8 bits per channel are supported")
            image.load()
            turn = _turn(image)
            if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
                image = image.convert("RGBA")
                white = Image.new("RGB", image.size, "white")
                white.paste(image, mask=image.getchannel("A"))
                image = white
            image = image.convert("RGB")
            return image if turn is None else image.transpose(turn)
    except UnidentifiedImageError:
        raise ValueError(f"({len(data):,} bytes) is no {', '.join(IMAGE_FORMATS)} file that can be read") from None
    except ValueError:
        raise
    except Exception as error:  # Pillow's decoders raise errors of many types
        raise ValueError(f"cannot be decoded ({cut(f'{type(error).__name__}: {error}', 120)})") from error


def _turn(image: Any) -> Any:
    """Find the rotation that makes a photograph upright. None: none, or its metadata are damaged."""
    from PIL import Image

    try:
        turn = TURNS[image.getexif().get(0x0112, 1)]
    except Exception:  # noqa: BLE001 - Pillow raises errors of many types; every viewer shows such an image
        return None
    return None if turn is None else Image.Transpose(turn)


# -- Inputs of a model -------------------------------------------------------------------------------------------------


def image_patches(image: PromptImage, patch: int, merge: int, norm: tuple[Channels, Channels]) -> np.ndarray[Any, Any]:
    """Normalise and cut an image as Qwen2VLImageProcessor: float32 [patches, 3 * 2 * patch * patch], cell by cell.

    `norm`: mean and standard deviation of the channels.
    """
    rows, columns = image.size
    pixels = np.frombuffer(image.pixels, np.uint8).reshape(rows * merge * patch, columns * merge * patch, 3)
    mean, std = (np.array(part, np.float32) for part in norm)
    values = (pixels.astype(np.float32) / np.float32(255) - mean) / std
    cells = values.reshape(rows, merge, patch, columns, merge, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    frames = np.repeat(cells[:, :, :, :, :, None], 2, axis=5)  # a still image is two equal frames
    return np.ascontiguousarray(frames.reshape(rows * columns * merge * merge, -1))


def rope_positions(length: int, images: Sequence[PromptImage]) -> np.ndarray[Any, Any]:
    """Compute M-RoPE's time, row and column (arXiv 2409.12191) of each token of a sequence: int64 [3, length].

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
