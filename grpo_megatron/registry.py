"""Registry: functions by the name that a YAML file gives them, a registered name or `package.module:function`.

A `FactRegistry` also keeps facts about its entries, declared where the entry is defined. The checks of a config read them:

    @policy_losses.register("dpo", paired=True, needs_reference=True)  # in this package: under a name
    @policy_losses.declare(paired=True, needs_reference=True)          # the user's own: `my.module:my_loss`

A registry's facts are the fields of one frozen dataclass with defaults. An unknown fact is a TypeError where it is declared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

FUNCTION = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")  # my.module:function
T = TypeVar("T")
F = TypeVar("F")


def find_modules(config: Path) -> None:
    """Look for the user's modules in the current folder, and beside the config, too. What is found today stays what is found.

    `python -m grpo_megatron` looks in the current folder first, the command `grpo-megatron` nowhere of the user's own.
    Reward workers and environments get the same path from this process.
    """
    for folder in (os.getcwd(), str(config.parent.absolute())):
        if folder not in sys.path and not ("" in sys.path and folder == os.getcwd()):
            sys.path.append(folder)


def import_function(path: str) -> object:
    """Import `package.module:attribute`. Raises ValueError that says which half of the path is wrong.

    Other exceptions of the module are passed on, except one that would end the process: it is a ValueError.
    """
    module_name, _, attribute = path.partition(":")
    if "/" in module_name or module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise ValueError(f"{path!r}: a module has dots in its name, and no .py; write {dotted}:{attribute}")
    try:
        with no_exit(f"{path!r}: importing module {module_name!r}"):
            module = importlib.import_module(module_name)
    except ImportError as error:
        if not (isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")):
            raise ValueError(
                f"{path!r}: an import in module {module_name!r} fails ({error}); correct it there"
            ) from error
        raise ValueError(
            f"{path!r}: cannot import module {module_name!r} ({error}); put it into the current folder or beside the"
            " config, or its folder on PYTHONPATH"
        ) from error
    if not hasattr(module, attribute):
        public = (name for name in vars(module) if not name.startswith("_"))
        hint = did_you_mean(attribute, public) or f"; define it there ({getattr(module, '__file__', None)})"
        raise ValueError(f"{path!r}: module {module_name!r} has no attribute {attribute!r}{hint}")
    return getattr(module, attribute)


@contextlib.contextmanager
def no_exit(what: str) -> Iterator[None]:
    """Raises ValueError if a user's code in the block calls `sys.exit`: the run would end as if it had succeeded."""
    try:
        yield
    except SystemExit as error:
        raise ValueError(f"{what} ends the process (sys.exit({error.code!r})); take that call out of it") from error


