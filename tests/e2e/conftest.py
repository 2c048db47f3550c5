from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.soak import make_workspace


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("e2e"))
