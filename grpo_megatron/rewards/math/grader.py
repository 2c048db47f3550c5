r"""Answers to competition mathematics: the one extractor and verifier of MATH, MATH-500, OlympiadBench, AIME, AMC, Minerva.

The answer is what the last `\boxed{...}` holds (`rewards/boxed.py`), or the last `<answer>...</answer>` behind it. It is
right when it is the reference by value: one string after `rewards/latex.py`, or the same tree (`rewards/answer.py`) of
the same values (`rewards/value.py`), formulas by math-verify (`rewards/formula.py`). Plain numbers, words and identical
strings never reach sympy. MATH: arXiv 2103.03874.

Departures from math-verify 0.9: a list `3, 5` is not `3, 5, 5` and not the pair `(3,5)`; `(-\infty,3)` = `x < 3` in both
directions; `11_2` is not `11_3`, 5 cm not 5 m, A not a; anagrams are not equal; of several boxes in a text the last one
counts, not the one that happens to parse.
"""

from __future__ import annotations

from grpo_megatron.rewards.math.answer import MAX_ANSWER, read, same
from grpo_megatron.rewards.math.boxed import MAX_BOX, box_start, last_boxed
from grpo_megatron.rewards.math.formula import load, same_formula
from grpo_megatron.rewards.math.latex import tidy
from grpo_megatron.rewards.math.value import rational, same_value
from grpo_megatron.rewards.reward import Answers, answers, preloads, rewards


def extract(text: str) -> str | None:
    """The answer a text gives, as it stands there; several boxes in a row are a list. None when it gives none."""
    tag = text.rfind("<answer>")
    if tag < 0 or box_start(text) > tag:
        return last_boxed(text)
    end = text.find("</answer>", tag)
    return text[tag + len("<answer>") : end].strip() if 0 <= end <= tag + MAX_BOX else None


def equivalent(gold: str, answer: str) -> bool:
    """Whether two answers, LaTeX or plain text, are the same. Raises TimeoutError when sympy takes too long."""
    if gold.strip() == answer.strip():
        return True
    if len(gold) > MAX_ANSWER or len(answer) > MAX_ANSWER:
        return "".join(gold.split()) == "".join(answer.split())
    return same(read(gold), read(answer), lambda one, other: same_value(one, other, same_formula))


def is_right(gold: str, completion: str) -> bool:
    """Whether the answer of `completion` is `gold`. Raises TimeoutError.

    Where several boxes make a list, the last alone may also be right: some references of MATH hold only that one.
    """
    answer = extract(completion)
    if answer is None:
        return False
    last = last_boxed(completion, joined=False)
    return equivalent(gold, answer) or (last not in (None, answer) and answer.endswith(last) and equivalent(gold, last))


def read_gold(answer: str) -> str:
    """The reference, boxed or bare. Raises ValueError when it is empty."""
    gold = _bare(answer)
    if not gold:
        raise ValueError("the reference answer is empty")
    return gold


def _bare(answer: str) -> str:
    return (last_boxed(answer) if box_start(answer) >= 0 else answer.strip()) or ""


def vote_key(answer: str) -> str:
    """Answers with one key are one vote in maj@k: the exact number, else the tidy string."""
    text = tidy(answer[:MAX_ANSWER])
    node = read(text)
    value = rational(node.text) if node.kind == "value" else None
    return str(value) if value is not None else text


answers.register("math")(Answers(extract, read_gold, vote_key))
preloads["math"] = load


@rewards.register("math")
def math(completion: str, answer: str) -> dict[str, float]:
    """1 when the boxed answer is the reference, else 0. "extracted": 1 when there was an answer to compare."""
    correct = float(is_right(_bare(answer), completion))
    return {"score": correct, "acc": correct, "extracted": float(bool(extract(completion)))}
