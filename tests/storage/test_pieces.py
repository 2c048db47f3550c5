"""Pieces of states in the memory of other nodes: what is served, to whom, and which state is whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_megatron.parallel.control import RUN_ID
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.pieces import (
    DOORS,
    Door,
    PieceServer,
    RemotePiece,
    get_piece,
    list_states,
    open_piece,
    send_piece,
    set_remote,
)
from grpo_megatron.training.healing import NodeCheckpoints
from tests.fakes import LoneMesh


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[PieceServer]]:
    servers = []
    for number in range(3):
        (root := tmp_path / str(number)).mkdir()
        servers.append(PieceServer(root))
        servers[-1].token = "epoch 1"
    yield servers
    for server in servers:
        server.shutdown()
        server.server_close()


def door(server: PieceServer) -> Door:
    return "127.0.0.1", server.port


def test_a_piece_that_was_sent_is_read_back_in_parts(nodes: list[PieceServer], tmp_path: Path) -> None:
    content = bytes(range(256)) * 10_000
    (file := tmp_path / "file").write_bytes(content)
    send_piece(door(nodes[0]), "epoch 1", file, "checkpoints/a/b", hashlib.sha256(content).hexdigest())
    assert (nodes[0].root / "checkpoints/a/b").read_bytes() == content
    assert get_piece(door(nodes[0]), "epoch 1", "checkpoints/a/b", 1000, 300) == content[1000:1300]
    missing = tmp_path / "not here"
    set_remote({missing: RemotePiece(door(nodes[0]), "epoch 1", "checkpoints/a/b")})
    with open_piece(missing) as remote:
        remote.seek(len(content) - 10)
        assert remote.read(4) + remote.read() == content[-10:]
    with open_piece(file) as here:
        assert here.read() == content


def test_older_epochs_changed_bytes_and_other_folders_are_refused(nodes: list[PieceServer], tmp_path: Path) -> None:
    (file := tmp_path / "file").write_bytes(b"piece")
    sha = hashlib.sha256(b"piece").hexdigest()
    with pytest.raises(StorageError, match="sha256 of what has arrived differs"):
        send_piece(door(nodes[0]), "epoch 1", file, "a", "0" * 64)
    with pytest.raises(StorageError, match="outside the folder"):
        send_piece(door(nodes[0]), "epoch 1", file, "../1/a", sha)
    nodes[0].token = "epoch 2"
    with pytest.raises(StorageError, match="another epoch"):
        send_piece(door(nodes[0]), "epoch 1", file, "b", sha)
    assert not (nodes[0].root / "b").exists()
    nodes[0].token = ""
    with pytest.raises(StorageError, match="another epoch"):
        get_piece(door(nodes[0]), "", "a")


def state(server: PieceServer, step: int, *here: str, run: str = "") -> None:
    """Puts some of the four files of a state on a node."""
    folder = server.root / "checkpoints" / f"step_{step:06d}"
    (folder / "state").mkdir(parents=True)
    files = ["trainer.json", "state/__0_0.distcp", "state/__1_0.distcp", "state/__2_0.distcp"]
    (folder / "manifest.json").write_text(json.dumps({"files": dict.fromkeys(files, run)}))
    for name in (files[0], *(f"state/__{rank}_0.distcp" for rank in here)):
        (folder / name).write_text(name)


def test_the_newest_state_of_which_the_nodes_that_are_left_have_all_pieces(nodes: list[PieceServer]) -> None:
    """In a ring of three, each node has its own and that of the node before it."""
    first, second, third = nodes
    for server, here in ((first, "02"), (second, "10"), (third, "21")):
        state(server, 4, *here)
    state(first, 5, *"02")  # node 1 was lost before it had it
    state(second, 5, *"10", run="an earlier epoch's")  # of the same step
    world = {DOORS: json.dumps([door(server) for server in (first, second, third)]), RUN_ID: "epoch 1"}
    checkpoints = NodeCheckpoints(first.root.with_name("spare"), LoneMesh(), world)

    def whole(*servers: PieceServer) -> str:
        return checkpoints._whole([(door(s), one) for s in servers for one in list_states(door(s), "epoch 1")])[0]

    assert whole(first, second, third) == whole(first, third) == whole(second, third) == "step_000004"
    assert whole(first) == ""
    state(third, 5, *"21")
    assert whole(first, third) == "step_000005"
    path = checkpoints.newest()  # on a node that has nothing
    assert path == checkpoints.root / "step_000005" and (path / "trainer.json").read_text() == "trainer.json"
    assert sorted(file.name for file in path.rglob("*") if file.is_file()) == ["manifest.json", "trainer.json"]
    assert open_piece(path / "state/__1_0.distcp").read() == b"state/__1_0.distcp"
    (path / "manifest.json").unlink()  # a rank was killed while it wrote the small files
    assert checkpoints.newest() == path and (path / "manifest.json").exists()
    checkpoints.doors = [door(second)]
    assert checkpoints.newest() is None
