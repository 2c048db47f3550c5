"""Rows with images: every schema and format gives the same prompt, places are the truth, and what is hostile is named.

A cell is 28 x 28 pixels and becomes one token. Pictures of 56 x 84 pixels (width x height) have 3 rows and 2 columns.
"""

from __future__ import annotations

import base64
import gc
import hashlib
import io
import json
import os
import re
import struct
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from grpo_megatron.checks.inputs import read_tokenizer
from grpo_megatron.checks.resume import InputDigests, input_problems
from grpo_megatron.config import Config, ConfigError, DataConfig
from grpo_megatron.data import images as images_module
from grpo_megatron.data import rows as rows_module
from grpo_megatron.data.images import ImageFormat, image_patches, published_processor, rope_positions, sent_message
from grpo_megatron.data.prompts import load_prompts, reward_item
from grpo_megatron.data.responses import load_offline_groups, load_pairs, load_steps
from grpo_megatron.data.tokenizer import TurnRenderer, _memory_limit, load_tokenizer
from grpo_megatron.models.families import architecture_of, read_architecture
from grpo_megatron.rewards import check_reward
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.types import Prompt
from tests.files import row_files
from tests.vision import CELL, EOS, IMAGE_PAD, VOCABULARY, draw, make_config, png, write_tokenizer

DATA = DataConfig(task="jsonl", max_prompt_length=200, max_response_length=100, system_prompt="")
PAD = "<|image_pad|>"
HEAD, TAIL = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
SHOWN = f"<|vision_start|>{PAD}<|vision_end|>"  # of one image, as the template writes it


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    folder = tmp_path_factory.mktemp("model")
    make_config().save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def format_of(model: Path, tokenizer: Any, **data: Any) -> ImageFormat:
    config = json.loads((model / "config.json").read_text())
    return ImageFormat.of(model, config, tokenizer, DATA.model_copy(update=data))


