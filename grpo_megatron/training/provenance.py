"""Provenance: which weights drew a sample. No step trains on samples of other weights than those it believes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.types import Sample


class Provenance:
    """The digest of the weights of each step's last sync, for as many steps as a sample may be old.

    `is_drawn` False: the samples are read from a file.
    """

    def __init__(self, mesh: Mesh, *, max_staleness: int, is_drawn: bool) -> None:
        self.mesh, self.max_staleness, self.is_drawn = mesh, max_staleness, is_drawn
        self._digests: dict[int, str] = {}

    def record(self, version: int, digest: str) -> None:
        """The engine holds weights with this digest as `version`."""
        self._digests[version] = digest
        for old in [v for v in self._digests if v < version - self.max_staleness]:
            del self._digests[old]

    def digest(self, version: int) -> str:
        """Empty if it is not known: the checkpoint that the run resumed from had none."""
        return self._digests.get(version, "")

    def check(self, step: int, samples: Sequence[Sample]) -> None:
        """Each sample was drawn by the weights that were synced for its version. Collective. Raises RankError."""
        wrong = [(sample, draw) for sample in samples if (draw := self._wrong_draw(sample)) is not None]
        problem = None
        if wrong and self.is_drawn:
            first, (version, digest) = wrong[0]
            problem = (
                f"step {step} cannot train on {len(wrong)} of {len(samples)} samples: prompt {first.prompt.uid!r}, sample "
                f"{first.index} was drawn by weights with digest {digest or 'unknown'}, but the sync of step "
                f"{version} sent weights with digest {self.digest(version) or 'unknown'}; resume from the last checkpoint"
            )
        self.mesh.agree(problem)

    def _wrong_draw(self, sample: Sample) -> tuple[int, str] | None:
        """Version and digest of the first weights of the sample that the syncs did not send."""
        draws = [(draw.version, draw.weights_digest) for draw in sample.draws]
        for version, digest in draws or [(sample.version, sample.weights_digest)]:
            if digest != self.digest(version):
                return version, digest
        return None

    def state(self) -> dict[str, Any]:
        """Plain JSON, whose keys are text."""
        return {str(version): digest for version, digest in self._digests.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._digests = {int(version): digest for version, digest in state.items()}
