"""AnswerForm: how a response writes its answer, so that a right one can be made of a reference answer."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_megatron.rewards.format import opened_thought

HASHES, BOXED, TAGGED, SENTENCE = "hashes", "boxed", "tagged", "sentence"
IN_PROMPT = (("<answer>", TAGGED), ("\\boxed", BOXED), ("####", HASHES))  # what an instruction shows of its form
OF_REWARDS = {  # what the graders of this package read
    **dict.fromkeys(["gsm8k", "gsm8k_strict", "graded", "arithmetic_steps"], HASHES),
    **dict.fromkeys(["graded_answer", "arithmetic"], TAGGED),
    "math": BOXED,
    "gsm8k_cot_strict": SENTENCE,
}


@dataclass(frozen=True)
class AnswerForm:
    """`name` is one of HASHES, BOXED, TAGGED, SENTENCE, or "": the answer alone."""

    name: str

    @property
    def description(self) -> str:
        """For messages."""
        shown = {
            HASHES: "#### ANSWER",
            BOXED: "\\boxed{ANSWER}",
            TAGGED: "<answer>ANSWER</answer>",
            SENTENCE: "The answer is ANSWER.",
        }
        return shown.get(self.name, "the answer alone, because neither the prompt nor the task's reward shows a form")

    def response(self, answer: str, prompt: str) -> str:
        """A response to `prompt` with this answer. A thought that the prompt has opened is closed."""
        opened = opened_thought(prompt)
        if not self.name and not opened:
            return answer
        said = f"The answer is {answer}."
        thought = ""
        if opened and "</think>" not in opened:
            thought = f"{said}\n</think>\n"
        elif not opened and self.name == TAGGED:
            thought = f"<think>{said}</think>\n"
        written = {
            HASHES: f"#### {answer}" if thought else f"{said}\n#### {answer}",
            BOXED: f"The answer is \\boxed{{{answer}}}.",
            TAGGED: f"<answer>{answer}</answer>",
            SENTENCE: said,
        }
        return thought + written.get(self.name, answer)


def answer_form(prompt: str, rewards: list[str]) -> AnswerForm:
    """The form that the prompt's instruction shows, else that of the first reward of `rewards` which has one."""
    for mark, name in IN_PROMPT:
        if mark in prompt:
            return AnswerForm(name)
    return AnswerForm(next((OF_REWARDS[name] for name in rewards if name in OF_REWARDS), ""))
