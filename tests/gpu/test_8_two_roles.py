"""One GPU trains and one samples: weights cross over NCCL, or from pinned memory. Not run on a GPU yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu import conftest, training_ranks
from tests.gpu.building import KIND
from tests.gpu.test_1_run import quickstart_config
from tests.stored import metric_rows

SEND, PROBE = "timing_s/send_weights", "rollout/probe_logp_diff_mean"


@pytest.mark.parametrize(("lag", "device"), [(1, KIND), (2, "cpu")])
def test_two_roles_on_a_gpu_each(tmp_path: Path, record_figure: Callable[..., None], lag: int, device: str) -> None:
    """One trains and one samples. Weights cross over NCCL, or from pinned memory; every version is attested and probed."""
    conftest.needs_devices(2)
    conftest.needs_vllm()
    raw = quickstart_config(
        tmp_path,
        "sft.steps=0",
        "rollout.enforce_eager=true",
        "rollout.placement=separate",
        "rollout.num_ranks=1",
        f"rollout.lag={lag}",
        "algorithm.rollout_correction.rollout_is=token",
        "trainer.total_training_steps=5",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.n_gpus_per_node=2",
    )
    results = conftest.run(training_ranks.train_in_roles, 2, raw=raw)
    rows = metric_rows(tmp_path / "run")
    record_figure("seconds to send each version", [row[SEND] for row in rows if SEND in row], "s")
    assert [got["devices"] for got in results] == [[device]] * 2
    probes = [row[PROBE] for row in rows if PROBE in row]  # of each version, with the first step that it has sampled
    assert len(rows) == 5 and len(probes) == 5 - lag and max(probes) <= 0.03
