"""What identifies a problem in data files, rollout files and evaluations: its question and its reference answer.

Row numbers do not: they change when a file is filtered. Nor does the rendered prompt: an evaluation may render the same
question by another template.
"""

from __future__ import annotations

import hashlib
import json

from grpo_megatron.data.rows import Question


def question_text(question: Question) -> str:
    """The question as text; of a chat, the contents of its messages."""
    if isinstance(question, str):
        return question
    return "\n\n".join(message["content"] for message in question)


def problem_digest(question: Question, answer: str) -> str:
    """32 hexadecimal digits. Equal for the same question as text and as a chat of one message."""
    content = json.dumps([question_text(question), answer])
    return hashlib.sha256(content.encode()).hexdigest()[:32]
