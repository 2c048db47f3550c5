"""What `train-reward` sets where a config does not: the loss of a reward model, its rows, and no engine.

The same run by `train` needs these keys in the file.
"""

from __future__ import annotations

from typing import Any

OUTCOME = {"adv_estimator": "preference", "loss_mode": "bradley_terry", "loss_agg_mode": "seq-mean-token-mean"}
PROCESS = {"adv_estimator": "step_labels", "loss_mode": "step_labels", "loss_agg_mode": "token-mean"}


def reward_defaults(raw: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Section -> key -> value. `reward_model.kind: process`, or `actor.loss_mode: step_labels`, asks for a model of steps."""
    is_process = _value(raw, "reward_model", "kind") == "process" or _value(raw, "actor", "loss_mode") == "step_labels"
    chosen = PROCESS if is_process else OUTCOME
    without_validation = {"val_before_train": False, "test_freq": -1}
    return {
        "trainer": {} if _value(raw, "data", "val_loss_files") else without_validation,
        "algorithm": {"source": "file", "adv_estimator": chosen["adv_estimator"]},
        "actor": {"loss_mode": chosen["loss_mode"], "loss_agg_mode": chosen["loss_agg_mode"], "use_kl_loss": False},
    }


def _value(raw: dict[str, Any], section: str, key: str) -> Any:
    values = raw.get(section)
    return values.get(key) if isinstance(values, dict) else None
