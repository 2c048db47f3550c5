"""The service's files, output_dir/service. Rank 0 alone writes them, but for the weights. A restart reads all but results.

token, url                    the key of a server without service.tokens; where it listens
base.json                     the settings that the models here depend on (cli/serve_training.py)
sessions/ID.json              owner and the client's own description
models/ID/model.json          how the model began: rank and seed, or a checkpoint
models/ID/state_0000000012/     a snapshot of weights and optimizer after request 12
models/ID/requests/0000000013    requests after the snapshot, as they came: to be computed again
models/ID/results/0000000013     answers, until many later ones are there
models/ID/weights/NAME        a client's checkpoints with their optimizer; sampler_weights, external_weights: Hugging Face's
                              or PEFT's form. NAME.json beside it is written when the folder is complete
running/REQUEST               of the command that runs: its requests, a line for each start; or why it ended the ranks
samplers/ID.json              a sampling session: the weights that it reads
samplers/ID/0000000003          its requests that have no retrieved answer
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError, ServiceConfig
from grpo_megatron.storage.files import clear_leftovers, remove_folder, write_file

# in tinker:// -> of the client
CHECKPOINT_KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
# begins the text of an error that is none of the client
REQUEST_FAILED = "the server failed on this request, its log has more: "
KEPT_RESULTS = 256  # of one model, before its last snapshot
JsonObject = dict[str, Any]


def numbered(folder: Path, seq: int) -> Path:
    """Returns the file of a request, or of a result."""
    return folder / f"{seq:010d}"


class Store:
    """The folder. Names of files are ids that the server has made, and names that it has checked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("sessions", "models", "samplers", "running"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        os.chmod(folder, 0o700)

    def write(self, path: Path, content: JsonObject | bytes) -> None:
        """Write a file: complete or not at all. Raises OSError."""
        if isinstance(content, dict):
            write_file(path, json.dumps(content))
            return
        partial = path.with_name(f".{path.name}.partial")
        try:
            partial.write_bytes(content)
            partial.rename(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise

    def read_all(self, kind: str) -> Iterator[tuple[str, JsonObject]]:
        """Yields id and content of every session, model or sampler."""
        pattern = "*/model.json" if kind == "models" else "*.json"
        for path in sorted((self.folder / kind).glob(pattern)):
            name = path.parent.name if kind == "models" else path.stem
            yield name, json.loads(path.read_text())

    def model(self, model_id: str) -> Path:
        """Returns the folder of a model."""
        return self.folder / "models" / model_id

    def create_model(self, model_id: str, content: JsonObject) -> None:
        """Write a model's beginning."""
        folder = self.model(model_id)
        for name in ("requests", "results", *CHECKPOINT_KINDS):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self.write(folder / "model.json", content)

    def snapshot(self, model_id: str) -> tuple[int, Path] | None:
        """Returns the last request of the newest snapshot, and its folder; None: there is none."""
        for name in ("", *CHECKPOINT_KINDS):
            clear_leftovers(self.model(model_id) / name)
        found = sorted(self.model(model_id).glob("state_*"))
        return (int(found[-1].name.removeprefix("state_")), found[-1]) if found else None

    def remove_replaced(self, model_id: str, seq: int) -> None:
        """Remove what the snapshot after request `seq` replaces: older ones, its requests, old results."""
        folder = self.model(model_id)
        for path in folder.glob("state_*"):
            if path.name < f"state_{seq:010d}":
                remove_folder(path)
        for path in (folder / "requests").iterdir():
            if path.name <= f"{seq:010d}":
                path.unlink()
        old = sorted(path for path in (folder / "results").iterdir() if path.name <= f"{seq:010d}")
        for path in old[:-KEPT_RESULTS]:
            path.unlink()

    def numbers(self, folder: Path) -> list[int]:
        """Returns the numbers of the requests, or results, of a folder, in their order."""
        return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())

    def requests(self, folder: Path) -> dict[int, bytes]:
        """Reads the requests of a folder, by number."""
        return {seq: numbered(folder, seq).read_bytes() for seq in self.numbers(folder)}

    def is_void(self, model_id: str, seq: int) -> bool:
        """Tells if a request has an answer, the error of a command that changed nothing."""
        path = numbered(self.model(model_id) / "results", seq)
        return path.exists() and path.read_bytes()[:1] == b"E"

    def remove_request(self, model_id: str, seq: int) -> None:
        """Remove a request that will not run."""
        numbered(self.model(model_id) / "requests", seq).unlink(missing_ok=True)

    def create_sampler(self, name: str, content: JsonObject) -> None:
        """Write a sampling session."""
        (self.folder / "samplers" / name).mkdir(exist_ok=True)
        self.write(self.folder / "samplers" / f"{name}.json", content)

    def checkpoints(self, model_id: str, *, expired: bool = False) -> dict[str, JsonObject]:
        """Returns the complete checkpoints of a model, by KIND/NAME: those that have not expired, or those that have."""
        found = {}
        for kind in CHECKPOINT_KINDS:
            for path in sorted((self.model(model_id) / kind).glob("*.json")):
                with contextlib.suppress(OSError):
                    about = json.loads(path.read_text())
                    if (about["expires"] is not None and about["expires"] < time.time()) == expired:
                        found[f"{kind}/{path.stem}"] = about
        return found

    def remove_checkpoint(self, model_id: str, name: str) -> None:
        """Remove a checkpoint KIND/NAME from the list; its folder stays."""
        path = self.model(model_id) / name
        path.with_name(f"{path.name}.json").unlink(missing_ok=True)

    def remove_sampler(self, name: str) -> None:
        """Remove a sampling session and its requests."""
        (self.folder / "samplers" / f"{name}.json").unlink(missing_ok=True)
        shutil.rmtree(self.folder / "samplers" / name, ignore_errors=True)

    def tokens(self, config: ServiceConfig) -> list[str]:
        """Reads the clients' keys, or makes one. Raises ConfigError."""
        path = config.tokens or self.folder / "token"
        if config.tokens is None and not path.exists():
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(f"tml-{secrets.token_urlsafe(32)}\n")
        try:
            tokens = [line.strip() for line in path.read_text().splitlines() if line.strip()]
        except OSError as error:
            raise ConfigError(f"service.tokens={str(path)!r}: {error.strerror}; write one key on a line") from error
        wrong = [i for i, token in enumerate(tokens, 1) if not token.startswith("tml-") or len(token) < 20]
        if wrong or not tokens or len(set(tokens)) < len(tokens):
            what = f"line {wrong[0]} is no key" if wrong else "a key is there twice" if tokens else "it has no key"
            raise ConfigError(
                f"service.tokens={str(path)!r}: {what}; a key is tml- and at least 16 characters, its own line"
            )
        return tokens