@pytest.fixture
def tokenizer(model: Path) -> Any:
    tokenizer = load_tokenizer(model, DATA)
    tokenizer.image_format = format_of(model, tokenizer)
    return tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With pictures/0.png, 1.png and 2.jpg."""
    (tmp_path / "pictures").mkdir()
    for number in range(2):
        (tmp_path / f"pictures/{number}.png").write_bytes(png(draw(number, 56, 84)))
    draw(2, 56, 84).save(tmp_path / "pictures/2.jpg", quality=90)
    return tmp_path


def one(folder: Path, tokenizer: Any, row: dict[str, Any], data: DataConfig = DATA) -> Prompt:
    [prompt] = load_prompts(data, row_files(folder / "rows.jsonl", {"answer": "", **row}), tokenizer, "gsm8k")
    return prompt


def refusal(folder: Path, tokenizer: Any, row: dict[str, Any], data: DataConfig = DATA) -> str:
    with pytest.raises(ConfigError) as caught:
        one(folder, tokenizer, row, data)
    return str(caught.value)


# -- schemas and formats -----------------------------------------------------------------------------------------------


def content_of(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def rows_of(first: Any, second: Any) -> dict[str, dict[str, Any]]:
    """One prompt with two images, by schema."""
    text = {"type": "text", "text": "and"}
    turn = [{"role": "user", "content": "<image>and<image>"}]
    parts = content_of({"type": "image", "image": first}, text, {"type": "image", "image": second})
    bare = content_of({"type": "image"}, text, {"type": "image"})
    return {
        "verl": {"prompt": turn, "images": [first, second]},
        "text": {"prompt": "<image>and<image>", "images": [first, second]},
        "TRL": {"prompt": bare, "images": [first, second]},
        "parts": {"prompt": parts},
        **(
            {}
            if isinstance(first, dict)
            else {"dicts": {"prompt": turn, "images": [{"image": first}, {"path": second}]}}
        ),
    }


def written(folder: Path, suffix: str, row: dict[str, Any]) -> Path:
    path = folder / f"rows{suffix}"
    if suffix == ".jsonl":
        return row_files(path, row)[0]
    if suffix == ".json":
        path.write_text(json.dumps([row]))
        return path
    table = pa.Table.from_pylist([row])
    if suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".arrow"])
@pytest.mark.parametrize("source", ["path", "absolute", "bytes", "feature", "named feature", "uri"])
def test_schemas_formats_and_sources_give_one_prompt(folder: Path, tokenizer: Any, suffix: str, source: str) -> None:
    files = [folder / f"pictures/{number}.png" for number in range(2)]
    contents: list[Any] = [file.read_bytes() for file in files]
    if suffix in (".jsonl", ".json"):  # JSON has no bytes
        contents = [base64.b64encode(content).decode() for content in contents]
    given: dict[str, list[Any]] = {
        "path": [f"pictures/{number}.png" for number in range(2)],
        "absolute": [str(files[0]), f"file://{files[1]}"],
        "bytes": contents,
        "feature": [{"bytes": content, "path": None} for content in contents],  # `datasets.Image` in a file of the Hub
        "named feature": [{"bytes": content, "path": "lost.png"} for content in contents],
        "uri": [uri(file.read_bytes()) for file in files],
    }
    pixels = [np.asarray(draw(number, 56, 84)).tobytes() for number in range(2)]
    first = len(tokenizer(f"{HEAD}<|vision_start|>")["input_ids"])
    second = first + 6 + len(tokenizer("<|vision_end|>and<|vision_start|>")["input_ids"])
    for schema, row in rows_of(*given[source]).items():
        [prompt] = load_prompts(DATA, [written(folder, suffix, {**row, "answer": ""})], tokenizer, "gsm8k")
        assert prompt.text == f"{HEAD}{SHOWN}and{SHOWN}{TAIL}", schema
        assert [(image.size, image.first) for image in prompt.images] == [((3, 2), first), ((3, 2), second)]
        assert [image.pixels for image in prompt.images] == pixels
        ids = list(prompt.prompt_ids)
        assert ids[first : first + 6] == [IMAGE_PAD] * 6 == ids[second : second + 6] and ids.count(IMAGE_PAD) == 12
        assert len(ids) == len(tokenizer(prompt.text)["input_ids"]) + 10


def test_openai_parts_and_one_image_column(folder: Path, tokenizer: Any) -> None:
    data = (folder / "pictures/0.png").read_bytes()
    url = content_of({"type": "text", "text": "See "}, {"type": "image_url", "image_url": {"url": uri(data)}})
    assert one(folder, tokenizer, {"prompt": url}).text == f"{HEAD}See {SHOWN}{TAIL}"
    column = one(folder, tokenizer, {"prompt": "See", "image": "pictures/2.jpg"})
    assert column.text == f"{HEAD}{SHOWN}See{TAIL}" and len(column.images) == 1  # no mark: first, as TRL puts it
    turns = [
        {"role": "user", "content": "See"},
        {"role": "assistant", "content": "."},
        {"role": "user", "content": "?"},
    ]
    assert one(folder, tokenizer, {"prompt": turns, "images": ["pictures/2.jpg"]}).text.startswith(f"{HEAD}{SHOWN}See")


def test_several_files_in_one_folder_of_a_split(folder: Path, tokenizer: Any) -> None:
    """As `datasets` writes a data set of the Hub. Paths are relative to the folder."""
    for number in range(2):
        row = {"prompt": "x", "answer": "", "image": f"pictures/{number}.png"}
        pq.write_table(pa.Table.from_pylist([row]), folder / f"train-{number:05d}-of-00002.parquet")
    prompts = load_prompts(DATA, [folder / "train"], tokenizer, "gsm8k")
    assert [len(prompt.images) for prompt in prompts] == [1, 1]
    assert len({prompt.images[0].digest for prompt in prompts}) == 2


# -- places are the truth ----------------------------------------------------------------------------------------------


def test_in_a_row_without_images_marks_and_placeholders_are_text(folder: Path, tokenizer: Any) -> None:
    prompt = one(folder, tokenizer, {"prompt": f"<image>{PAD}?", "images": None})
    assert prompt.text == f"{HEAD}<image>{PAD}?{TAIL}" and prompt.images == ()
    assert prompt.prompt_ids.count(IMAGE_PAD) == 1 and len(prompt.prompt_ids) == len(
        tokenizer(prompt.text)["input_ids"]
    )
    places = rope_positions(len(prompt.prompt_ids), prompt.images)
    assert (places == np.arange(len(prompt.prompt_ids))).all()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "<image>", "images": ["pictures/0.png"] * 2}, "has <image> 1 times, and the row has 2 images"),
        ({"prompt": "<image><image>", "image": "pictures/0.png"}, "has <image> 2 times, and the row has 1 images"),
        ({"prompt": f"a {PAD}", "image": "pictures/0.png"}, f"the prompt has '{PAD}', which the chat template writes"),
        (
            {"prompt": content_of({"type": "image", "image": "pictures/0.png"}), "image": "pictures/0.png"},
            "has images in several of",
        ),
        ({"prompt": "x", "image": "pictures/0.png", "images": ["pictures/0.png"]}, "has images in several of"),
        ({"prompt": content_of({"type": "image"})}, "has 1 image parts in its messages, and 0 images"),
        ({"prompt": content_of({"type": "video", "video": "a.mp4"})}, "a content part of type 'video'"),
        ({"prompt": "x", "images": ["pictures/0.png"] * 9}, "has 9 images; data.max_images=8"),
    ],
)
def test_rows_whose_images_have_no_clear_place(folder: Path, tokenizer: Any, row: dict[str, Any], message: str) -> None:
    text = refusal(folder, tokenizer, row)
    assert "rows.jsonl': 1 of 1 row is wrong:\n  line 1: " in text and message in text


def test_a_prompt_is_dropped_or_refused_and_never_cut_through_an_image(folder: Path, tokenizer: Any) -> None:
    """A picture of 6 tokens: with them the prompt has one more than fits."""
    rows = [{"prompt": "x" * count, "answer": "", "image": "pictures/0.png"} for count in (1, 2)]
    files = row_files(folder / "rows.jsonl", *rows)
    whole = load_prompts(DATA, files, tokenizer, "gsm8k")
    limit = len(whole[0].prompt_ids)
    data = DATA.model_copy(update={"max_prompt_length": limit})
    assert [prompt.uid for prompt in load_prompts(data, files, tokenizer, "gsm8k")] == ["jsonl/rows/0"]
    with pytest.raises(ConfigError, match=f"1 of 2 prompts are longer than {limit} tokens .the first: jsonl/rows/1."):
        load_prompts(data.model_copy(update={"filter_overlong_prompts": False}), files, tokenizer, "gsm8k")


def test_models_templates_and_environments_that_cannot_show_images(folder: Path, tokenizer: Any, model: Path) -> None:
    row = {"prompt": "x", "image": "pictures/0.png"}
    blind = load_tokenizer(model, DATA)
    assert "has images, and the model reads none; set model.path" in refusal(folder, blind, row)
    assert "the model reads none" in refusal(folder, blind, {"prompt": content_of({"type": "image", "image": "a"})})
    plain = DATA.model_copy(update={"apply_chat_template": False})
    assert "set data.apply_chat_template=true" in refusal(folder, tokenizer, row, plain)
    turns, answered = {"renderer": TurnRenderer(tokenizer)}, {**row, "answer": ""}
    inside = base64.b64encode((folder / "pictures/0.png").read_bytes()).decode()
    with pytest.raises(ConfigError, match="one is no file: an environment is given the paths"):
        load_prompts(DATA, row_files(folder / "rows.jsonl", {**answered, "image": inside}), tokenizer, "gsm8k", **turns)
    [prompt] = load_prompts(DATA, row_files(folder / "rows.jsonl", answered), tokenizer, "gsm8k", **turns)
    [message] = sent_message(prompt.extra["row"]["messages"][-1])["content"][:1]
    assert message == {"type": "image", "image": f"data:image;base64,{inside}"}
    with pytest.raises(ValueError, match="images beside content parts; put each into a part"):
        sent_message(
            {"role": "user", "content": [{"type": "text", "text": "x"}], "images": [folder / "pictures/0.png"]}
        )
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert f"writes '{PAD}' 0 times for 1 images; set data.chat_template" in refusal(folder, tokenizer, row)
    with pytest.raises(ConfigError, match=r"data.max_images=3: the model reads no images .qwen2."):
        arch = architecture_of({**read_qwen2(), "vocab_size": 200})
        config = Config.model_validate({"model": {"path": model}, "data": {"max_images": 3, "task": "jsonl"}})
        read_tokenizer(config, arch)
    config = Config.model_validate({"model": {"path": model}, "data": {"max_images": 3, "task": "jsonl"}})
    assert read_tokenizer(config, read_architecture(model)).image_format.max_count == 3


def read_qwen2() -> dict[str, Any]:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    return {
        "model_type": "qwen2",
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        **sizes,
    }


# -- the processor -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "patch"), [("qwen2_5_vl", 14), ("qwen3_vl", 16)])
def test_sizes_and_patches_are_those_of_the_published_processor(
    family: str, patch: int, tokenizer: Any, tmp_path: Path
) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

    cell, (mean, std, *_) = 2 * patch, published_processor(family)
    low, high = 4 * cell * cell, 40 * cell * cell
    make_config(family, tower={"patch_size": patch}).save_pretrained(tmp_path)
    form = format_of(tmp_path, tokenizer, image_min_pixels=low, image_max_pixels=high)
    draws = np.random.default_rng(0).integers(1, 900, (2000, 2)).tolist()
    edges = [(1, 1), (10, 1000), (2000, 10), (13, 14), (14, 42), *draws]
    for width, height in edges:
        if max(width, height) <= 200 * min(width, height):
            expected = smart_resize(height, width, cell, low, high)
            assert form.size(width, height) == (expected[0] // cell, expected[1] // cell), (width, height)
    settings = {"patch_size": patch, "image_mean": mean, "image_std": std}
    processor = Qwen2VLImageProcessorPil(min_pixels=low, max_pixels=high, **settings)
    for number, (width, height) in enumerate([(56, 84), (61, 47), (333, 210), (9, 31)]):
        drawn = draw(number, width, height)
        drawn.save(tmp_path / "a.png")
        [image] = form.read({"image": "a.png"}, tmp_path, [0])
        out = processor(drawn, return_tensors="np")
        assert out["image_grid_thw"].tolist() == [[1, 2 * image.size[0], 2 * image.size[1]]]
        assert np.abs(image_patches(image, patch, 2, (mean, std)) - out["pixel_values"]).max() < 1e-6


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("preprocessor_config.json", {"min_pixels": 784, "max_pixels": 1568}, (784, 1568)),
        (
            "preprocessor_config.json",
            {"size": {"shortest_edge": 784, "longest_edge": 1568}, "resample": 3},
            (784, 1568),
        ),
        ("processor_config.json", {"image_processor": {"max_pixels": 7840}}, (3136, 7840)),
        (
            "preprocessor_config.json",
            {"image_mean": list(published_processor("").mean), "do_resize": True},
            (3136, 12845056),
        ),
        ("preprocessor_config.json", {"image_mean": [0.5, 0.5, 0.5]}, r"image_mean=\[0.5, 0.5, 0.5\] is not supported"),
        ("preprocessor_config.json", {"image_std": "x"}, "image_std='x' is not supported"),
        ("preprocessor_config.json", {"resample": 2}, "resample=2 is not supported; 3 is"),
        ("preprocessor_config.json", {"rescale_factor": 1.0}, "rescale_factor=1.0 is not supported"),
        ("preprocessor_config.json", {"patch_size": 16}, "patch_size=16 is not supported; 14 is"),
        ("preprocessor_config.json", {"merge_size": 1}, "merge_size=1 is not supported; 2 is"),
        ("preprocessor_config.json", {"temporal_patch_size": 1}, "temporal_patch_size=1 is not supported"),
        ("preprocessor_config.json", {"do_normalize": False}, "do_normalize=False is not supported"),
        ("processor_config.json", {"image_processor": {"do_rescale": False}}, "do_rescale=False is not supported"),
        (
            "preprocessor_config.json",
            {"max_pixels": 100},
            "an image token is 28 x 28 pixels, so set 784 <= image_max_pixels",
        ),
        ("preprocessor_config.json", {"max_pixels": "many"}, "data.image_max_pixels='many'"),
        ("preprocessor_config.json", [], "is not an object"),
        ("preprocessor_config.json", None, "cannot read .*is not JSON"),
    ],
)
def test_a_processor_file_is_honoured_or_refused(
    tmp_path: Path, tokenizer: Any, model: Path, file: str, content: Any, expected: Any
) -> None:
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    (tmp_path / file).write_text("{" if content is None else json.dumps(content))
    if isinstance(expected, tuple):
        form = format_of(tmp_path, tokenizer)
        assert (form.min_pixels, form.max_pixels) == expected
        assert format_of(tmp_path, tokenizer, image_max_pixels=9000, image_min_pixels=800).max_pixels == 9000
        return
    with pytest.raises(ConfigError, match=expected):
        format_of(tmp_path, tokenizer)


def test_limits_of_pixels(folder: Path, model: Path, tokenizer: Any) -> None:
    for low, high, size in ((None, 2 * CELL * CELL, (1, 1)), (24 * CELL * CELL, None, (6, 4)), (None, None, (3, 2))):
        tokenizer.image_format = format_of(model, tokenizer, image_min_pixels=low or 784, image_max_pixels=high)
        [image] = one(folder, tokenizer, {"prompt": "x", "image": "pictures/0.png"}).images
        assert image.size == size and len(image.pixels) == image.num_tokens * CELL * CELL * 3
    with pytest.raises(ConfigError, match="image_min_pixels <= image_max_pixels"):
        format_of(model, tokenizer, image_min_pixels=2000, image_max_pixels=1000)


# -- what is accepted, and what is refused by name ---------------------------------------------------------------------


def saved(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


RED = (255, 0, 0)


def half(mode: str = "RGBA") -> Any:
    """Red on the left, transparent on the right."""
    image = Image.new("RGBA", (56, 56), (0, 0, 255, 0))
    image.paste((*RED, 255), (0, 0, 28, 56))
    return image.convert(mode)


def lying() -> Any:
    """The left half is red: upright by orientation 6 (turn clockwise), the upper half is."""
    image = Image.new("RGB", (56, 28), "white")
    image.paste(RED, (0, 0, 28, 28))
    return image


def with_exif(content: bytes) -> bytes:
    return saved(lying(), "JPEG", quality=100, subsampling=0, exif=content)


def oriented(number: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = number
    return exif.tobytes()


@pytest.mark.parametrize(
    ("content", "left_top", "right_bottom"),
    [
        (saved(half()), RED, (255, 255, 255)),
        (saved(half("RGBA").quantize(8)), RED, (255, 255, 255)),  # a palette with transparency
        (saved(half(), "WEBP", lossless=True), RED, (255, 255, 255)),
        (saved(Image.new("LA", (56, 56), (7, 0))), (255, 255, 255), (255, 255, 255)),
        (saved(Image.new("L", (56, 56), 9)), (9, 9, 9), (9, 9, 9)),
        (saved(Image.new("1", (56, 56), 1)), (255, 255, 255), (255, 255, 255)),
        (saved(Image.new("CMYK", (56, 56), (0, 255, 255, 0)), "JPEG", quality=100), RED, RED),
        (saved(Image.new("RGB", (56, 56), RED), "GIF"), RED, RED),
        (saved(Image.new("RGB", (56, 56), RED), "BMP"), RED, RED),
        (saved(Image.new("RGB", (1, 1), RED)), RED, RED),
        (with_exif(oriented(6)), RED, (255, 255, 255)),
        (with_exif(oriented(8)), (255, 255, 255), RED),
        (with_exif(b"Exif\0\0damaged"), RED, (255, 255, 255)),
        (with_exif(oriented(99)), RED, (255, 255, 255)),
    ],
)
def test_pixels_are_upright_rgb_on_white(
    content: bytes, left_top: tuple[int, ...], right_bottom: tuple[int, ...], tokenizer: Any, tmp_path: Path
) -> None:
    [image] = tokenizer.image_format.read({"image": {"bytes": base64.b64encode(content).decode()}}, tmp_path, [0])
    rows, columns = image.size
    pixels = np.frombuffer(image.pixels, np.uint8).reshape(rows * CELL, columns * CELL, 3).astype(int)
    assert np.abs(pixels[2, 2] - left_top).max() < 4 and np.abs(pixels[-3, -3] - right_bottom).max() < 4


def test_every_orientation_is_pillows(tokenizer: Any) -> None:
    from PIL import ImageOps

    for number in range(1, 9):
        content = saved(draw(1, 56, 84), "JPEG", quality=100, exif=oriented(number))
        expected = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
        assert images_module._decode(content).tobytes() == expected.tobytes(), number


def declared(width: int, height: int) -> bytes:
    """A PNG of 70 bytes that says how large it is."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def frames(kind: str) -> bytes:
    first, *others = [Image.new("RGB", (56, 56), (9 * n, 0, 0)) for n in range(3)]
    return saved(first, kind, save_all=True, append_images=others)


