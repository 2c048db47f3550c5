"""Shell scripts, read and never run: the words of their commands, with the variables put in.

Assignments, arrays, `${A:-$B}` and its kind, and integer arithmetic are evaluated. What is not known stays a text with a `$`:
`$(command)`, a variable that is set nowhere, and what an `if`, `case`, `&&` or `||` may change.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from pathlib import Path

from grpo_megatron.untrusted import ReadError

MAX_EXPANSIONS = 50  # expansions within each other
MAX_EXPANDED = 1 << 20  # characters that all variables of a script are replaced by
MAX_ARITHMETIC = 200  # characters of one expression, which is parsed and evaluated by recursion
UNKNOWN = re.compile(r"\$[\w{(]")  # a variable or an interpolation whose value is not known
DECLARES = {"export", "local", "readonly", "declare", "-a", "-x", "-r"}
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
NAME = re.compile(r"[A-Za-z_]\w*|\d")
PARAMETER = re.compile(r"\{(\w+)(?:(:?)([-=+?])|(?=\}))")
WHOLE = re.compile(r"\$(?:\w+|\{\w+\})")  # without quotes its value is several words
ARRAY = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?')
HERE = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1")  # a text up to this word
# Blanks, comments, redirections.
BETWEEN = re.compile(r"[ \t\r]+|(?<![^\s;&|()])#[^\n]*|\d*[<>]+[&|]?[ \t]*(?:[^\s;&|()<>]+)?")
END = re.compile(r"(&&|\|\|)\s*|[;&|\n()]")
KEYWORDS = {"if": 1, "case": 1, "fi": -1, "esac": -1} | dict.fromkeys(("then", "elif", "else", "do", "{", "!"), 0)
END_OF_WORD = " \t\r\n;&|()<>"
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,  # of a shell
}


def commands(text: str, given: dict[str, str]) -> list[list[str]]:
    """Reads the words of every command. `given`: variables from outside. Raises ReadError, also beyond the bounds above."""
    return _Script(text.replace("\\\n", ""), {"HOME": str(Path.home()), **given}).read()


class _Script:
    """Goes through a text once."""

    def __init__(self, text: str, variables: dict[str, str]) -> None:
        self.text, self.at, self.variables = text, 0, variables
        self.arrays: dict[str, list[str]] = {}
        self.branches = self.depth = self.expanded = 0  # open `if` and `case`; expansions; their characters

    def read(self) -> list[list[str]]:
        found_commands: list[list[str]] = [[]]
        is_linked = False  # behind `&&` or `||`
        while self.at < len(self.text):
            words, start = found_commands[-1], self.at
            if match := HERE.match(self.text, self.at):
                self.at = match.end()
                self._until(f"\n{match[2]}")
            elif match := BETWEEN.match(self.text, self.at):
                self.at = match.end()
            elif match := END.match(self.text, self.at):
                self.at, is_linked = match.end(), bool(match[1])
                found_commands += [[]] if words else []
            elif (match := ASSIGNMENT.match(self.text, self.at)) and DECLARES.issuperset(words):
                self.at = match.end()
                self._assign(match[1], is_added=bool(match[2]), is_sure=not (self.branches or is_linked))
            else:
                words += self._words()
                if len(words) == 1 and (written := self.text[start : self.at]) in KEYWORDS:
                    self.branches += KEYWORDS[written]
                    words.clear()
                elif words[-3:-1] in (["bash", "-c"], ["sh", "-c"], ["bash", "-lc"]):
                    self._spend(len(self.text))
                    self.text = f"{self.text[: self.at]}\n{words.pop()}\n{self.text[self.at :]}"
        return [words for words in found_commands if words]

    def _assign(self, name: str, *, is_added: bool, is_sure: bool) -> None:
        if self.text.startswith("(", self.at):
            words = self._array()
            words = words if is_sure else [f"{word}${{:set-by-a-branch}}" for word in words]
            self.arrays[name] = [*(self.arrays.get(name, []) if is_added else []), *words]
            return
        value = (self.variables.get(name, "") if is_added else "") + self._text(END_OF_WORD)
        is_same = is_sure or value == self.variables.get(name)
        self.variables[name] = value if is_same else f"${{{name}:set-by-a-branch}}"

    def _array(self) -> list[str]:
        words: list[str] = []
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != ")":
            if match := BETWEEN.match(self.text, self.at) or END.match(self.text, self.at):
                self.at = match.end()
            else:
                words += self._words()
        self.at += 1
        return words

    def _words(self) -> list[str]:
        """Reads the next word; several, if it is an array or a variable without quotes."""
        start = self.at
        value = self._text(END_OF_WORD)
        written = self.text[start : self.at]
        if (match := ARRAY.fullmatch(written)) and match[1] in self.arrays:
            self._spend(sum(len(word) + 1 for word in self.arrays[match[1]]))
            return self.arrays[match[1]]
        return value.split() if WHOLE.fullmatch(written) else [value] if value or written[0] in "\"'" else []

    def _text(self, ends: str, *, is_quoted: bool = False) -> str:
        """Reads the text up to one of the characters `ends`; quotes are removed, and variables replaced."""
        parts = []
        while self.at < len(self.text) and (char := self.text[self.at]) not in ends:
            self.at += 1
            if char == "\\":
                following = self.text[self.at : self.at + 1]
                parts.append(following if not is_quoted or following in '$`"\\' else char + following)
                self.at += 1
            elif char == "'" and not is_quoted:
                parts.append(self._until("'"))
            elif char == '"':
                parts.append(self._text('"', is_quoted=True))
                self._until('"')
            elif char == "`":
                parts.append(f"$({self._until('`')})")
            else:
                parts.append(self._dollar(is_quoted=is_quoted) if char == "$" else char)
        return "".join(parts)

    def _until(self, end: str) -> str:
        """Reads the text up to `end`, which is passed, too."""
        start, place = self.at, self.text.find(end, self.at)
        if place < 0:
            raise ReadError(
                f"No closing quotation: {end!r} is missing behind {self.text[max(0, start - 20) : start]!r}"
            )
        self.at = place + len(end)
        return self.text[start:place]

    def _dollar(self, *, is_quoted: bool) -> str:
        """Reads the value of what stands behind a `$`; what has none stays as it is written."""
        start, value = self.at, None
        self.depth += 1
        if self.depth > MAX_EXPANSIONS:
            raise ReadError(f"has more than {MAX_EXPANSIONS} expansions within each other")
        if self.text.startswith("(", start):
            self._pass("()")
            if self.text.startswith("((", start):
                value = self._computed(self.text[start + 2 : self.at - 2])
        elif match := PARAMETER.match(self.text, start):
            self.at = match.end()
            other, value = self._text("}", is_quoted=is_quoted), self.variables.get(match[1])
            self._until("}")
            has_value = bool(value) if match[2] else value is not None
            if match[3] == "+" or (match[3] in ("-", "=") and not has_value):
                value = other if has_value == (match[3] == "+") else ""
        elif self.text.startswith("{", start):
            self._pass("{}")
        elif match := NAME.match(self.text, start):
            self.at, value = match.end(), self.variables.get(match[0])
        self.depth -= 1
        self._spend(len(value or ""))
        return f"${self.text[start : self.at]}" if value is None else value

    def _pass(self, pair: str) -> None:
        """Go behind a text in brackets."""
        level = 0
        for match in re.compile(f"[{re.escape(pair)}]").finditer(self.text, self.at):
            level += 1 if match[0] == pair[0] else -1
            if level == 0:
                self.at = match.end()
                return
        raise ReadError(f"{pair[1]!r} is missing behind {self.text[self.at : self.at + 20]!r}")

    def _computed(self, text: str) -> str | None:
        inner = _Script(text, self.variables)
        inner.depth, inner.expanded = self.depth, self.expanded
        text, self.expanded = inner._text(""), inner.expanded
        text = NAME.sub(lambda name: self.variables.get(name[0], name[0]), text)[: MAX_ARITHMETIC + 1].strip()
        try:
            return str(_integer(ast.parse(text, mode="eval").body)) if len(text) <= MAX_ARITHMETIC else None
        except (ValueError, SyntaxError, ZeroDivisionError):
            return None

    def _spend(self, characters: int) -> None:
        self.expanded += characters
        if self.expanded > MAX_EXPANDED:
            raise ReadError(f"has variables that expand to more than {MAX_EXPANDED:,} characters")


def _integer(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_integer(node.left), _integer(node.right))
    raise ValueError("not an integer expression")
