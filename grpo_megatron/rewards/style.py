"""Rewards for the style of a response, for components of a sum: `length`, `language`, `repetition`. No answer is read.

A reward function sees text, not tokens: lengths are in characters. (`reward.overlong_buffer` counts tokens.)
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Literal

from grpo_megatron.rewards.reward import rewards

MAX_NGRAM = 32  # bounds time and memory per character

SPACED = (
    *("latin", "greek", "cyrillic", "armenian", "georgian", "hebrew", "arabic", "devanagari", "bengali", "tamil"),
    *("telugu", "hangul", "ethiopic"),
)
UNSPACED = ("han", "hiragana", "katakana", "thai", "lao", "khmer", "myanmar")  # a letter counts as a word
SCRIPTS = (*SPACED, *UNSPACED)

_SYMBOLS = {
    *("MATHEMATICAL", "DOUBLE-STRUCK", "SCRIPT", "BLACK-LETTER", "MODIFIER"),
    *("MICRO", "OHM", "KELVIN", "ANGSTROM", "PLANCK"),
}
_NO_LANGUAGE = re.compile(r"\\[A-Za-z]+|</?(?:think|answer)>")  # commands of LaTeX, tags


@rewards.register("length")
def length_reward(
    completion: str,
    answer: str,
    *,
    max_length: int,
    free_length: int = 0,
    start: float = 0.0,
    end: float = -1.0,
    beyond: float | None = None,
    shape: Literal["linear", "cosine"] = "linear",
) -> float:
    """Returns `start` up to `free_length` characters, from there to `end` at `max_length`, and `beyond` above (null: `end`).

    Linear, or half a cosine: end + (start - end) (1 + cos(pi x)) / 2 (arXiv 2502.03373, section 4.2, which has other
    ends for right and for wrong answers; here two components have a gate each). Raises ValueError unless 0 <=
    free_length < max_length.
    """
    if not 0 <= free_length < max_length:
        raise ValueError(f"free_length={free_length} must be at least 0 and below max_length={max_length}")
    if shape not in ("linear", "cosine"):
        raise ValueError(f"shape={shape!r} is neither linear nor cosine")
    if len(completion) > max_length:
        return end if beyond is None else beyond
    done = max(0, len(completion) - free_length) / (max_length - free_length)
    left = 1.0 - done if shape == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return end + (start - end) * left


@rewards.register("language")
def language_reward(completion: str, answer: str, *, script: str | Sequence[str] = "latin") -> float:
    """Returns the share of words in `script`, or in one of several: 0 to 1. A text without words has 1.

    After arXiv 2501.12948, 2.3.2. A script is not a language: English and French are both Latin. A run of letters of
    one script is a word; of scripts without spaces, each letter is one. Single Latin and Greek letters are variables:
    neither they nor LaTeX commands nor think and answer tags count. Raises ValueError for an unknown script.
    """
    wanted = {script} if isinstance(script, str) else set(script)
    if not wanted or not wanted <= set(SCRIPTS):
        raise ValueError(f"script={script!r} must be one or several of {', '.join(SCRIPTS)}")
    total = right = 0
    for name, count in _words(_NO_LANGUAGE.sub(" ", completion)):
        total += count
        right += count if name in wanted else 0
    return right / total if total else 1.0


def _words(text: str) -> Iterator[tuple[str, int]]:
    """Yields (script, words) of each run of letters of one script. Accents belong to the letter before them."""
    letters = (character for character in text if unicodedata.category(character)[0] != "M")
    for script, run in itertools.groupby(letters, _script):
        length = sum(1 for _ in run)
        if script in UNSPACED:
            yield script, length
        elif script and not (length == 1 and script in ("latin", "greek")):
            yield script, 1


@functools.lru_cache(maxsize=4096)
def _script(character: str) -> str:
    """Returns the first word of a letter's Unicode name, such as "latin"; "" for what is no letter."""
    if not character.isalpha():
        return ""
    words = unicodedata.name(character, "unnamed").removeprefix("FULLWIDTH ").removeprefix("HALFWIDTH ").split()
    if words[0] in _SYMBOLS:
        return ""
    return "han" if words[0] == "CJK" else words[0].lower()


@rewards.register("repetition")
def repetition_reward(
    completion: str, answer: str, *, ngram: int = 4, unit: Literal["word", "character"] = "word"
) -> float:
    """Returns -(1 - distinct n-grams / n-grams): 0 where all differ, towards -1 for one phrase again and again.

    After arXiv 2502.03373, which marks the repeated tokens. "character": for texts without spaces. Shorter texts have
    0. Raises ValueError unless 1 <= ngram <= MAX_NGRAM.
    """
    if not 1 <= ngram <= MAX_NGRAM:
        raise ValueError(f"ngram={ngram} must be between 1 and {MAX_NGRAM}")
    if unit not in ("word", "character"):
        raise ValueError(f"unit={unit!r} is neither word nor character")
    text = completion.lower()
    units: Sequence[str] = text.split() if unit == "word" else text
    total = len(units) - ngram + 1
    if total < 1:
        return 0.0
    ngrams = (units[place : place + ngram] for place in range(total))
    distinct = len({one if isinstance(one, str) else tuple(one) for one in ngrams})
    return distinct / total - 1.0
