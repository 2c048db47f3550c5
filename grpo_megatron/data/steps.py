"""Steps of a response: where they end, as response tokens.

A step ends where the separator is complete in the decoded text, and at the end of the response. Its last token is the one that
completes the separator: the last token of the shortest prefix of tokens whose text reaches that place. So a step end is always on
a token boundary, also where one token holds the end of a step, the separator and the beginning of the next step. Steps that end
within one token are one step. Blank steps are none: of "a\\n\\nb\\n" with the separator "\\n" the steps are "a" and "b".

The response is tokenized as a whole, as the policy draws it. TRL's PRMTrainer tokenizes every step by itself and puts a separator
behind the last one, too; here the last step ends with the end-of-sequence token, or where the response was cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grpo_megatron.reading.bounds import cut

Decode = Callable[[Sequence[int]], str]


def step_ends(ids: Sequence[int], decode: Decode, separator: str) -> list[int]:
    """The last token of every step, increasing; at least one if there is a token. `decode` leaves special tokens out."""
    if not ids:
        return []
    text, ends, start = decode(ids), [], 0
    while (found := text.find(separator, start)) != -1:
        end = found + len(separator)
        if text[start:found].strip():
            ends.append(end)
        start = end
    tokens = tokens_at(ends, ids, decode)
    if text[start:].strip() or not tokens:
        tokens.append(len(ids) - 1)
    return list(dict.fromkeys(tokens))


def tokens_at(ends: Sequence[int], ids: Sequence[int], decode: Decode) -> list[int]:
    """For each place in the text, in increasing order: the last token of the shortest prefix whose text reaches it."""
    low, tokens = 0, []
    for end in ends:
        high = len(ids) - 1
        while low < high:
            middle = (low + high) // 2
            if len(decode(ids[: middle + 1])) >= end:
                high = middle
            else:
                low = middle + 1
        tokens.append(low)
    return tokens


def step_labels(ids: Sequence[int], labels: Sequence[bool], decode: Decode, separator: str) -> list[tuple[int, float]]:
    """(last token of a step, 1.0 if it is right, else 0.0). Raises ValueError unless there are as many steps as labels."""
    ends = step_ends(ids, decode, separator)
    if len(ends) != len(labels):
        raise ValueError(
            f"the response's tokens have {len(ends)} steps, and the row {len(labels)} labels; a step may not contain the"
            f" separator {separator!r}, be blank, or end within the token of the next one, and the tokenizer must keep the"
            f" separator (here the tokens read {cut(decode(ids), 80)!r})"
        )
    return [(end, float(label)) for end, label in zip(ends, labels, strict=True)]