SVG = b"<svg xmlns='http://www.w3.org/2000/svg'></svg>"
PICTURE = png(draw(0, 56, 84))
FILES = {  # name -> content, and what the message says
    "bomb.png": (declared(100_000, 100_000), "DecompressionBombError"),
    "large.png": (declared(9_000, 9_000), "has 9000 x 9000 pixels; at most 67,108,864 are decoded"),
    "no_rows.png": (declared(4_000, 4_000), "cannot be decoded"),
    "cut.png": (PICTURE[:-60], "cannot be decoded"),
    "cut.jpg": (saved(draw(0, 560, 840), "JPEG")[:-2000], "cannot be decoded (OSError: image file is truncated"),
    "head.png": (PICTURE[:20], "cannot be decoded"),
    "empty.png": (b"", "(0 bytes) is no PNG"),
    "deep.png": (saved(Image.new("I;16", (56, 56))), "is of the mode I;16; 8 bits per channel are supported"),
    "moving.gif": (frames("GIF"), "has several frames; one is supported"),
    "moving.webp": (frames("WEBP"), "has several frames"),
    "moving.png": (frames("PNG"), "has several frames"),
    "drawing.svg": (SVG, "is no PNG"),
    "page.pdf": (b"%PDF-1.7\n", "is no PNG"),
    "scan.tiff": (saved(draw(0), "TIFF"), "is no PNG"),
    "real.tiff": (saved(Image.new("F", (56, 56)), "TIFF"), "is no PNG"),
    "text.png": (b"not a picture", "(13 bytes) is no PNG, JPEG, WEBP, BMP, GIF file that can be read"),
    "thin.png": (saved(Image.new("RGB", (1, 201))), "has 1 x 201 pixels; one edge may be 200 times the other"),
    "palette.bmp": (saved(Image.new("P", (56, 56)), "BMP")[:60], "cannot be decoded"),
}
ROWS: dict[str, tuple[Any, str]] = {  # name -> the entry in images, and what the message says
    **{f"file {name}": (name, message) for name, (_, message) in FILES.items()},
    **{
        f"bytes {name}": ({"bytes": base64.b64encode(content).decode()}, message)
        for name, (content, message) in FILES.items()
    },
    "missing": ("missing.png", "missing.png' cannot be read (No such file or directory)"),
    "folder": (".", "is a folder, not a regular file"),
    "FIFO": ("fifo.png", "is a FIFO, not a regular file"),
    "device": ("zero.png", "is a device, not a regular file"),
    "dangling link": ("dangling.png", "cannot be read (No such file or directory)"),
    "NUL": ("a\0.png", "it contains the character NUL"),
    "surrogate": ("a\ud800.png", "half of a surrogate pair"),
    "long name": ("a" * 300 + ".png", "a name in it has 304 bytes"),
    "very large file": ("sparse.png", "has more than 67,108,864 bytes, the most that are read"),
    "URL": ("https://example.org/a.png", "is the URL 'https://example.org/a.png'; a run downloads nothing"),
    "URL of a part": ({"url": "s3://bucket/a.png"}, "is the URL 's3://bucket/a.png'"),
    "number": (5, "is neither a path nor bytes"),
    "true": (True, "is neither a path nor bytes"),
    "null": (None, "is neither a path nor bytes"),
    "list of lists": (["a.png"], "is neither a path nor bytes"),
    "empty object": ({"bytes": None, "path": None}, "is neither a path nor bytes"),
    "object with other keys": ({"file_name": "a.png"}, "is neither a path nor bytes"),
    "bytes that are a list": ({"bytes": [1, 2]}, "is neither a path nor bytes"),
    "garbage": ({"bytes": "@@@"}, "('@@@') is neither a path nor base64"),
    "URI of garbage": ("data:image/png;base64,@@@", "('@@@') is neither a path nor base64"),
    "URI without base64": ("data:image/svg+xml,%3Csvg%3E", "begins with 'data:image/svg+xml'; of data: URIs only"),
    "URI of a page": (uri(b"x", "text/html"), "begins with 'data:text/html;base64'; of data: URIs only"),
    "URI of a drawing": (uri(SVG, "image/svg+xml"), "is no PNG"),
}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    for name, (content, _) in FILES.items():
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "fifo.png")
    (folder / "zero.png").symlink_to("/dev/zero")
    (folder / "dangling.png").symlink_to("nowhere.png")
    with (folder / "sparse.png").open("wb") as file:
        file.truncate(1 << 40)
    return folder


