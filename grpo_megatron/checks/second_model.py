"""A model with a scalar head: how its folder is read. One beside the policy (a reward model, the critic) reads the same
tokens: its length, layout and vocabulary.
"""

from __future__ import annotations

from pathlib import Path

from grpo_megatron.checks import inputs
from grpo_megatron.checks.experts import expert_problems
from grpo_megatron.checks.layout import layout_problems
from grpo_megatron.checks.problems import Problems
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.heads.folder import HeadKind, RewardFolder, read_reward_folder
from grpo_megatron.reading import read_json


def read_head_folder(path: Path, kind: HeadKind, key: str, context: str = "") -> RewardFolder:
    """What the folder that `key` names is, as a model with a scalar head of this kind. Raises ConfigError.

    `context`: why such a folder is asked for, if the key alone does not say so.
    """
    inputs.read_model(path, key)  # the checks of every model folder
    try:
        return read_reward_folder(path, kind)
    except ValueError as error:
        raise ConfigError(f"{key}={str(path)!r}{context}: {error}; set it to such a folder") from error


def second_model_problems(
    config: Config, world_size: int, arch: Architecture | None, folder: RewardFolder, key: str
) -> Problems:
    """The folder that the config's `key` names, against the policy's layout, lengths and tokens.

    `arch`, the policy's, is None if it cannot be read.
    """
    yield from _length_problems(config, folder, key)
    yield from _layout_problems(config, world_size, arch, folder, key)
    if arch is not None:
        yield from _vocabulary_problems(config.model.tokenizer_path or config.model.path, arch, folder, key)


def _length_problems(config: Config, folder: RewardFolder, key: str) -> Problems:
    total = config.data.max_prompt_length + config.data.max_response_length
    both = f"data.max_prompt_length + data.max_response_length = {total}"
    for what in ("max_position_embeddings", "sliding_window"):
        limit = getattr(folder.arch, what)
        if limit is not None and total > limit:
            yield f"{both} exceed the {what} {limit} of {key}={str(folder.path)!r}; lower one of them"


def _layout_problems(
    config: Config, world_size: int, arch: Architecture | None, folder: RewardFolder, key: str
) -> Problems:
    """The model has the policy's layout. A problem that the policy has too is reported for the policy."""

    def problems_of(model: Architecture | None) -> Problems:
        yield from layout_problems(config, world_size, model)
        yield from expert_problems(config.actor.megatron, world_size, model, on_cpu=config.trainer.device == "cpu")

    reported = set(problems_of(arch))
    for problem in problems_of(folder.arch):
        if problem not in reported and not problem.startswith("rollout."):
            yield f"{key}={str(folder.path)!r} is cut in the policy's layout: {problem}"


def _vocabulary_problems(policy_folder: Path, arch: Architecture, folder: RewardFolder, key: str) -> Problems:
    """The model reads the policy's token ids unchanged, so both must have the same vocabulary."""
    policy, other = _vocabulary(policy_folder), _vocabulary(folder.path)
    if policy is None or other is None:
        if folder.arch.vocab_size != arch.vocab_size:
            yield (
                f"{key}={str(folder.path)!r} has {folder.arch.vocab_size} tokens and the policy {arch.vocab_size}, and one"
                " of them has no tokenizer.json to tell whether they are the same; put the tokenizer into both folders"
            )
        return
    for token, token_id in policy.items():
        if other.get(token) != token_id:
            yield (
                f"{key}={str(folder.path)!r} has another tokenizer than the policy: token {token!r} is {token_id} to the"
                f" policy and {other.get(token, 'unknown')} to it; take a model of the policy's family"
            )
            return


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Token -> id of a folder's tokenizer.json; None without a readable one."""
    try:
        tokenizer = read_json(folder / "tokenizer.json")
        vocabulary = tokenizer["model"]["vocab"]
        if isinstance(vocabulary, list):  # unigram: [piece, score] in the order of ids
            vocabulary = {piece: token_id for token_id, (piece, _) in enumerate(vocabulary)}
        return {**vocabulary, **{added["content"]: added["id"] for added in tokenizer.get("added_tokens", ())}}
    except (OSError, ValueError, KeyError, TypeError):
        return None
