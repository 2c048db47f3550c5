"""Written groups: rows with responses -> prompts and responses as token ids, for supervised training, pairs and scalar heads.

As prompts (prompts.py), all rows are checked and measured before the run, and a group is made when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.data.conversation import TurnRenderer
from grpo_megatron.data.item_table import ITEM_BITS, ItemTable, MappedTable, kept_items
from grpo_megatron.data.prompts import check_round_trip, render_prompt
from grpo_megatron.data.rendering import encode_prompts
from grpo_megatron.data.row_set import RowSet
from grpo_megatron.data.rows import Question
from grpo_megatron.data.survey import Numbers, Survey
from grpo_megatron.data.survey_key import survey_key
from grpo_megatron.data.task import Task
from grpo_megatron.data.tasks import get_task
from grpo_megatron.data.written import Written, WrittenResponse, read_written, render_written
from grpo_megatron.types import Prompt

SupervisedExample = tuple[list[int], WrittenResponse]  # prompt ids, response
WrittenGroup = tuple[Question, list[Written], Sequence[Any]]  # a question, its responses, a reward (or labels) of each
OfflineGroup = tuple[Prompt, list[WrittenResponse], list[float]]  # a prompt, its responses, their rewards
Label = Callable[[WrittenResponse, Any], WrittenResponse]


def load_supervised(
    data: DataConfig, files: Sequence[Path], tokenizer: Any, renderer: TurnRenderer | None = None
) -> Sequence[SupervisedExample]:
    """(prompt ids, response) of rows {"prompt", "response"} or {"messages"}, in order.

    Rows over data.max_prompt_length or data.max_response_length tokens are dropped or refused as in `load_prompts`.
    `renderer` is that of the rollouts, if they have several turns. Raises ConfigError.
    """
    groups = load_offline_groups(data, files, tokenizer, {"response": 1.0}, renderer)
    return MappedTable(groups, lambda _, group: (list(group[0].prompt_ids), group[1][0]))


def load_offline_groups(
    data: DataConfig,
    files: Sequence[Path],
    tokenizer: Any,
    fields: Mapping[str, float],
    renderer: TurnRenderer | None = None,
) -> ItemTable[OfflineGroup]:
    """Prompts with responses from the file. A row has "prompt" and one response in each of `fields` (name -> reward).

    `fields` is {"response": 1.0} for supervised training, {"chosen": 1.0, "rejected": 0.0} for preferences. Otherwise as
    `load_supervised`.
    """
    rewards = list(fields.values())
    return load_written_groups(
        data,
        files,
        tokenizer,
        lambda row: [(*read_written(row, list(fields)), rewards)],
        None,
        renderer,
        kind=["written", *fields],
    )


def load_written_groups(
    data: DataConfig,
    files: Sequence[Path],
    tokenizer: Any,
    read: Callable[[dict[str, Any]], list[WrittenGroup]],
    label: Label | None,
    renderer: TurnRenderer | None = None,
    *,
    kind: Sequence[object],
) -> ItemTable[OfflineGroup]:
    """As `load_offline_groups`. `read` makes any number of groups of a row; `label(response, reward)` completes a response.

    `kind`: everything besides `data`, the files and the tokenizer that lengths depend on, as JSON (survey_key.py).
    `label` may raise ValueError. With `label` the reward in the file may be anything; that of the group is then the mean label.
    """
    rows = RowSet(files, get_task(data.task).name)
    reader = GroupReader(data, get_task(data.task), rows, tokenizer, read, label, renderer)
    key = survey_key(kind, rows.paths, reader.task, data, tokenizer, renderer)
    numbers = Survey(rows, read, reader.measure, key).run().astype(np.int64)
    places = numbers[:, 0] << ITEM_BITS | numbers[:, 1]
    fits = (numbers[:, 2] <= data.max_prompt_length) & (numbers[:, 3] <= data.max_response_length)
    what = f"rows exceed {data.max_prompt_length} prompt or {data.max_response_length} response tokens"
    kept = kept_items(data, fits, what, lambda number: f"row {number}", len(numbers))
    places = places if kept is None else places[kept]
    return ItemTable(rows, reader.make, places, len(places), [0])


@dataclass(frozen=True)
class GroupReader:
    """Makes the groups of a RowSet: the arguments of `load_written_groups`."""

    data: DataConfig
    task: Task
    rows: RowSet
    tokenizer: Any
    read: Callable[[dict[str, Any]], list[WrittenGroup]]
    label: Label | None
    renderer: TurnRenderer | None

    def measure(self, parsed: list[tuple[int, list[WrittenGroup]]]) -> Numbers:
        """[groups, 4]: row, number of the group in it, the prompt's length, the longest response's, in tokens."""
        places = [(number, item) for number, groups in parsed for item in range(len(groups))]
        groups = self.groups([(number, group) for number, of_row in parsed for group in of_row])
        if places and places[0][0] == 0:
            check_round_trip(groups[0][0].text, self.tokenizer)
        lengths = [(len(prompt.prompt_ids), max(map(len, responses), default=0)) for prompt, responses, _ in groups]
        return np.array([(*p, *n) for p, n in zip(places, lengths, strict=True)], np.int32).reshape(-1, 4)

    def make(self, number: int, row: dict[str, Any], item: int) -> OfflineGroup:
        return self.groups([(number, self.read(row)[item])])[0]

    def groups(self, written: list[tuple[int, WrittenGroup]]) -> list[OfflineGroup]:
        """The groups of (row number, group as written), in order. Raises ConfigError."""
        data, tools = self.data, self.renderer.tools if self.renderer else ()
        uids = [self.rows.uid(number) for number, _ in written]
        texts = [
            render_prompt(data, self.task, question, self.tokenizer, f"row {uid}", tools)
            for uid, (_, (question, _, _)) in zip(uids, written, strict=True)
        ]
        encoded = encode_prompts(texts, self.tokenizer, is_chat=data.apply_chat_template)
        responses = iter(
            _render_responses([one for _, (_, ones, _) in written for one in ones], data, self.tokenizer, self.renderer)
        )
        groups: list[OfflineGroup] = []
        for uid, (_, (_, ones, rewards)), text, ids in zip(uids, written, texts, encoded, strict=True):
            own = [next(responses) for _ in ones]
            if self.label is not None:
                try:
                    own = [self.label(one, reward) for one, reward in zip(own, rewards, strict=True)]
                except ValueError as error:
                    raise ConfigError(f"row {uid}: {error}") from error
                rewards = [sum(value for _, value in one.labels) / len(one.labels) for one in own]
            groups.append((Prompt(uid, tuple(ids), text, "", self.task.name, ""), own, list(rewards)))
        return groups


def _render_responses(
    written: list[Written], data: DataConfig, tokenizer: Any, renderer: TurnRenderer | None
) -> list[WrittenResponse]:
    """The responses in order. Texts end with the end-of-sequence token, turns with the template's end of turn."""
    eos = tokenizer.eos_token_id
    texts = [one for one in written if isinstance(one, str)]
    encoded = iter(tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
    if len(texts) < len(written):
        if not data.apply_chat_template:
            raise ConfigError(
                "responses of several turns are rendered by a chat template; set data.apply_chat_template=true"
            )
        renderer = renderer or TurnRenderer(tokenizer, where="rows with messages")
        roles = {message["role"] for one in written if not isinstance(one, str) for message in one}
        for role in sorted(roles - {"assistant"}):
            renderer.check(role)
    responses = []
    for one in written:
        if isinstance(one, str):
            ids = next(encoded)
            responses.append(WrittenResponse(ids if ids[-1:] == [eos] else [*ids, eos]))
        else:
            assert renderer is not None
            responses.append(render_written(one, renderer))
    return responses
