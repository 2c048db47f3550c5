from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.lab import Lab, missing


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Starts a Slurm of four nodes. Skips with the reason on a machine that cannot run one."""
    if reason := missing():
        pytest.skip(reason)
    with Lab(tmp_path_factory.mktemp("lab"), 4) as lab:
        yield lab
