"""Thumbnails: small, one per different image, seen in a browser on both grounds; and nothing else that a page would load."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_megatron.cli.main import main
from grpo_megatron.report.kit import MAX_THUMBNAILS, THUMBNAIL_EDGE, render_report, thumbnails
from grpo_megatron.report.run_folder import KeptSamples
from grpo_megatron.report.step import ShownSamples
from grpo_megatron.types import GroupTable, Plan, Prompt, PromptImage, Sample
from tests import tiny
from tests.browser import Browser
from tests.fakes import LoneMesh
from tests.report.material import group, make_run, sample
from tests.report.test_run_page import data_of, opened
from tests.training.test_samples import Bytes
from tests.vision import CELL, placed

SHOWN = "[...document.querySelectorAll('.pictures img')].map((one) => [one.naturalWidth, one.naturalHeight, one.alt])"


def picture(uri: str) -> Any:
    from PIL import Image

    head, _, body = uri.partition(",")
    assert head == "data:image/webp;base64"
    return Image.open(io.BytesIO(base64.b64decode(body)))


def test_they_are_small_and_each_image_has_one() -> None:
    """An image of 3 x 5 tokens has 140 x 84 pixels, so its thumbnail has 96 x 58. Its left half is red, the other blue."""
    halves = np.zeros((3 * CELL, 5 * CELL, 3), np.uint8)
    halves[:, : 5 * CELL // 2, 0] = halves[:, 5 * CELL // 2 :, 2] = 255
    image = PromptImage("halves", (3, 5), 4, halves.tobytes())
    made = [picture(uri) for uri in thumbnails([image, replace(image, first=40), placed(0, 60)])]
    assert [one.size for one in made] == [(THUMBNAIL_EDGE, 58), (2 * CELL, 2 * CELL)]
    left, right = (np.asarray(made[0].convert("RGB"))[29, x] for x in (10, 86))
    assert left[0] > 200 > 60 > left[2] and right[2] > 200 > 60 > right[0]
    noise = np.random.default_rng(0).integers(0, 256, (30 * CELL, 30 * CELL, 3), dtype=np.uint8).tobytes()
    many = thumbnails([PromptImage(str(n), (30, 30), 900 * n, noise) for n in range(9)])
    assert len(many) == MAX_THUMBNAILS and max(map(len, many)) < 12_000  # the worst that an image can be
    line = thumbnails([PromptImage("line", (1, 200), 0, noise[: 200 * CELL * CELL * 3])])
    assert picture(line[0]).size == (THUMBNAIL_EDGE, 1)


def test_a_step_keeps_those_of_a_prompt_and_no_whole_image() -> None:
    images = (placed(0, 1, 20, 20), placed(1, 402))
    asked = Prompt("task/rows/0", (5,) * 410, "Which?", "7", "task", "", images=images)
    ids, table = [9, 9], GroupTable([0, 0], [0, 1], [1.0, 0.0], [410, 410], [2, 2], [False] * 2, [0, 0])
    drawn = [Sample(asked, 0, index, ids, [-0.5] * 2, "stop", 0) for index in range(2)]
    batch = tiny.make_batch([([9], ids)] * 2, [[[0, 1]]])
    batch.rows, batch.old_logprobs = [0, 1], torch.zeros(2, 2)
    mesh: Any = LoneMesh()
    groups = ShownSamples(mesh, Bytes(), True).gather(drawn, table, Plan([1.0, -1.0], [1.0] * 2, [[[[0, 1]]]]), batch)
    assert groups is not None
    [shown] = groups()
    assert shown["images"] == thumbnails(images) and len(json.dumps(shown)) < 20_000


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A kept step whose group has two images, an address that a damaged file might name, and an older step without images."""
    uris = thumbnails([placed(0, 0, 3, 5), placed(1, 0, 9, 2)])
    folder = make_run(
        tmp_path / "run", samples=[group([sample(0, 1.0)], "<|vision_start|><|image_pad|><|vision_end|>Which?")]
    )
    kept = KeptSamples(folder)
    [step] = kept.steps
    kept.add(step["step"] + 1, [{**step["groups"][0], "images": [*uris, "https://example.com/x.png"]}])
    return folder


def test_a_damaged_file_of_samples_costs_its_step_only(run: Path) -> None:
    lines = (run / "report_samples.jsonl").read_text().splitlines()
    (run / "report_samples.jsonl").write_text("\n".join([lines[0], lines[1].replace('"images": [', '"images": [7, ')]))
    assert [step["step"] for step in data_of(render_report([opened(run)]))["runs"][0]["samples"]] == [39]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_them(scheme: str, run: Path, browser: Browser, tmp_path: Path) -> None:
    assert main(["report", str(run), "--output", str(tmp_path / "page.html")]) == 0
    with browser.open(tmp_path / "page.html") as page:
        page.prefer(scheme)
        assert page.evaluate(SHOWN) == [[96, 58, "image 1"], [21, 96, "image 2"]] and page.faults() == []
        border = page.evaluate("getComputedStyle(document.querySelector('.pictures img')).borderTopColor")
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert border != ground  # a white drawing on a white page has an edge
