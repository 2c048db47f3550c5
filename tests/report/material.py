"""The files of a run, made by hand: what a run writes, without a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

HOSTILE = (
    "</script><script>document.title='taken'</script><img src=https://example.com/x onerror=\"document.title='taken'\">"
    " <!-- {{ data }} \x1b[31m\x00 \u202eback\u202c \u2028 \ud800 &lt;b&gt; "
) + "long" * 60


def piece(text: str, engine: float | None, gap: float | None) -> list[Any]:
    return [text, engine, gap]


def sample(index: int, reward: float | None, text: str = "an answer", **more: Any) -> dict[str, Any]:
    pieces = [piece(f"{word} ", -0.5 * number, 10.0 ** -(number + 1)) for number, word in enumerate(text.split(" "))]
    return {
        "index": index, "reward": reward, "score": reward, "advantage": None if reward is None else reward - 0.5,
        "finish_reason": "stop", "status": "ok", "failure": "", "metrics": {"acc": 1.0}, "tokens": len(pieces),
        "drawn": True, "pieces": pieces, "cut": 0, "cut_at": len(pieces), **more,
    }  # fmt: skip


def group(samples: list[dict[str, Any]], prompt: str = "How many?") -> dict[str, Any]:
    return {"uid": "task/1", "source": "task", "prompt": prompt, "answer": "7", "samples": samples}


def metrics_of(step: int) -> dict[str, Any]:
    """Of a run without KL, with a reward that the project does not know, and with a validation at every tenth step."""
    row = {
        "critic/score/mean": 0.2 + 0.01 * step,
        "critic/rewards/mean": 0.1 + 0.01 * step,
        "reward/politeness/mean": 0.5 + 0.001 * step,
        "reward/source/algebra/mean": 0.3 + 0.001 * step,
        "actor/entropy": 1.0 / (1 + step),
        "actor/grad_norm": None if step == 7 else 1.0 + step % 3,
        "actor/ppo_kl": 0.0,
        "training/rollout_logp_diff_mean": 1e-6 * (1 + step % 5),
        "mine/of/x/mean": float(step),
        "mine/of/x/max": 2.0 * step,
        "timing_s/step": 10.0,
        "timing_s/gen": 6.0,
        "timing_s/update_actor": 3.0 + 0.01 * step,
    }
    return row | ({"val-core/arithmetic/acc/mean@1": 0.4 + 0.005 * step} if step % 10 == 0 else {})


def make_run(
    folder: Path,
    *,
    steps: int = 40,
    total: int = 40,
    config: Mapping[str, Any] | None = None,
    events: list[dict[str, Any]] | None = None,
    samples: list[dict[str, Any]] | None = None,
) -> Path:
    folder.mkdir(parents=True)
    lines = [json.dumps({"step": step, **metrics_of(step)}) + "\n" for step in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    content = {"trainer": {"total_training_steps": total}, "actor": {"optim": {"lr": 1e-6}}, **(config or {})}
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events or []))
    kept = [{"step": steps - 1, "groups": samples}] if samples else []
    (folder / "report_samples.jsonl").write_text("".join(json.dumps(step) + "\n" for step in kept))
    return folder


def event(kind: str, step: int | None, text: str = "", time: float = 1_700_000_000.0) -> dict[str, Any]:
    return {"time": time, "kind": kind, "step": step, "text": text}
