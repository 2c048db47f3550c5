"""PromptStyle: how prompts become token ids. A model of one of our runs is asked as the run has asked it.

The run's config is in the checkpoint (step_000020/trainer.json), or beside the exported folder (outputs/run/config.yaml for
outputs/run/hf). Every part can be replaced by an option.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.convert.conversion import EXPORT_FOLDER
from grpo_megatron.reading import MAX_YAML, parse_yaml, read_json, read_text
from grpo_megatron.storage.run_files import STEP_FILE

PLAIN_TASK = "jsonl"  # the prompt as it is
DEFAULT_MAX_TOKENS = 512
RUN_CONFIG = "config.yaml"


@dataclass(frozen=True)
class PromptStyle:
    """`is_chat` None: a chat if the tokenizer has a template. `run`: where these settings were found; None: nowhere."""

    task: str = PLAIN_TASK
    system_prompt: str | None = None
    chat_template: Path | None = None
    is_chat: bool | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    max_tokens: int = DEFAULT_MAX_TOKENS
    run: Path | None = None

    def data(self, tokenizer: Any) -> DataConfig:
        """The section `data` that renders prompts in this style."""
        is_chat = tokenizer.chat_template is not None if self.is_chat is None else self.is_chat
        return DataConfig(task=self.task, apply_chat_template=is_chat, system_prompt=self.system_prompt)


def read_style(args: argparse.Namespace) -> PromptStyle:
    """The style of the run that `args.model` belongs to, with the options laid over it. Raises ConfigError."""
    found, where = _run_config(args.model)
    data, rollout = (_section(found, name) for name in ("data", "rollout"))
    template = _path(data.get("chat_template"))
    if args.chat_template is None and template is not None and not template.is_file():
        if where is not None and where.name != RUN_CONFIG:  # an exported folder has the template itself
            raise ConfigError(
                f"the run of {str(args.model)!r} rendered its prompts with data.chat_template={str(template)!r}, which is"
                " not there; set --chat-template FILE"
            )
        template = None
    is_chat = data.get("apply_chat_template")
    return PromptStyle(
        task=args.task or data.get("task") or PLAIN_TASK,
        system_prompt=data.get("system_prompt") if args.system_prompt is None else args.system_prompt,
        chat_template=args.chat_template or template,
        is_chat={"auto": is_chat, "chat": True, "text": False}[args.format],
        stop=list(args.stop or rollout.get("stop") or []),
        stop_token_ids=list(rollout.get("stop_token_ids") or []),
        max_tokens=args.max_tokens or data.get("max_response_length") or DEFAULT_MAX_TOKENS,
        run=where,
    )


def _run_config(model: Path) -> tuple[dict[str, Any], Path | None]:
    """The config of the run that wrote `model`, and its file. Empty: the folder is no run's."""
    step, beside = model / STEP_FILE, model.resolve().parent / RUN_CONFIG
    try:
        if step.exists():
            return _section(read_json(step), "config"), step
        if model.resolve().name == EXPORT_FOLDER and beside.exists():
            config = parse_yaml(read_text(beside, MAX_YAML))
            if "data" in config and "trainer" in config:
                return config, beside
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"the config of the run that wrote {str(model)!r} cannot be read: {error}") from error
    return {}, None


def _section(config: Any, name: str) -> dict[str, Any]:
    value = config.get(name) if isinstance(config, dict) else None
    return value if isinstance(value, dict) else {}


def _path(value: Any) -> Path | None:
    return Path(value) if isinstance(value, str) else None
