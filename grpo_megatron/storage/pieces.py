"""Pieces of states in the memory of several nodes: each launcher serves its folder, ranks write to and read from others.

A request is a line of JSON, an answer another one, then bytes. The token is that of the newest epoch (cli/nodes.py), so that
ranks of an older one are refused. Nothing is encrypted, as in the traffic between ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import io
import json
import os
import socket
import socketserver
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_megatron.storage import StorageError
from grpo_megatron.storage.files import MANIFEST_FILE, READ_BYTES
from grpo_megatron.storage.run_files import on_disk

Door = tuple[str, int]  # host and port of a launcher that serves pieces
DOORS = "GRPO_MEGATRON_PIECES"  # for ranks: the doors of the nodes that train, in their order, then of others, as JSON
NO_BYTE_S = 10.0  # without a byte
RETRY_S = 3.0  # for a launcher to see the newest epoch
MAX_LINE = 1 << 16


class PieceServer(socketserver.ThreadingTCPServer):
    """Serves the files in `root` in daemon threads, to those who know `token`. "" serves nobody."""

    daemon_threads, allow_reuse_address = True, True

    def __init__(self, root: Path) -> None:
        super().__init__(("", 0), _Request)
        self.root, self.token, self.port = root, "", self.socket.getsockname()[1]
        threading.Thread(target=self.serve_forever, name="pieces", daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: whoever has asked sees that the connection ends."""


class _Request(socketserver.StreamRequestHandler):
    server: PieceServer
    timeout = NO_BYTE_S

    def handle(self) -> None:
        asked, root = json.loads(self.rfile.readline(MAX_LINE)), self.server.root
        if not self.server.token or not hmac.compare_digest(asked["token"], self.server.token):
            self._answer(error="another epoch")
        elif asked["do"] == "list":
            self._answer(states=[_described(folder) for folder in on_disk(root) if (folder / MANIFEST_FILE).exists()])
        elif not (path := (root / asked["path"]).resolve()).is_relative_to(root.resolve()):
            self._answer(error="outside the folder")
        elif asked["do"] == "get":
            with path.open("rb") as file:
                file.seek(asked["offset"])
                left = path.stat().st_size - asked["offset"]
                size = left if asked["size"] is None else min(asked["size"], left)
                self._answer(size=size)
                self.connection.sendfile(file, asked["offset"], size) if size else None
        else:
            self._answer(error=self._receive(path, asked["size"], asked["sha256"]))

    def _receive(self, path: Path, size: int, sha256: str) -> str:
        path.parent.mkdir(parents=True, exist_ok=True)
        sha = hashlib.sha256()
        with path.open("wb") as file:
            while size and (part := self.rfile.read1(min(size, READ_BYTES))):
                sha.update(part)
                size -= file.write(part)
        return "" if sha.hexdigest() == sha256 else "the sha256 of what has arrived differs"

    def _answer(self, **fields: Any) -> None:
        self.wfile.write(json.dumps({"error": "", **fields}).encode() + b"\n")


def _described(folder: Path) -> dict[str, Any]:
    manifest = (folder / MANIFEST_FILE).read_bytes()
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return {"name": folder.name, "sha256": hashlib.sha256(manifest).hexdigest(), "files": files}


@contextlib.contextmanager
def _asked(door: Door, **request: Any) -> Iterator[tuple[socket.socket, Any]]:
    """Opens a connection, and sends a request. Raises OSError."""
    with socket.create_connection(door, NO_BYTE_S) as connection, connection.makefile("rb") as answers:
        connection.sendall(json.dumps(request).encode() + b"\n")
        yield connection, answers


def _answer(door: Door, answers: Any) -> dict[str, Any]:
    """Reads the line before an answer's bytes. Raises StorageError: refused."""
    answer: dict[str, Any] = json.loads(answers.readline() or b'{"error": "the connection has ended"}')
    if answer["error"]:
        raise StorageError(f"{door[0]}:{door[1]}: {answer['error']}")
    return answer


def send_piece(door: Door, token: str, file: Path, path: str, sha256: str) -> None:
    """Writes a file to `path` in another node's memory. Raises OSError, StorageError."""
    request = {"token": token, "do": "put", "path": path, "size": file.stat().st_size, "sha256": sha256}
    with _asked(door, **request) as (connection, answers), file.open("rb") as content:
        connection.sendfile(content)
        _answer(door, answers)


def get_piece(door: Door, token: str, path: str, offset: int = 0, size: int | None = None) -> bytes:
    """Reads `size` bytes of a file from another node's memory; None: up to its end. Raises OSError, StorageError."""
    with _asked(door, token=token, do="get", path=path, offset=offset, size=size) as (_, answers):
        wanted = _answer(door, answers)["size"]
        content: bytes = answers.read(wanted)
    if len(content) != wanted:
        raise StorageError(f"{door[0]}:{door[1]}: {path} has ended after {len(content)} of {wanted} bytes")
    return content


def list_states(door: Door, token: str) -> list[dict[str, Any]]:
    """Lists the states in a node's memory: name, sha256 of the manifest, files. [] where it cannot be reached."""
    deadline = time.monotonic() + RETRY_S
    while True:
        try:
            with _asked(door, token=token, do="list") as (_, answers):
                return _answer(door, answers)["states"]  # type: ignore[no-any-return]
        except (OSError, StorageError, ValueError) as error:
            if not isinstance(error, StorageError) or time.monotonic() > deadline:
                return []
        time.sleep(0.2)


class RemotePiece(io.RawIOBase):
    """A file in another node's memory; each `read` is a request."""

    def __init__(self, door: Door, token: str, path: str) -> None:
        self.door, self.token, self.path, self.offset = door, token, path, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        assert whence == os.SEEK_SET
        self.offset = offset
        return offset

    def read(self, size: int = -1) -> bytes:
        content = get_piece(self.door, self.token, self.path, self.offset, None if size < 0 else size)
        self.offset += len(content)
        return content


_remote: dict[Path, RemotePiece] = {}


def set_remote(pieces: Mapping[Path, RemotePiece]) -> None:
    """Makes `open_piece` read these paths, which are not here, from other nodes."""
    _remote.clear()
    _remote.update(pieces)


def open_piece(path: Path) -> Any:
    """Opens a file of a state to be read, where it is. Raises OSError."""
    found = None if path.exists() else _remote.get(path)
    return path.open("rb") if found is None else RemotePiece(found.door, found.token, found.path)