@pytest.mark.parametrize("name", ROWS)
def test_hostile_images_are_named(hostile: Path, tokenizer: Any, name: str) -> None:
    """Each with 160 MB of memory at most: nothing that a header declares is believed."""
    source, message = ROWS[name]
    with _memory_limit(160 << 20), pytest.raises(ValueError) as caught:
        tokenizer.image_format.check({"images": [source]}, hostile)
    text = str(caught.value)
    assert text.startswith("images[0] ") and message in text and len(text) < 600


def test_all_of_them_are_listed_before_the_run(hostile: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "SHOWN_PROBLEMS", 100)
    good = {"prompt": "x", "answer": "", "images": [uri(PICTURE)]}
    rows = [{"prompt": "x", "answer": "", "images": [uri(PICTURE), source]} for source, _ in ROWS.values()]
    files = row_files(hostile / "rows.jsonl", good, *rows)
    with pytest.raises(ConfigError) as caught:
        load_prompts(DATA, files, tokenizer, "gsm8k")
    lines = str(caught.value).splitlines()
    assert len(ROWS) > 40 and f"{len(ROWS)} of {len(ROWS) + 1} rows are wrong" in lines[0]
    for number, (line, (_, message)) in enumerate(zip(lines[1:], ROWS.values(), strict=True), 2):
        assert line.startswith(f"  line {number}: images[1] ") and message in line


