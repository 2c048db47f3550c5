"""Draws the shapes example: pictures, rows, a tokenizer and a random Qwen2.5-VL of 0.9 M parameters; and its reward.

    python examples/vision/shapes.py outputs/shapes     # --seed N: another draw of everything; --shuffled: pictures of other rows

A picture has 2 x 2, 2 x 3 or 3 x 2 cells. Each is empty, or has a square or a circle of some colour. The question is how many
shapes there are. A hash of what is in the cells keeps a tenth of all pictures for validation.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from grpo_megatron.environments.environment import ChatMessage, Environment, Step

CELL = 28  # pixels: a cell is one token
GRIDS = ((2, 2), (2, 3), (3, 2))  # rows, columns
SHAPES = ("square", "circle")
COLOURS = ("crimson", "royalblue", "seagreen", "darkorange", "purple")
NUM_WARM_UP, NUM_TRAIN, NUM_VAL = 2048, 1024, 256
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VOCABULARY = [*SPECIAL, *"0123456789", " ", "?", "\n", "shapes", "user", "assistant"]
# One text for each message, one placeholder for each image in it.
TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part.text }}{% endif %}"
    "{%- endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def exact(completion: str, answer: str) -> float:
    """The reward: 1 for the right digit and nothing else."""
    return float(completion.strip() == answer)


class Picture(NamedTuple):
    """The shape in each cell, row by row: "square", "circle" or ""; and a colour for each."""

    rows: int
    columns: int
    cells: tuple[str, ...]
    colours: tuple[str, ...]

    @property
    def is_held_out(self) -> bool:
        """True for a picture of the validation rows: the colours do not count."""
        name = f"{self.rows} {self.columns} {self.cells}"
        return hashlib.sha256(name.encode()).digest()[0] % 10 == 0


def pictures(draw: random.Random, *, held_out: bool) -> Iterator[Picture]:
    """Random pictures, of those that are held out or of the others."""
    while True:
        rows, columns = draw.choice(GRIDS)
        cells = tuple(draw.choice(("", "", *SHAPES)) for _ in range(rows * columns))
        picture = Picture(rows, columns, cells, tuple(draw.choice(COLOURS) for _ in cells))
        if picture.is_held_out == held_out:
            yield picture


def paint(picture: Picture) -> Any:
    """The picture as a Pillow image."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (picture.columns * CELL, picture.rows * CELL), "white")
    brush = ImageDraw.Draw(image)
    for number, (shape, colour) in enumerate(zip(picture.cells, picture.colours, strict=True)):
        row, column = divmod(number, picture.columns)
        box = (column * CELL + 5, row * CELL + 5, column * CELL + CELL - 6, row * CELL + CELL - 6)
        if shape == "square":
            brush.rectangle(box, fill=colour)
        elif shape == "circle":
            brush.ellipse(box, fill=colour)
    return image


class SecondLook(Environment):
    """Shows the row's picture, and then another one, whose shapes alone give the reward."""

    gives_rewards = True

    def reset(self, row: Mapping[str, Any], seed: int) -> list[ChatMessage]:
        self.picture, self.is_shown = next(pictures(random.Random(seed), held_out=False)), False
        return list(row["messages"])

    def step(self, completion: str) -> Step:
        if self.is_shown:
            return Step([], exact(completion, str(sum(map(bool, self.picture.cells)))), done=True)
        self.is_shown = True
        return Step([{"role": "user", "content": "shapes?", "images": [paint(self.picture)]}])


def write_rows(
    folder: Path, name: str, count: int, seed: int, *, held_out: bool = False, shuffled: bool = False
) -> None:
    """`count` rows and their pictures. `shuffled`: the pictures are dealt out anew, so that they say nothing."""
    draw, rows = random.Random(f"{seed}/{name}"), []
    (folder / name).mkdir(parents=True, exist_ok=True)
    for number, picture in zip(range(count), pictures(draw, held_out=held_out), strict=False):
        path = f"{name}/{number:04d}.png"
        paint(picture).save(folder / path)
        answer = str(sum(map(bool, picture.cells)))
        row = {"prompt": "shapes?", "images": [path], "answer": answer}
        rows.append({**row, "response": answer} if name == "warm_up" else row)
    if shuffled:
        images = [row["images"] for row in rows]
        draw.shuffle(images)
        rows = [{**row, "images": image} for row, image in zip(rows, images, strict=True)]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_model(folder: Path, seed: int) -> None:
    """A random Qwen2.5-VL with a tokenizer of whole words. Text that is no word of it becomes `?`."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    ids = {token: index for index, token in enumerate(VOCABULARY)}
    names = {"vision_start": 3, "vision_end": 4, "image": 5, "video": 6}
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        **{f"{name}_token_id": index for name, index in names.items()},
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=ids["<|im_end|>"],
        rope_scaling={"type": "mrope", "mrope_section": [4, 6, 6]},
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 128,
            "patch_size": CELL // 2,
            "spatial_merge_size": 2,
            "window_size": 4 * CELL,
            "fullatt_block_indexes": [0, 1],
        },
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02 if "patch_embed" in name else 0.05)
    disable_progress_bar()
    model.save_pretrained(folder)
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # transformers makes it 0600
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token in VOCABULARY if len(token) > 1][len(SPECIAL) :]
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)


def main() -> None:
    """Write data/ and model/ into the folder that the command line names."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shuffled", action="store_true", help="a control: pictures that say nothing about the answer")
    options = parser.parse_args()
    for name, count in (("warm_up", NUM_WARM_UP), ("train", NUM_TRAIN), ("val", NUM_VAL)):
        flags = {"held_out": name == "val", "shuffled": options.shuffled}
        write_rows(options.folder / "data", name, count, options.seed, **flags)
    write_model(options.folder / "model", options.seed)
    print(f"wrote {options.folder}/data and {options.folder}/model")


if __name__ == "__main__":
    main()
