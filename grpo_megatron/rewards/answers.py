"""Answers as responses write them: the last box, numbers, letters, layouts; rewards gsm8k, choice, format, tag_count."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from grpo_megatron.rewards.reward import Extractor, extractors, opened_thought, rewards

MAX_BOX = 4096  # characters of one answer; MATH's longest has 159
MAX_BOXES = 12  # in one list

_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_LINK = re.compile(r"[\s$.]*(?:,|;|\\text\{\s*(?:,?\s*(?:and|or))\s*\}|,?\s*(?:and|or)\b)[\s$]*")


def last_boxed(text: str, joined: bool = True) -> str | None:
    r"""Returns the content of the last box, or (`joined`) of the last few boxes; None without one, or if it is not closed.

    A box, `\boxed{...}` or `\fbox{...}`, has the final answer by the convention of MATH (arXiv 2103.03874). An unclosed last
    box (a truncated response) is no prediction, even if there is an earlier box. In `\boxed{7\}` the backslash is a slip:
    such a brace closes a box that no other one does, if no `\{` is open. `\boxed 7$` ends at the dollar sign or the line's
    end. Of nested boxes the innermost is read; an empty box is "". Boxes with only `,`, `and` or `or` between them are one
    list. Linear time: at most MAX_BOX characters are read after a box, and at most MAX_BOXES boxes.
    """
    start = box_start(text)
    content, _ = _read_box(text, start) if start >= 0 else (None, 0)
    if content is None:
        return None
    contents = [content]
    while joined and len(contents) < MAX_BOXES:
        previous = box_start(text, max(0, start - MAX_BOX), start)
        before, end = _read_box(text, previous) if previous >= 0 else (None, 0)
        if before is None or end > start or not _LINK.fullmatch(text[end:start]):
            break
        contents.insert(0, before)
        start = previous
    return ", ".join(contents)


def box_start(text: str, low: int = 0, high: int | None = None) -> int:
    """Finds where the last box of text[low:high] begins; -1 when there is none."""
    high = len(text) if high is None else high
    return max(text.rfind("\\boxed", low, high), text.rfind("\\fbox", low, high))


def _read_box(text: str, start: int) -> tuple[str | None, int]:
    """Returns (content of the box that begins at `start`, or None if it is not closed; the end of the box)."""
    start += len("\\boxed") if text.startswith("\\boxed", start) else len("\\fbox")
    window = text[start : start + MAX_BOX]
    content = window.lstrip()
    start += len(window) - len(content)
    if not content.startswith("{"):
        inner = re.split(r"[$\n]", content, maxsplit=1)[0]
        return inner.strip(), start + len(inner)
    depth, in_sets, stray = 0, 0, None
    for brace in _BRACE.finditer(content):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return content[1 : brace.start()].strip(), start + brace.end()
        in_sets += {"\\{": 1, "\\}": -1}.get(brace[0], 0)
        if in_sets < 0 and depth == 1 and stray is None:
            stray = brace
    if stray is not None:
        return content[1 : stray.start()].strip(), start + stray.end()
    return None, start


# -- numbers: the reward gsm8k -----------------------------------------------------------------------------------------

WINDOW = 256  # characters read after a mark; bounds every regular expression below, so time is linear in the text

_SIGNS_AND_SPACES = str.maketrans({"\u2212": "-", "\u00a0": " ", "\u202f": " ", "\u2009": " "})
_LATEX_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\,)\s?(?=[0-9]{3}(?![0-9]))")  # LaTeX spellings of 1,234
_LEADING_NUMBER = re.compile(
    r"""(?:\s | [*_`=~] | \\?\$ | [\u20ac\u00a3\u00a5] | \\\( | \\\[ | USD?(?=\s?\$))*  # $, euro, pound, yen
        (?P<sign>[-+]?) (?:\\?\$|[\u20ac\u00a3\u00a5])?
        (?: \\[dt]?frac \s*\{ (?P<top>[0-9]+) \}\s*\{ (?P<bottom>[0-9]+) \}
          | (?P<mixed>[0-9]+)\s+(?P<mixed_top>[0-9]+)\s?/\s?(?P<mixed_bottom>[0-9]+)
          | (?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]) | [0-9]*) (?P<decimals>\.[0-9]+)? (?:\s?/\s?(?P<over>[0-9]+))?
        ) (?:\s?\\?%)?""",
    re.VERBOSE,
)
# what may not follow a number: an operator and an operand, a second number, an exponent, a malformed group, an identifier
_CONTINUATION = re.compile(
    r"""\s*(?: [-+*/^=<>\u00d7\u00f7\u00b7\u2013] | \*\* | \\times | \\cdot | \\div ) \s* [-(\\{$]* [0-9]
      | \s+[.]?[0-9] | [,._':][0-9] | [A-Za-z][-+]?[0-9]""",
    re.VERBOSE,
)


def tagged_answer(text: str) -> str | None:
    """Returns the content of the last `<answer>...</answer>`; None when the last tag is not closed, or there is none."""
    _, opened, content = text.rpartition("<answer>")
    content, closed, _ = content.partition("</answer>")
    return content.strip() if opened and closed else None


def marked_text(text: str) -> str | None:
    """Returns what stands behind the last mark: the line, the content of the tags or of the box. None without one."""
    hashes, tag, box = text.rfind("####"), text.rfind("<answer>"), box_start(text)
    last = max(hashes, tag, box)
    if last < 0:
        return None
    if last == hashes:
        return text[last + 4 : last + 4 + 16 * WINDOW].lstrip().partition("\n")[0]
    return tagged_answer(text) if last == tag else last_boxed(text[last : last + WINDOW], joined=False)


def marked_number(text: str) -> Fraction | None:
    r"""Returns the number behind the text's last mark; None when there is no mark, or no plain number behind it.

    The one extractor of GSM8K (arXiv 2110.14168). The last of `#### 18`, `<answer>18</answer>` and `\boxed{18}`
    decides. Currency signs, markdown, LaTeX commands, thousands commas and a percent sign are dropped; units may
    follow. What is not one plain number (`9 * 2`, `10-20`, `5e3`, `1,23`, a digit outside ASCII) is no prediction.
    Departures from verl's `gsm8k`: verl reads only the last 300 characters, needs one space after `####`, accepts no
    `$`, compares strings, and reads only `####`; its "flexible" mode takes the last number of the text, marked or not.
    """
    marked = marked_text(text)
    return None if marked is None else parse_number(marked)


def parse_number(text: str) -> Fraction | None:
    """Returns the exact number that `text` begins with; None when it begins with anything else, or with an expression."""
    window = _LATEX_THOUSANDS.sub(",", text[:WINDOW].translate(_SIGNS_AND_SPACES))
    match = _LEADING_NUMBER.match(window)
    assert match is not None, "every part of the pattern is optional"
    if (match.end() == len(window) and len(text) > WINDOW) or _CONTINUATION.match(window, match.end()):
        return None
    following = window[match.end() : match.end() + 1]
    if not following.isascii() and following.isnumeric():
        return None  # for example 4 and a full-width 2, or 5 and a one-half sign
    part = match.groupdict()
    if part["top"]:
        value = _ratio(part["top"], part["bottom"])
    elif part["mixed"]:
        value = _ratio(part["mixed_top"], part["mixed_bottom"])
        value = None if value is None else value + int(part["mixed"])
    elif part["whole"] or part["decimals"]:
        value = _ratio(part["whole"].replace(",", "") + (part["decimals"] or ""), part["over"] or "1")
    else:
        value = None
    return -value if value is not None and part["sign"] == "-" else value


def _ratio(top: str, bottom: str) -> Fraction | None:
    return Fraction(top) / int(bottom) if int(bottom) else None


def numeric_answer(answer: str) -> Fraction:
    """Reads the reference answer as a number, marked or bare. Raises ValueError: without one no sample can be graded."""
    if len(answer) <= WINDOW and answer.isascii() and answer.isdigit():  # most answers, in a tenth of the time
        return Fraction(int(answer))
    value = marked_number(answer)
    value = parse_number(answer.strip()) if value is None else value
    if value is None:
        raise ValueError(f"the reference answer {answer[:80]!r} is not a number")
    return value


def contains_number(text: str, value: Fraction) -> bool:
    """Tells whether `value` stands in `text` as a number of its own, as a decimal or as a fraction. Linear time."""
    numerator, denominator = abs(value.numerator), value.denominator
    spellings = []
    if denominator != 1:
        spellings.append(rf"{numerator}\s?/\s?{denominator}")
    places = _decimal_places(value, 20)
    if places is not None:
        integer, rest = divmod(numerator * 10**places // denominator, 10**places)
        decimals = rf"\.{rest:0{places}d}0*" if places else r"(?:\.0*)?"
        digits = f"{integer:,}".replace(",", ",?") if integer or not places else "0?"
        spellings.append(digits + decimals)
    sign = "-" if value < 0 else ""
    before, after = r"(?<![0-9.])(?<![0-9],)", r"(?![0-9]|\.[0-9]|,[0-9]{3}(?![0-9]))"  # no part of a longer number
    return bool(re.search(rf"{before}{sign}\$?(?:{'|'.join(spellings)}){after}", text))


def _decimal_places(value: Fraction, limit: int) -> int | None:
    """Returns the number of decimals, below `limit`, that write the value exactly; None when no number does."""
    return next((places for places in range(limit) if 10**places % value.denominator == 0), None)


def numeric_prediction(text: str) -> str | None:
    """Writes the marked number: `1234`, `-12.5`, or `1/3` when no decimal is exact."""
    value = marked_number(text)
    if value is None:
        return None
    places = _decimal_places(value, 40)
    if not places:
        return str(value)
    integer, rest = divmod(abs(value.numerator) * 10**places // value.denominator, 10**places)
    return f"{'-' if value < 0 else ''}{integer}.{rest:0{places}d}"


extractors.register("gsm8k")(Extractor(numeric_prediction, numeric_answer))


@rewards.register("gsm8k")
def gsm8k_reward(completion: str, answer: str) -> dict[str, float]:
    """Returns 1 when the prediction equals the answer, else 0. "extracted": 1 when there is a prediction to compare."""
    expected, prediction = numeric_answer(answer), marked_number(completion)
    correct = float(prediction == expected)
    return {"score": correct, "acc": correct, "extracted": float(prediction is not None)}


# -- letters of choices: the reward choice -----------------------------------------------------------------------------

_CHOICE = re.compile(
    r"""(?: \\boxed | \\fbox | <answer> | \b[Aa](?:nswer|NSWER)\b (?:[\s*_]{0,8}\bis\b)? [\s*_]{0,8} :? )
        (?: [\s*_`$({\[] | \\(?:text|textbf|mathrm|mathbf|boxed|\() ){0,16} ([A-Z]) (?!(?<=I)\s+[a-z]) (?![\w'&])""",
    re.VERBOSE,
)


def choice_prediction(text: str) -> str | None:
    r"""Returns the letter behind the last mark: `Answer: C`, `the answer is (C)`, `\boxed{C}`, `<answer>C</answer>`; or None.

    Markdown, dollar signs, brackets and `\text` around the letter are dropped. What follows it may be its text, `(C) Rome`;
    a longer word (`answer: Cats`, `answer is A's`) is no letter. A text that is one letter is that letter.
    """
    matches = _CHOICE.findall(text)
    bare = text.strip(" \n.()")
    return matches[-1] if matches else bare if len(bare) == 1 and "A" <= bare <= "Z" else None


def choice_answer(answer: str) -> str:
    """Reads the reference answer. Raises ValueError unless it is one letter, A to Z."""
    if not (len(answer) == 1 and "A" <= answer <= "Z"):
        raise ValueError(f"the reference answer {answer[:80]!r} is not a letter of a choice (A to Z)")
    return answer


extractors.register("choice")(Extractor(choice_prediction, choice_answer))


@rewards.register("choice")
def choice_reward(completion: str, answer: str) -> dict[str, float]:
    """Returns 1 when the letter is the right choice's, else 0. "extracted": 1 when there is a letter to compare."""
    prediction = choice_prediction(completion)
    correct = float(prediction == choice_answer(answer))
    return {"score": correct, "acc": correct, "extracted": float(prediction is not None)}


# -- layout: the rewards `format` (all or nothing) and `tag_count` (a quarter per tag) ---------------------------------
# Some chat templates write the first `<think>` themselves, at the end of the prompt. The caller puts it before the response
# (`opened_thought`), so that both rewards see the whole turn.

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def is_tagged(text: str) -> bool:
    """Tells whether a text is `<think>...</think><answer>...</answer>`, each tag once (arXiv 2501.12948, table 1)."""
    text = text.strip()
    if any(text.count(tag) != 1 for tag in TAGS):
        return False
    think_end, answer_start = text.find("</think>"), text.find("<answer>")
    between = text[think_end + len("</think>") : answer_start]
    return (
        text.startswith("<think>") and text.endswith("</answer>") and think_end < answer_start and not between.strip()
    )


def is_hash_marked(text: str) -> bool:
    """Tells whether the last line is `#### N`, where N is one plain number, and no other line has a `####`."""
    head, mark, tail = text.strip().partition("####")
    starts_line = not head or head.rstrip(" ").endswith("\n")
    return bool(mark) and starts_line and "####" not in tail and "\n" not in tail and parse_number(tail) is not None


def is_boxed(text: str) -> bool:
    """Tells whether a thought begins the text and a box follows it, as EasyR1's `math.py` wants it."""
    thought, _, rest = text.partition("</think>")
    return thought.startswith("<think>") and "}" in rest.partition("\\boxed{")[2]


LAYOUTS = {"tagged": is_tagged, "hashes": is_hash_marked, "any": lambda text: is_tagged(text) or is_hash_marked(text)}
LAYOUTS["boxed"] = is_boxed  # not one of "any": a box is no layout of GSM8K


@rewards.register("format")
def format_reward(
    completion: str, answer: str, *, layout: Literal["tagged", "hashes", "any", "boxed"] = "any"
) -> float:
    """Returns 1 when the response has the layout, else 0; `answer` is not used.

    "tagged": think and answer tags. "hashes": `#### N` at the end. "boxed": a thought, then a box. Raises ValueError
    for another layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is not one of {', '.join(LAYOUTS)}")
    return float(LAYOUTS[layout](completion))


@rewards.register("tag_count")
def tag_count_reward(completion: str, answer: str) -> float:
    """Returns a quarter for each of the four think and answer tags that is there exactly once. `answer` is not used."""
    return sum(completion.count(tag) == 1 for tag in TAGS) / len(TAGS)


# -- how an instruction asks for the answer ----------------------------------------------------------------------------

HASHES, BOXED, TAGGED, SENTENCE, LETTER = "hashes", "boxed", "tagged", "sentence", "letter"
IN_PROMPT = (("<answer>", TAGGED), ("\\boxed", BOXED), ("####", HASHES))  # what an instruction shows of its form
OF_REWARDS = {  # what the graders of this package read
    **dict.fromkeys(["gsm8k", "gsm8k_strict", "graded"], HASHES),
    **dict.fromkeys(["graded_answer", "arithmetic"], TAGGED),
    "math": BOXED,
    "gsm8k_cot_strict": SENTENCE,
    "choice": LETTER,
}


@dataclass(frozen=True)
class AnswerForm:
    """The form of an answer. `name` is one of HASHES, BOXED, TAGGED, SENTENCE, LETTER, or "": the answer alone."""

    name: str

    @property
    def description(self) -> str:
        """Describes the form for messages."""
        shown = {
            HASHES: "#### ANSWER",
            BOXED: "\\boxed{ANSWER}",
            TAGGED: "<answer>ANSWER</answer>",
            SENTENCE: "The answer is ANSWER.",
            LETTER: "Answer: ANSWER",
        }
        return shown.get(self.name, "the answer alone, because neither the prompt nor the task's reward shows a form")

    def response(self, answer: str, prompt: str) -> str:
        """Writes a response to `prompt` with this answer. A thought that the prompt has opened is closed."""
        opened = opened_thought(prompt)
        if not self.name and not opened:
            return answer
        sentence = f"The answer is {answer}."
        thought = ""
        if opened and "</think>" not in opened:
            thought = f"{sentence}\n</think>\n"
        elif not opened and self.name == TAGGED:
            thought = f"<think>{sentence}</think>\n"
        written = {
            HASHES: f"#### {answer}" if thought else f"{sentence}\n#### {answer}",
            BOXED: f"The answer is \\boxed{{{answer}}}.",
            TAGGED: f"<answer>{answer}</answer>",
            SENTENCE: sentence,
            LETTER: f"Answer: {answer}",
        }
        return thought + written.get(self.name, answer)


def answer_form(prompt: str, rewards: list[str]) -> AnswerForm:
    """Returns the form that the prompt's instruction shows, else that of the first reward of `rewards` which has one."""
    for mark, name in IN_PROMPT:
        if mark in prompt:
            return AnswerForm(name)
    return AnswerForm(next((OF_REWARDS[name] for name in rewards if name in OF_REWARDS), ""))
