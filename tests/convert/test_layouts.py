"""Converted checkpoints in real Megatron models, and checkpoints of real training back to Hugging Face.

Megatron-Core's own loader loads every TP x PP of {1, 2, 4} x {1, 2, 4} into a model full of NaN. The gathered weights
equal the Hugging Face file bit for bit. There are two key-value groups, so that TP 4 cuts a group, and 101 tokens, so
that every layout pads the vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_megatron.convert.megatron import read_contents
from tests import tiny, worlds
from tests.convert import folders, layout_ranks
from tests.convert.folders import convert, same_bits, tensors_of
from tests.files import CONFIGS

LAYOUTS = {
    (1, 1): ["llama2", "qwen2-tied"],
    (2, 1): ["qwen3", "llama3", "olmo2"],
    (1, 2): ["mistral", "qwen2-tied"],
    (2, 2): ["qwen2", "llama3", "qwen3"],
    (4, 1): ["qwen2", "llama3"],
    (1, 4): ["qwen3", "qwen2-tied"],
    (4, 2): ["llama2", "qwen2-tied"],
    (2, 4): ["mistral", "llama3"],
    (4, 4): ["qwen2", "qwen2-tied"],
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    root = tmp_path_factory.mktemp("converted")
    out = {}
    for family in tiny.FAMILIES:
        source = folders.write(root / family, folders.config_of(family))
        assert convert("to-megatron", source, root / f"{family}-megatron", "--quiet") == 0
        out[family] = (source, root / f"{family}-megatron")
    return out


def test_every_layout_is_there() -> None:
    assert set(LAYOUTS) == {(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 4)}
    assert {family for families in LAYOUTS.values() for family in families} >= set(tiny.FAMILIES) - {
        "qwen3-moe",
        "mixtral",
    }


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=[pytest.mark.slow] if layout[0] * layout[1] > 8 else []) for layout in LAYOUTS],
    ids=lambda layout: f"TP{layout[0]}xPP{layout[1]}",
)
def test_loads(layout: tuple[int, int], converted: dict[str, tuple[Path, Path]]) -> None:
    tp, pp = layout
    pairs = [converted[family] for family in LAYOUTS[layout]]
    gathered = worlds.run(layout_ranks.loaded, tp * pp, pairs=pairs, tp=tp, pp=pp)[0]
    for (source, _), tensors in zip(pairs, gathered, strict=True):
        same_bits(tensors_of(source), tensors)


@pytest.mark.parametrize(("tp", "pp", "ep", "world"), [(1, 1, 2, 2), (2, 2, 1, 4), (2, 1, 2, 4)])
def test_experts_load(tp: int, pp: int, ep: int, world: int, tmp_path: Path) -> None:
    """Mixtures of experts of real config.json files, shrunk: experts are an axis of the stored tensors.

    DeepSeek-V3's first layer has none: each of its layers is stored alone.
    """
    pairs = []
    for name in ("Qwen3-30B-A3B", "Mixtral-8x7B-v0.1", "DeepSeek-V3"):
        config = folders.shrunk(json.loads((CONFIGS / f"{name}.json").read_text()))
        pairs.append((folders.write(tmp_path / name, config), tmp_path / f"{name}-megatron"))
        assert convert("to-megatron", *pairs[-1], "--quiet") == 0
    gathered = worlds.run(layout_ranks.loaded, world, pairs=pairs, tp=tp, pp=pp, ep=ep)[0]
    for (source, _), tensors in zip(pairs, gathered, strict=True):
        same_bits(tensors_of(source), tensors)


@pytest.mark.parametrize(
    ("family", "tp", "pp", "dtype"),
    [
        ("qwen3", 2, 2, "bfloat16"),
        ("qwen2-tied", 2, 1, "float32"),
        pytest.param("deepseek_v3", 1, 2, "bfloat16", marks=pytest.mark.soak),
    ],
)
def test_training_writes_what_converts(family: str, tp: int, pp: int, dtype: str, tmp_path: Path) -> None:
    """A training step, with its optimizer state, converts to the tensors of the policy's own stream, bit for bit."""
    source = folders.write(tmp_path / "hf", folders.config_of(family))
    step = tmp_path / "out" / "checkpoints" / "step_000001"
    expected = worlds.run(layout_ranks.trained, tp * pp, folder=source, step=step, tp=tp, pp=pp, dtype=dtype)[0]
    (step / "trainer.json").write_text(json.dumps({"config": {"model": {"path": str(source)}}}))
    assert convert("to-hf", step, tmp_path / "back") == 0
    same_bits(expected, tensors_of(tmp_path / "back"))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == dtype
    assert convert("verify", step, tmp_path / "back") == 0
    assert convert("verify", step, source) == 1
    part = min((step / "state").glob("*.distcp"))  # there is no manifest, but each archive has a checksum
    data = bytearray(part.read_bytes())
    contents = read_contents(step / "state" / ".metadata")
    stored = [(k, i) for k, i in contents.storage_data.items() if i.relative_path == part.name and k.offset]
    info = next(i for k, i in stored if k.fqn.startswith("decoder"))
    data[info.offset + info.length // 2] ^= 1
    part.write_bytes(data)
    assert convert("to-hf", step, tmp_path / "damaged") == 2
    assert not (tmp_path / "damaged").exists()


def test_training_starts_from_float16(tmp_path: Path) -> None:
    """A float16 folder is cast when read: to float32 without loss, to bfloat16 as torch rounds. (`model.dtype=float16`
    is refused: tests/test_config.py.)"""
    source = folders.write(tmp_path / "hf", folders.config_of("qwen3"), "float16")
    weights = worlds.run(layout_ranks.started, 1, folder=source)[0]
    for dtype, tensors in weights.items():
        same_bits({n: t.to(folders.DTYPES[dtype]) for n, t in tensors_of(source).items()}, tensors)
