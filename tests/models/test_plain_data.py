"""A checkpoint of somebody else's runs no code when it is read: every pickle in it must be plain data."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.safe_globals import register_safe_globals
from torch.distributed.checkpoint.api import CheckpointException

from grpo_megatron.models.weights.plain_data import check_object, check_plain, plain_data_only
from grpo_megatron.storage import StorageError
from tests.stored import Bomb


def extra_state(content: Any) -> io.BytesIO:
    """As Transformer Engine saves its FP8 state: a pickle in a file object."""
    return io.BytesIO(pickle.dumps(content))


def write(folder: Path, **objects: Any) -> Path:
    """A distributed checkpoint of one tensor, one generator's state and `objects`."""
    content = {"weight": torch.ones(3), "rng": {"torch": torch.ones(2), "python": (3, (1, 2), None)}}
    dcp.save(content | objects, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "common_backend": "torch"}')
    torch.save({"step": 3}, folder / "common.pt")
    return folder


@pytest.fixture(autouse=True)
def _megatron() -> None:
    """As the import of Megatron-Core's checkpoint code does."""
    register_safe_globals()


@pytest.fixture
def exploded(tmp_path: Path) -> Path:
    return tmp_path / "exploded"


def refused(folder: Path) -> str:
    with pytest.raises(StorageError) as raised:
        check_plain(folder)
    return str(raised.value)


def test_plain_data_is_accepted_and_loaded(tmp_path: Path) -> None:
    state = {"scale": torch.ones(2), "counts": {"a": 1}, "buffer": io.BytesIO(b"")}
    folder = write(tmp_path / "c", **{"layer._extra_state": extra_state(state)})
    check_plain(folder)
    loaded = {"weight": torch.zeros(3), "rng": {"torch": torch.zeros(2), "python": ()}}
    with plain_data_only():
        dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    assert torch.equal(loaded["weight"], torch.ones(3))  # type: ignore[arg-type]


def _bomb_in(part: str, folder: Path, exploded: Path) -> None:
    """A checkpoint in `folder` whose `part` runs code when it is unpickled without care."""
    objects: dict[str, Any] = {"bomb": Bomb(exploded)} if part == "an object" else {}
    if part == "a state of Transformer Engine":
        objects = {"layer._extra_state": extra_state({"recipe": Bomb(exploded)})}
    write(folder, **objects)
    if part == "the table of contents":
        (folder / ".metadata").write_bytes(pickle.dumps(Bomb(exploded)))
    if part == "common state":
        torch.save({"step": Bomb(exploded)}, folder / "common.pt")


@pytest.mark.parametrize(
    ("part", "words", "wanted"),
    [
        ("the table of contents", "is not plain data", "weight"),
        ("common state", "common.pt: refused, because it may run code", None),
        ("an object", "the object 'bomb' may run code", "bomb"),
        ("a state of Transformer Engine", "layer._extra_state", None),
    ],
)
def test_code_in_any_part_is_refused_and_not_run(
    tmp_path: Path, exploded: Path, part: str, words: str, wanted: str | None
) -> None:
    """By the check, and by torch's readers of `wanted` in a file that was replaced after the check."""
    folder = tmp_path / "c"
    _bomb_in(part, folder, exploded)
    assert words in refused(folder)
    if wanted is not None:
        with pytest.raises(CheckpointException), plain_data_only():
            dcp.load({wanted: torch.zeros(3) if wanted == "weight" else 0}, checkpoint_id=folder, no_dist=True)
    assert not exploded.exists()


def test_ranks_share_the_objects(tmp_path: Path, exploded: Path) -> None:
    """Of two ranks, one checks a given object."""
    folder, num_refused = write(tmp_path / "c", bomb=Bomb(exploded)), 0
    for part in (0, 1):
        try:
            check_plain(folder, part, 2)
        except StorageError:
            num_refused += 1
    assert num_refused == 1 and not exploded.exists()


def test_a_state_of_transformer_engine_as_a_tensor(exploded: Path) -> None:
    """Other versions of it save the pickle as a tensor of bytes. Random states are such tensors, too: not pickles."""
    archive = io.BytesIO()
    torch.save([torch.tensor(list(pickle.dumps(Bomb(exploded))), dtype=torch.uint8)], archive)
    check_object("rng/shard_0_1", archive.getvalue())
    with pytest.raises(pickle.UnpicklingError, match="is not plain data"):
        check_object("layer._extra_state/shard_0_1", archive.getvalue())
    assert not exploded.exists()


def test_an_object_outside_the_checkpoint(tmp_path: Path) -> None:
    folder = write(tmp_path / "c")
    table = pickle.loads((folder / ".metadata").read_bytes())
    for info in table.storage_data.values():
        info.relative_path = "../other.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(table))
    assert "outside the checkpoint" in refused(folder)


def test_another_format(tmp_path: Path) -> None:
    folder = write(tmp_path / "c")
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert "sharded_backend is 'zarr', expected 'torch_dist'" in refused(folder)