SAME_MEANING = {  # a name here -> others for the same thing, which no spelling leads to; the first that is known here counts
    "gae": "ppo actor_critic",
    "vanilla": "ppo ppo_clip clip grpo rloo surrogate",
    "reinforce_plus_plus_baseline": "rf_plus_plus_baseline",
    "reinforce_plus_plus": "reinforce rf_plus_plus reinforce_pp",
    "rloo": "rloo_norm rloo_n leave_one_out",
    "token-mean": "dapo bnpo mean",
    "seq-mean-token-sum-norm": "dr_grpo drgrpo",
    "seq-mean-token-mean": "grpo sample_mean",
    "low_var_kl": "schulman unbiased",
    "geo_mean": "gmpo",
    "bfloat16": "bf16",
    "float32": "fp32 float full",
    "transformers": "hf huggingface",
    "WSD": "warmup_stable_decay",
    "transformer_engine": "te",
    "tensorboard": "tb",
    "console": "stdout terminal",
    "math": "math_verify accuracy accuracy_reward",
}


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Ends an error about an unknown name: "; did you mean 'PREFIXname'?", or "" where nothing is close."""
    plain = {_plain(one): one for one in known}
    same = [one for one, others in SAME_MEANING.items() if _plain(name) in others.split() and _plain(one) in plain]
    if close := same or difflib.get_close_matches(_plain(name), list(plain), n=1):
        return f"; did you mean {prefix + plain[_plain(close[0])]!r}?"
    return ""


def _plain(name: str) -> str:
    return name.lower().replace("++", "_plus_plus").replace("-", "_").replace(".", "_")


class Registry(Generic[T]):
    """A table of functions of one kind. `kind` names it in errors ("policy loss", "reward", ...).

    `modules` register further entries. They are imported when a name is first looked up.
    """

    def __init__(self, kind: str, modules: Sequence[str] = (), user_form: str = "package.module:function") -> None:
        self.kind, self._modules, self._user_form = kind, modules, user_form
        self._entries: dict[str, T] = {}

    def register(self, *names: str) -> Callable[[T], T]:
        """Decorates `@tasks.register("gsm8k")`. Several names are synonyms."""

        def add(entry: T) -> T:
            for name in names:
                assert name not in self._entries, f"{self.kind} {name!r} is registered twice"
                self._entries[name] = entry
            return entry

        return add

    def get(self, name: str) -> T:
        """Returns the entry called `name`, or the object at `package.module:attribute`. Raises ValueError."""
        known = self.names()
        if name in self._entries:
            return self._entries[name]
        if ":" in name:
            return import_function(name)  # type: ignore[return-value]
        module, _, attribute = name.rpartition(".")
        form = f"{module}:NAME" if attribute == "py" else f"{module}:{attribute}"
        hint = did_you_mean(name, known) or (f"; write {form}" if module else "")
        raise ValueError(f"unknown {self.kind} {name!r}{hint} (known: {', '.join(known)}; or {self._user_form})")

    def names(self) -> list[str]:
        modules, self._modules = self._modules, ()
        for module in modules:
            importlib.import_module(module)
        return sorted(self._entries)


class FactRegistry(Registry[T], Generic[T, F]):
    """A registry whose entries have facts. `defaults` holds the facts of an entry that declares none."""

    def __init__(self, kind: str, defaults: F, modules: Sequence[str] = ()) -> None:
        super().__init__(kind, modules)
        self.defaults = defaults
        self._declared: list[tuple[T, F]] = []  # a list, not a dict: an entry may be unhashable

    def declare(self, **facts: Any) -> Callable[[T], T]:
        """Decorates a function that a config names as `package.module:function`. Raises TypeError: unknown fact."""
        known = [field.name for field in dataclasses.fields(self.defaults)]  # type: ignore[arg-type]
        if unknown := sorted(set(facts) - set(known)):
            raise TypeError(f"unknown fact of a {self.kind}: {', '.join(unknown)} (known: {', '.join(known)})")
        declared: F = dataclasses.replace(self.defaults, **facts)  # type: ignore[type-var]

        def add(entry: T) -> T:
            assert all(other is not entry for other, _ in self._declared), f"facts of {entry} are declared twice"
            self._declared.append((entry, declared))
            return entry

        return add

    def register(self, *names: str, **facts: Any) -> Callable[[T], T]:
        """Decorates `@policy_losses.register("gmpo", "geo_mean", geometric_correction=True)`."""
        register, declare = super().register(*names), self.declare(**facts)
        return lambda entry: declare(register(entry))

    def facts_of(self, entry: T) -> F:
        """Returns the facts that were declared for `entry`, else the defaults."""
        return next((facts for other, facts in self._declared if other is entry), self.defaults)

    def facts(self, name: str) -> F:
        """Returns the facts of what `get(name)` returns, or the defaults where it raises: the checks report that as a problem."""
        try:
            return self.facts_of(self.get(name))
        except Exception:  # noqa: BLE001 - whatever the user's module raises while it is imported
            return self.defaults

    def names_with(self, **facts: Any) -> list[str]:
        """Returns the registered names whose facts have these values."""
        return [name for name in self.names() if facts.items() <= vars(self.facts(name)).items()]
