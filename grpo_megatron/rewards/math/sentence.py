r"""The answer in a sentence that stands in the box: `\text{There are } 12 \text{ ways}`, `The maximum is $\frac34$`.

Two forms are read. After a verb at the end: `... is VALUE`, `... x = VALUE`. And two words or more with one number and no
other mathematics. A sentence that denies, compares, doubts or offers a choice has no value here: `not 5`, `at least 5`,
`5 or 6`. A policy that lists its guesses must not be paid for one of them.
"""

from __future__ import annotations

import re

MAX_SENTENCE = 200  # characters

_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")
_DOUBT = re.compile(
    r"\b(?:not|no|never|neither|nor|or|either|if|unless|except|but|than|least|most|at|between|from|to|up|about|around|more"
    r"|less|over|under|above|below|maybe|perhaps|possibly|half|twice|double|triple|minus|negative|plus|squared|cubed"
    r"|percent|dozen|hundred|thousand|million|billion|false|wrong|incorrect|cannot|impossible|undefined)\b|n't",
    re.IGNORECASE,
)
_VERB = re.compile(r".*?(?:\b(?:is|are|equals?|be|becomes)\b:?|=|:)\s*(?P<value>[^=:]+)", re.DOTALL)
_LABEL = re.compile(r"(?i:(?:the )?(?:correct |right |final )?(?:answer|option|choice))\s+\(?(?P<value>[A-Z])\)?")
_NUMBER = re.compile(r"-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")
_MATHEMATICS = re.compile(r"[-+*/^_=<>\\()\[\]{}|]")


def sentence_value(text: str) -> str | None:
    """The value that a sentence states; None for a text that is no sentence, or states none or several."""
    if len(text) > MAX_SENTENCE:
        return None
    plain = " ".join(_TEXT.sub(r" \1 ", text).replace("$", " ").split()).rstrip(" .!")
    label = _LABEL.fullmatch(plain)
    if label:
        return label["value"]
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", plain)
    if not words or _DOUBT.search(plain):
        return None
    return _after_verb(plain) or (_only_number(plain) if len(words) > 1 else None)


def _after_verb(plain: str) -> str | None:
    match = _VERB.fullmatch(plain)
    if match is None or _NUMBER.search(plain[: match.start("value")]):
        return None
    return match["value"].strip()


def _only_number(plain: str) -> str | None:
    numbers = _NUMBER.findall(plain)
    if len(numbers) != 1 or _MATHEMATICS.search(plain.replace(numbers[0], "", 1)):
        return None
    return str(numbers[0])