def test_hostile_bytes_of_a_column(tmp_path: Path, tokenizer: Any) -> None:
    """Bytes without an object around them: what does not begin as an image does is taken for a path."""
    contents = [PICTURE, PICTURE[:-60], frames("GIF"), b"%PDF-1.7 " * 500, b"\0" * 100, b""]
    rows = [{"prompt": "x", "answer": "", "images": [content]} for content in contents]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError) as caught:
        load_prompts(DATA, [tmp_path / "rows.parquet"], tokenizer, "gsm8k")
    lines = str(caught.value).splitlines()[1:]
    assert [line.partition(":")[0] for line in lines] == [f"  row {number}" for number in range(1, 6)]
    wanted = ("cannot be decoded", "several frames", "is no PNG", "cannot be read", "is a folder")
    assert all(message in line for line, message in zip(lines, wanted, strict=True)), lines


# -- when images are decoded -------------------------------------------------------------------------------------------


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The bytes of each image that was decoded."""
    sizes: list[int] = []
    decode: Callable[[bytes], Any] = images_module._decode
    monkeypatch.setattr(images_module, "_decode", lambda data: sizes.append(len(data)) or decode(data))
    yield sizes


def test_pixels_are_held_only_while_someone_refers_to_them(folder: Path, tokenizer: Any, decoded: list[int]) -> None:
    rows = [{"prompt": f"x{n}", "answer": "", "image": f"pictures/{n % 2}.png"} for n in range(20)]
    prompts = load_prompts(DATA, row_files(folder / "rows.jsonl", *rows), tokenizer, "gsm8k")
    assert len(decoded) == 20  # the check
    held = list(prompts)
    assert all(prompt.prompt_ids.count(IMAGE_PAD) == 6 for prompt in held) and len(decoded) == 20  # ids need no pixels
    first = held[3].images[0]
    assert held[3].images[0] is first and len(decoded) == 21
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None and held[3].images and len(decoded) == 22
    text = load_prompts(DATA, row_files(folder / "text.jsonl", {"prompt": "x", "answer": ""}), tokenizer, "gsm8k")[0]
    assert text.images == () and "_placed" not in vars(text)  # not tokenised for that


@pytest.mark.parametrize("side", [28, 56])
def test_an_image_that_changes_during_the_run_is_an_error(folder: Path, tokenizer: Any, side: int) -> None:
    """Its size, or its pixels alone."""
    for number in range(2):
        (folder / f"pictures/{number}.png").write_bytes(png(draw(number, 56, 56)))
    prompt = one(folder, tokenizer, {"prompt": "x", "images": ["pictures/0.png", "pictures/1.png"]})
    assert len(prompt.images) == 2
    gc.collect()
    (folder / "pictures/1.png").write_bytes(png(draw(2, side, side)))
    with pytest.raises(
        ConfigError, match=r"row jsonl/rows/0: images\[1\] '.*/pictures/1.png' was changed while it was in use"
    ):
        prompt.images  # noqa: B018


@pytest.mark.parametrize("cell", ["", {}, []], ids=repr)
@pytest.mark.parametrize("name", ["image", "images"])
def test_an_empty_cell_beside_images_is_no_row_of_text(folder: Path, tokenizer: Any, name: str, cell: Any) -> None:
    rows = [{"prompt": "x", "answer": "", name: value} for value in ("pictures/0.png", None, cell)]
    with pytest.raises(ConfigError, match=re.escape(f"line 3: has the empty cell {name}={cell!r}; name the image")):
        load_prompts(DATA, row_files(folder / "rows.jsonl", *rows), tokenizer, "gsm8k")


# -- rows with responses -----------------------------------------------------------------------------------------------


def test_rows_with_responses_have_images_in_their_prompts(folder: Path, tokenizer: Any, decoded: list[int]) -> None:
    image, asked = {"type": "image", "image": "pictures/1.png"}, {"type": "text", "text": "How many?"}
    expected = one(folder, tokenizer, {"prompt": "How many?", "image": "pictures/1.png"})

    def groups(load: Callable[..., Any], row: dict[str, Any], *arguments: Any) -> Any:
        return load(DATA, row_files(folder / f"{len(list(folder.iterdir()))}.jsonl", row), tokenizer, *arguments)

    answer = {"role": "assistant", "content": [{"type": "text", "text": "2"}]}
    user = {"role": "user", "content": [image, asked]}
    found = [
        groups(load_offline_groups, {"prompt": [user], "response": "2"}, {"response": 1.0}),
        groups(load_offline_groups, {"messages": [user, answer]}, {"response": 1.0}),
        groups(
            load_offline_groups, {"prompt": [user], "chosen": "2", "rejected": "3"}, {"chosen": 1.0, "rejected": 0.0}
        ),
        groups(load_pairs, {"prompt": [user], "chosen": [answer], "rejected": "3"}, None),
        groups(load_steps, {"prompt": [user], "completions": ["2"], "labels": [True]}, "\n\n"),
    ]
    decoded.clear()
    for [(prompt, responses, _)] in found:
        assert prompt.prompt_ids == expected.prompt_ids and responses[0].ids == [VOCABULARY.index("2"), EOS]
    assert not decoded
    for [(prompt, _, _)] in found:
        assert prompt.images == expected.images and prompt.images[0].first == expected.images[0].first


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "x", "image": "pictures/0.png", "response": "see <image>"},
            "has images, and <image> after the prompt",
        ),
        (
            {
                "images": ["pictures/0.png"] * 2,
                "messages": [
                    {"role": "user", "content": [{"type": "image"}]},
                    {"role": "assistant", "content": "a"},
                    {"role": "user", "content": [{"type": "image"}]},
                    {"role": "assistant", "content": "b"},
                ],
            },
            "has images, and <image> after the prompt; only the prompt can show images",
        ),
        ({"prompt": "<image><image>", "image": "pictures/0.png", "response": "2"}, "has <image> 2 times"),
        ({"text": "x", "image": "pictures/0.png"}, "has images, and a plain text has no prompt that shows them"),
    ],
)
def test_responses_show_no_images(folder: Path, tokenizer: Any, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="line 1") as caught:
        load_offline_groups(DATA, row_files(folder / "sft.jsonl", row), tokenizer, {"response": 1.0})
    assert message in str(caught.value)


# -- rewards, tasks, digests -------------------------------------------------------------------------------------------

REWARD = """
import base64


