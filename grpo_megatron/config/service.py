"""The section `service`: the command `serve-training` (docs/service.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints

from grpo_megatron.config.section import Count, Seconds, Section


class ServiceConfig(Section):
    """The trainer as a service for the public `tinker` client. Read by `serve-training` only."""

    host: str = "127.0.0.1"
    """the address that it listens on"""
    port: int = Field(8400, ge=0, le=65535)
    """0: any free one, which output_dir/service/url names"""
    base_model: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = None
    """the name that clients give the model, as Qwen/Qwen3-8B; null: model.path"""
    tokens: Path | None = None
    """file of the clients' keys, one on a line, each beginning with tml-; null: one new key in output_dir/service/token"""
    max_models: Count = 64
    """models in memory at a time"""
    max_queued: Count = 4096
    """requests that wait, of all clients; further ones are asked to come again"""
    max_body_megabytes: Count = 64
    """MiB of a request"""
    snapshot_steps: Count = 10
    """least optimizer steps of a model between two snapshots, from which a restart computes its later requests again; more where
    snapshots would take over 5 % of its time"""
    session_timeout_s: Seconds = 600.0
    """without a sign of life for so long, a session is over, and its models leave the memory"""
