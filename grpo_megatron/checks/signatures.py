"""Whether a function of the user's own can be called as the program will call it: from its signature, without a call."""

from __future__ import annotations

import inspect
from typing import Any

CALLED_WITH = {  # kind of a registry -> the arguments, which are given by position
    "policy loss": ("inputs: LossInputs", "config: ActorConfig"),
    "advantage estimator": ("table: GroupTable", "config: AlgorithmConfig"),
    "loss aggregation mode": ("lengths: list[int]", "norm_length: float"),
    "KL estimator": ("logprobs: Tensor", "ref_logprobs: Tensor"),
}


def signature_problem(function: Any, kind: str) -> str | None:
    """Why the function cannot be called as one of this kind; None: it can, or only a call would tell."""
    arguments = CALLED_WITH[kind]
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        return f"it is async or a generator; a {kind} is a plain function"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature
        return None
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return f"its signature is {signature}, and it is called with ({', '.join(arguments)}): {error}"
    return None