def score(completion, images, **columns):
    assert "image" not in columns
    assert "image_pixels" not in columns
    return sum(image["width"] + image["height"] for image in images) + len(images[0]["path"] or "") / 1000


def bright(completions, image_pixels, images, **columns):
    heights = [one[0]["height"] for one in images]
    return [len(base64.b64decode(one[0])) / height for one, height in zip(image_pixels, heights)]
"""


def test_rewards_see_facts_and_pixels_only_where_they_name_them(
    folder: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "own_rewards.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(folder))
    rows = [{"prompt": "x", "image": "pictures/0.png"}]
    rows += [{"prompt": content_of({"type": "image", "image": uri(PICTURE)}), "kept": [1]}]
    files = row_files(folder / "rows.jsonl", *({**row, "answer": ""} for row in rows))
    by_path, held = load_prompts(DATA, files, tokenizer, "gsm8k")
    size = {"width": 56, "height": 84, "rows": 3, "columns": 2}
    path = str(folder / "pictures/0.png")
    assert by_path.columns == {"prompt": "x", "answer": "", "images": [{**size, "path": path, "name": path}]}
    facts, digest = {**size, "path": None}, hashlib.sha256(PICTURE).hexdigest()
    assert held.columns["images"] == [{**facts, "name": f"sha256:{digest}"}] and held.columns["kept"] == [1]
    assert held.columns["prompt"] == [{"role": "user", "content": "<image>"}]
    check_reward("own_rewards:bright")  # imports it, as the check before a run
    items = [reward_item(prompt, "y")._replace(name="own_rewards:score") for prompt in (by_path, held)]
    with RewardPool(1, 20.0, {}, []) as pool:
        assert [result.reward for result in pool.grade(items)] == [140 + len(path) / 1000, 140]
        assert [one.reward for one in pool.grade([item._replace(name="own_rewards:bright") for item in items])] == [
            168
        ] * 2


@pytest.mark.parametrize(
    ("task", "row", "answer", "right", "text"),
    [
        (
            "geometry3k",
            {"images": [{"bytes": PICTURE, "path": None}], "problem": "<image>Find $x$.", "answer": "2 \\sqrt { 221 }"},
            "2 \\sqrt { 221 }",
            "2\\sqrt{221}",
            f"{SHOWN}Find $x$.",
        ),
        (
            "geoqa",
            {
                "image": {"bytes": PICTURE, "path": "0.png"},
                "problem": "How large is the angle ABC? ()",
                "solution": "<answer> 145\u00b0 </answer>",
            },
            "145\u00b0",
            "145",
            f"{SHOWN}How large is the angle ABC? ()",
        ),
        (
            "verl",
            {
                "data_source": "hiyouga/geometry3k",
                "prompt": [{"role": "user", "content": "<image>Find $x$."}],
                "images": [{"bytes": PICTURE, "path": None}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": "48"},
                "extra_info": {"split": "train", "index": 0},
            },
            "48",
            "48",
            f"{SHOWN}Find $x$.",
        ),
    ],
)
def test_published_geometry(
    tmp_path: Path, tokenizer: Any, task: str, row: dict[str, Any], answer: str, right: str, text: str
) -> None:
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train-00000-of-00001.parquet")
    data = DATA.model_copy(update={"task": task, "max_prompt_length": 400})
    [prompt] = load_prompts(data, [tmp_path / "train"], tokenizer)
    assert (prompt.answer, prompt.reward, len(prompt.images)) == (answer, "math", 1)
    assert prompt.text.startswith(HEAD + text)
    items = [reward_item(prompt, f"So \\boxed{{{one}}}.") for one in (right, "7")]
    with RewardPool(1, 20.0, {}, []) as pool:
        assert [result.reward for result in pool.grade(items)] == [1.0, 0.0]


def test_a_changed_image_is_noticed_as_a_changed_row_is(folder: Path, model: Path) -> None:
    rows = [{"prompt": "x", "answer": "", "images": [f"pictures/{n}.png", uri(PICTURE)]} for n in range(2)]
    [file] = row_files(folder / "rows.jsonl", *rows)
    values = {"model": {"path": model}, "data": {"train_files": [file], "task": "jsonl"}}
    config = Config.model_validate({**values, "trainer": {"output_dir": folder / "out"}})

    def inputs() -> Any:
        digests = InputDigests(config)
        try:
            return digests.state()
        finally:
            digests.close()

    def entries() -> Any:
        return inputs()["data.train_files"]

    (checkpoint := folder / "out/checkpoints/step_000001").mkdir(parents=True)
    (checkpoint / "trainer.json").write_text(json.dumps({"run": {"inputs": inputs()}}))

    before, images = entries(), f"{file} (its images)"
    assert before.keys() == {str(file), images}
    assert before[images]["size"] == sum((folder / f"pictures/{n}.png").stat().st_size for n in range(2))
    content = (folder / "pictures/1.png").read_bytes()
    (folder / "pictures/1.png").write_bytes(content[:-1] + b"?")
    after = entries()
    assert after[str(file)] == before[str(file)] and after[images]["size"] == before[images]["size"]
    assert after[images]["sha256"] != before[images]["sha256"]
    [problem] = [str(problem) for problem in input_problems(config, prints=False)]
    assert f"bytes as before): 1 of its images, first {folder}/pictures/1.png of row 1 since {checkpoint}" in problem
