r"""Answers to competition mathematics: the one extractor and verifier of MATH, MATH-500, OlympiadBench, AIME, AMC, Minerva.

The prediction is the content of the last `\boxed{...}` (`boxed.py`), or of a later `<answer>...</answer>`. It is right
when its value is the answer's: both are one string after `latex.py`, or one tree (`tree.py`, `same_tree.py`) with equal values
(`value.py`), where math-verify compares formulas (`formula.py`); or one equation or inequality (`relation.py`). A
sentence in the box is read for the value that it states (`sentence.py`). Plain numbers, words and identical strings never reach
sympy. MATH: arXiv 2103.03874.

Departures from math-verify 0.9: a list `3, 5` is neither `3, 5, 5` nor the pair `(3,5)`; `(-\infty,3)` = `x < 3` in both
directions; `11_2` is not `11_3`, 5 cm is not 5 m, A is not a; anagrams are not equal; of several boxes in a text the last
one counts, not the one that happens to parse.
"""

from __future__ import annotations

from grpo_megatron.rewards.math.boxed import MAX_BOX, box_start, last_boxed
from grpo_megatron.rewards.math.formula import import_math_verify, same_formula
from grpo_megatron.rewards.math.latex import tidy
from grpo_megatron.rewards.math.relation import same_relation
from grpo_megatron.rewards.math.same_tree import same_tree
from grpo_megatron.rewards.math.sentence import sentence_value
from grpo_megatron.rewards.math.tree import MAX_ANSWER, parse_tree
from grpo_megatron.rewards.math.value import rational, same_value
from grpo_megatron.rewards.reward import Extractor, extractors, preloads, rewards


def boxed_prediction(text: str) -> str | None:
    """The prediction of a text, as it is written there. Several boxes in a row are a list. None without a prediction."""
    tag = text.rfind("<answer>")
    if tag < 0 or box_start(text) > tag:
        return last_boxed(text)
    end = text.find("</answer>", tag)
    return text[tag + len("<answer>") : end].strip() if 0 <= end <= tag + MAX_BOX else None


def equivalent(answer: str, prediction: str) -> bool:
    """Whether two texts, LaTeX or plain, are the same answer. Raises TimeoutError when sympy takes too long."""
    if answer.strip() == prediction.strip():
        return True
    if len(answer) > MAX_ANSWER or len(prediction) > MAX_ANSWER:
        return "".join(answer.split()) == "".join(prediction.split())
    if _same_tree(answer, prediction) or same_relation(answer, prediction):
        return True
    value = sentence_value(prediction)
    return value is not None and (_same_tree(answer, value) or same_relation(answer, value))


def _same_tree(answer: str, prediction: str) -> bool:
    return same_tree(
        parse_tree(answer), parse_tree(prediction), lambda one, other: same_value(one, other, same_formula)
    )


def is_right(answer: str, completion: str) -> bool:
    """Whether the prediction of `completion` is `answer`. Raises TimeoutError.

    Where several boxes make a list, the last one alone may also be right: some references of MATH hold only that one.
    """
    prediction = boxed_prediction(completion)
    if prediction is None:
        return False
    if equivalent(answer, prediction):
        return True
    last = last_boxed(completion, joined=False)
    if last is None or last == prediction or not prediction.endswith(last):
        return False
    return equivalent(answer, last)


def latex_answer(answer: str) -> str:
    """The reference answer, boxed or bare. Raises ValueError when it is empty."""
    content = _without_box(answer)
    if not content:
        raise ValueError("the reference answer is empty")
    return content


def _without_box(answer: str) -> str:
    return (last_boxed(answer) if box_start(answer) >= 0 else answer.strip()) or ""


def vote_key(prediction: str) -> str:
    """Predictions with one key are one vote in maj@k: the exact number, else the tidy string."""
    text = tidy(prediction[:MAX_ANSWER])
    node = parse_tree(text)
    value = rational(node.text) if node.kind == "value" else None
    return str(value) if value is not None else text


extractors.register("math")(Extractor(boxed_prediction, latex_answer, vote_key))
preloads["math"] = import_math_verify


@rewards.register("math")
def math_reward(completion: str, answer: str) -> dict[str, float]:
    """1 when the prediction is the answer, else 0. "extracted": 1 when there is a prediction to compare."""
    correct = float(is_right(_without_box(answer), completion))
    return {"score": correct, "acc": correct, "extracted": float(bool(boxed_prediction(completion)))}
