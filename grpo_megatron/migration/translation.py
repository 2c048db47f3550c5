"""Translation: another trainer's settings as a config of this one, with a comment for each key that has no equal."""

from __future__ import annotations

import ast
import itertools
import json
import math
import re
import shlex
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from grpo_megatron.config import Config, ConfigError
from grpo_megatron.config.methods import nearest_method, with_defaults
from grpo_megatron.config.options import COMMAND_NAME, Argument, Option, Options
from grpo_megatron.config.problems import CHANGE_ME, Problem, counted
from grpo_megatron.config.section import ConfigKey, config_keys, refused_values
from grpo_megatron.migration.shell import UNKNOWN, commands
from grpo_megatron.migration.trainers import (
    ACTOR,
    ALSO,
    OTHER_TRAINERS,
    SCRIPT,
    TRL,
    TRL_GKD,
    NotNeeded,
    OtherTrainer,
    Rule,
    Settings,
    as_list,
)
from grpo_megatron.storage.files import write_file
from grpo_megatron.untrusted import (
    REDACTED,
    TOO_DEEP,
    ReadError,
    parse_yaml,
    read_text,
    reason_of,
    redacted,
    shown,
    visible,
)

MAX_OTHER_KEYS = 3  # of a method that a config is near to
NOT_KNOWN = "its value is not known here; give KEY=VALUE behind FILE"
SEE = "see "  # another key of theirs decides
SECRET = "a secret is not written: give it in the environment (WANDB_API_KEY, HF_TOKEN, ...)"
VALIDATED = {"data.val_files", "data.val_tasks", "data.val_loss_files"}
SAMPLE_IN_VALIDATION = ("easyr1", "miles", "nemo-rl", "slime", "trl")  # at the temperature of rollouts; 0 here
REQUIRED = {"model.path": "a Hugging Face folder on this machine", "data.train_files": "files of rows"}


@dataclass
class Translation:
    """`values`: our keys, with where each value comes from. Of what has no equal (their key and value, why): `warnings`
    change the run, `notes` do not."""

    known: Mapping[str, ConfigKey]  # our keys
    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    warnings: list[tuple[str, str]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)

    def add(self, written: str, origin: str, ours: str | None, outcome: Mapping[str, Any] | str) -> None:
        """Adds one setting; `ours`: the key that is left to the user where `outcome` says why it has no value."""
        is_silent = origin.endswith("default")
        if isinstance(outcome, NotNeeded):
            self.notes += [] if is_silent or not outcome else [(written, outcome)]
        elif not outcome and not is_silent:
            self.notes.append((written, "nothing is written for it: it is so here, or other keys decide"))
        elif isinstance(outcome, str) and ours:
            if self.values.get(ours, ("", "default"))[1].endswith("default"):
                self.values[ours] = (CHANGE_ME, f"{written}: {outcome}")
            self.warnings += [] if is_silent else [(written, f"{ours}: {outcome}")]
        elif isinstance(outcome, str):
            self.warnings += [] if is_silent else [(written, outcome)]
        else:
            for ours, item in outcome.items():
                if ours == ALSO:
                    self.warnings.append((written, item))
                elif _key_of(ours, self.known):
                    self._write(ours, _fitting(ours, item, self.known), origin)
                else:
                    self.warnings.append((written, f"{ours} is not here"))

    def _write(self, ours: str, value: Any, origin: str) -> None:
        """Writes a value. Two keys of theirs that ask for different ones are a warning; of two that agree both are the origin."""
        before, earlier = self.values.get(ours, (value, "default"))
        is_set = before != CHANGE_ME and not earlier.endswith("default") and not earlier.startswith("as in ")
        if is_set and origin not in earlier.split(", "):
            if before == value:
                origin = f"{earlier}, {origin}"
            else:
                self.warnings.append((earlier, f"{ours}={_inline(before)} is replaced by {_inline(value)} of {origin}"))
        self.values[ours] = (value, origin)


def translate(settings: Settings, trainer: OtherTrainer) -> Translation:
    """Translates their trainer's defaults, then what they set. Raises ConfigError: refused settings."""
    result = Translation({key.name: key for key in config_keys(Config)})
    result.values = {ours: (value, f"as in {trainer.name}") for ours, value in trainer.implied.items()}
    settings, as_given = trainer.named({key: redacted(value, key) for key, value in settings.items()})
    every = {key: value for key, value in trainer.defaults.items() if key not in settings} | settings
    refused: dict[str, str] = {}  # why -> the first key
    for key, value in every.items():
        origin = as_given.get(key, f"{trainer.name}'s default")
        rule, written = trainer.rule(key, result.known), f"{as_given.get(key, f'{origin} {key}')}={_inline(value)}"
        outcome = _outcome(rule, written, value, every, is_set=key in settings)
        if rule is not None and rule.table == "refused" and outcome:
            refused.setdefault(rule.note, written)
        num_warnings, num_notes = len(result.warnings), len(result.notes)
        if isinstance(outcome, str) and outcome.startswith(SEE):
            named = outcome[len(SEE) :]
            outcome = type(outcome)(SEE + as_given.get(named, named))
        written = _plain(written)
        result.add(written, origin, rule.ours if rule is not None else None, outcome)
        if REDACTED in written:
            result.warnings[num_warnings:], result.notes[num_notes:] = [], [(written, SECRET)]
    is_given = {f"{ours}: {NOT_KNOWN}" for ours, (value, _) in result.values.items() if value != CHANGE_ME}
    result.warnings = [warning for warning in result.warnings if warning[1] not in is_given]  # by another name of it
    if refused:
        raise ConfigError(*(Problem(f"{trainer.name}'s {written}: {why}") for why, written in refused.items()))
    _leave_out_refused(result)
    _bound_truncation(result)
    for ours, what in REQUIRED.items():
        result.values.setdefault(ours, (CHANGE_ME, what))
    if not result.values.keys() & VALIDATED:
        for ours, value in {"trainer.val_before_train": False, "trainer.test_freq": -1}.items():
            if result.values.get(ours, ("", "default"))[1].endswith("default"):
                result.values[ours] = (value, "no data to validate on")
    elif trainer.name in SAMPLE_IN_VALIDATION:
        origin, (temperature, _) = f"{trainer.name}'s default", result.values.get("rollout.temperature", (1.0, ""))
        result.values.setdefault("rollout.val_kwargs.temperature", (temperature, origin))
    _fit_mini_batch(result)
    return result


def _plain(written: str) -> str:
    """Writes an expression of a Python script as it stands there, and an array of a shell script once."""
    return re.sub(r'="\$\{(.*\))\}"$', r"=\1", re.sub(r'^(.*)="\1"$', r"\1", written))


def _outcome(
    rule: Rule | None, written: str, value: Any, settings: Settings, *, is_set: bool
) -> Mapping[str, Any] | str:
    """Returns our keys and values for one setting, or why there are none."""
    if rule is None:
        if UNKNOWN.search(written.partition("=")[0]):
            return "what the script sets there is not known: give KEY=VALUE behind FILE"
        return NotNeeded("a key without a value") if value in (None, {}) else "not a key that is known here"
    if UNKNOWN.search(written) and not rule.note:
        return NOT_KNOWN
    if value in (None, {}) and is_set and not rule.cases:
        return {}
    try:
        return rule.apply(value, settings)
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return "it cannot be computed from this value and those of the keys that belong to it"


def _fitting(ours: str, value: Any, known: Mapping[str, ConfigKey]) -> Any:
    is_list = ours in known and isinstance(known[ours].default, list)
    return as_list(value) if is_list and value not in (None, CHANGE_ME) else value


def _leave_out_refused(result: Translation) -> None:
    """Leaves out values that this program refuses whatever the other keys are, with the reason."""
    raw = with_defaults({}, {key: value for key, (value, _) in result.values.items() if value != CHANGE_ME})
    for place, reason in refused_values(Config, raw):
        if key := next((key for key in result.values if f"{place}.".startswith(f"{key}.")), None):
            value, origin = result.values.pop(key)
            result.warnings.append((f"{origin}={_inline(value)}", f"not written as {key}: {reason}"))


def _bound_truncation(result: Translation) -> None:
    """Bounds the ids that `top_p` or `min_p` leave, where `top_k` does not."""
    values = {key: value for key, (value, _) in result.values.items()}
    full = {"rollout.top_p": 1, "rollout.min_p": 0}
    cuts = [f"{key}={values[key]}" for key, all_tokens in full.items() if values.get(key, all_tokens) != all_tokens]
    if cuts and values.get("rollout.top_k", -1) < 1:
        result.values["rollout.top_k"] = (64, "bounds the recorded ids")
        result.warnings.append((" and ".join(cuts), "set rollout.top_k=64 too, which bounds the ids that are recorded"))


def _fit_mini_batch(result: Translation) -> None:
    """Removes a mini-batch size that is a default and larger than the batch."""
    size = result.values.get("data.train_batch_size", (512, ""))[0]
    mini, origin = result.values.get("actor.ppo_mini_batch_size", (None, ""))
    if isinstance(mini, int) and isinstance(size, int) and mini > size and origin.endswith("default"):
        del result.values["actor.ppo_mini_batch_size"]


def _key_of(name: str, known: Mapping[str, ConfigKey]) -> str | None:
    """Finds the key of the config that a name is, or the table of free keys that it is in, as override_transformer_config."""
    return next((key for key in known if name == key or name.startswith(f"{key}.")), None)


def as_yaml(result: Translation, source: str) -> str:
    """Writes the YAML text. Keys are in the order of the config."""
    known = {key.name: key for key in config_keys(Config)}
    order = list(known)
    names = sorted(result.values, key=lambda name: (order.index(_key_of(name, known) or name), name))
    lines = [f"# From {source}. Run it with --dry-run first: it shows every mistake and the plan."]
    name, others = nearest_method(lambda key: result.values[key][0] if key in result.values else known[key].default)
    if name is not None and len(others) <= MAX_OTHER_KEYS:
        settings = " ".join(f"{key}={_inline(value)}" for key, value in others.items())
        lines.append(f"# Nearest method: `method: {name}`{f', with {settings}' if settings else ''}")
    path: list[str] = []
    for name in names:
        value, origin = result.values[name]
        *sections, leaf = name.split(".")
        shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(path, sections, strict=False))))
        lines += [""] if shared == 0 else []
        lines += [f"{'  ' * depth}{sections[depth]}:" for depth in range(shared, len(sections))]
        path = sections
        text = f"{'  ' * len(sections)}{leaf}: {_inline(value)}"
        lines.append(text if origin == name or origin.endswith(f".{name}") else f"{text:<58}  # {origin}")
    for title, notes in (("These change the run", result.warnings), ("Without an equal here, or a need", result.notes)):
        lines += ["", f"# {title}:", *(f"#   {written}: {note}" for written, note in notes)] if notes else []
    return "\n".join(lines) + "\n"


def _inline(value: Any) -> str:
    """Writes a value as YAML on one line."""
    if isinstance(value, float):
        return repr(value) if "e" not in repr(value) or "." in repr(value) else repr(value).replace("e", ".0e")
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except TypeError:  # a literal of Python whose keys are tuples
        return json.dumps(shown(value))


# -- Their settings, from what users have: a YAML or JSON file, a shell script, or a Python script ---------------------
# A shell script gives verl's `a.b=value` and TRL's `--name value`.
# A Python script is read, never run: the keyword arguments of `GRPOConfig(...)`, `GKDConfig(...)` that are literals.

MAX_SOURCE = 1 << 18  # bytes
MAX_BASES = 10  # files, or values, that name each other
PRODUCT = re.compile(r"\$\{mul: *\$\{([\w.]+)\}, *\$\{([\w.]+)\}\}")  # NeMo-RL's
REFERRED = re.compile(r"\$\{(\.?)([\w.]+)\}")
# What YAML 1.1 reads as a text, and their programs as a number.
NUMBER = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


def read_settings(path: Path, overrides: list[str]) -> Settings:
    """Reads their keys and values, flat (`a.b.c`). `overrides` are `a.b=value`, and replace the file's. Raises ConfigError."""
    try:
        text = read_text(path, MAX_SOURCE)
        if path.suffix == ".py":
            settings = _python(text)
        elif path.suffix == ".toml":
            settings = flat(tomllib.loads(text))
        elif path.suffix in (".yaml", ".yml", ".json"):
            settings = _with_base(flat(parse_yaml(text)), path)
        else:
            settings = _shell(text, dict(override.partition("=")[::2] for override in overrides))
            settings = _with_base(settings, path)
    except OSError as error:
        raise ConfigError(f"cannot read {shown(str(path))}: {reason_of(error)}") from error
    except (ReadError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{shown(str(path))}: {str(error) or TOO_DEEP}") from error
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"override {shown(override)} is not of the form key=value")
        if not re.search(rf"\$\{{?{re.escape(key)}\b", text):  # a variable of the script has been put in
            settings[key.lstrip("+")] = _value(value)
    settings = {key: _referred(key, settings) for key in settings}
    if not settings:
        raise ConfigError(f"{shown(str(path))} sets nothing that can be read; give a YAML file, a script, or key=value")
    return settings


def flat(values: Any, prefix: str = "") -> Settings:
    """Flattens {"a": {"b": 1}} to {"a.b": 1}. An empty table is a value."""
    if not isinstance(values, dict):
        raise ReadError(f"must be a mapping, not {type(values).__name__}")
    settings: Settings = {}
    for key, value in values.items():
        settings |= (
            flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": _number(value)}
        )
    return settings


def _with_base(settings: Settings, path: Path, depth: int = 1) -> Settings:
    """Adds the YAML file that a command names as `config`, or a file as `defaults`: from its folder, the one above it, or here.

    A setting that is null removes those below it.
    """
    key = "config" if "config" in settings else "defaults"
    name = settings.get(key)
    for folder in (path.parent, path.parent.parent, Path()):
        if isinstance(name, str) and (folder / name).is_file():
            if depth > MAX_BASES:
                raise ReadError(f"more than {MAX_BASES} files name each other as {key}")
            base = _with_base(flat(parse_yaml(read_text(folder / name, MAX_SOURCE))), folder / name, depth + 1)
            removed = tuple(f"{one}." for one, value in settings.items() if value is None)
            own = {one: value for one, value in settings.items() if one != key}
            return {one: value for one, value in base.items() if not f"{one}.".startswith(removed)} | own
    return settings


def _referred(key: str, settings: Settings) -> Any:
    """Reads the value of a key, which may be that of another one: `${a.b}`, or `${.b}` beside it."""
    value = settings[key]
    for _ in range(MAX_BASES):
        match = REFERRED.fullmatch(value) if isinstance(value, str) else None
        key = "" if match is None else f"{key.rpartition('.')[0]}.{match[2]}" if match[1] else match[2]
        if key not in settings:
            break
        value = settings[key]
    if isinstance(value, str) and (match := PRODUCT.fullmatch(value)):
        factors: list[Any] = [settings.get(name) for name in match.groups()]
        return math.prod(factors) if all(isinstance(factor, int) for factor in factors) else value
    return value


def _python(text: str) -> Settings:
    """Reads keyword arguments of TRL's configs and trainers, and what is assigned to keys of them afterwards."""
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    names: dict[str, Any] = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    names |= {node.name: f"{SCRIPT}{node.name}" for node in nodes if isinstance(node, ast.FunctionDef)}
    times = Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    for node in nodes:  # a variable that is assigned once has that value
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and times[node.targets[0].id] == 1:
            names[node.targets[0].id] = _literal(node.value, names)
    settings: Settings = {}
    for node in nodes:
        called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and re.fullmatch("(GRPO|GKD|GOLD)(Config|Trainer)", called):
            second = "reward_funcs" if called.startswith("GRPO") else "teacher_model"
            given = [*zip(("model", second, "args"), node.args, strict=False)]
            given += [(str(keyword.arg), keyword.value) for keyword in node.keywords]
            settings |= {name: _literal(value, names) for name, value in given if name != "args"}
            if isinstance(adapters := _peft_config(settings.get("peft_config"), nodes, names), dict):
                settings |= adapters
                del settings["peft_config"]
            if str(settings.get("peft_config")).startswith("${get_peft_config("):  # the command line decides
                settings["get_peft_config"] = settings.pop("peft_config")
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "attr", None) in TRL_GKD.rules:
            settings[ast.unparse(node.targets[0]).rpartition(".")[2]] = _literal(node.value, names)
    return settings


PEFT_NAMES = {  # of LoraConfig -> of TRL's command
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "target_parameters": "lora_target_parameters",
    "task_type": "lora_task_type",
}


def _peft_config(value: Any, nodes: list[ast.AST], names: Mapping[str, Any]) -> Settings | None:
    """Reads the settings of the `LoraConfig(...)` that `peft_config` is; None: it is something else."""
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("LoraConfig")]
    if len(calls) != 1 or calls[0].args or value != f"${{{ast.unparse(calls[0])}}}":
        return None
    given = {PEFT_NAMES.get(str(k.arg), str(k.arg)): _literal(k.value, names) for k in calls[0].keywords}
    return {"use_peft": True, "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0, **given}


def _literal(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Reads a value that a script states: for a function its origin, for all else its text, as a variable."""
    if isinstance(node, ast.List):
        return [_literal(one, names) for one in node.elts]
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    try:
        return ast.literal_eval(node)
    except ValueError:  # a name or a call; its value is known only when the script runs
        return f"${{{ast.unparse(node)}}}"


def _shell(text: str, given: dict[str, str]) -> Settings:
    """Reads the settings of the command that has the most. A value with an unknown variable stays as written."""
    by_size = sorted(map(_arguments, commands(text, given)), key=len)
    if len(by_size) > 1 and len(by_size[-2]) > len(by_size[-1]) / 2:
        key, value = next(iter(by_size[-2].items()))
        by_size[-1]["another command of the script"] = f"{key}={redacted(value, key)}"
    is_whole = not re.search(r"^\s*(source|\.)\s", text, re.MULTILINE)  # an array that is set nowhere is empty
    return (
        {key: value for key, value in by_size[-1].items() if not (is_whole and ARRAYS.fullmatch(key))}
        if by_size
        else {}
    )


ARRAYS = re.compile(r"\$\{\w+\[[@*]\]\}")


def _arguments(words: list[str]) -> Settings:
    """Reads `a.b=value`, `--name value`, `--name=value` and `--name` of a command, behind its program."""
    modules = ("-m", "--module")  # the second is deepspeed's and torchrun's
    start = next((place for place, word in enumerate(words) if word.endswith(".py") or words[place - 1] in modules), 0)
    settings: Settings = {}
    name = ""  # of an argument that takes the next word
    for word in words[start + 1 :]:
        key, equals, value = word.lstrip("+").removeprefix("--").partition("=")
        if ARRAYS.fullmatch(word):  # of a file that the script reads; no value of the argument before it
            settings[word], name = word, ""
        elif word.startswith("--"):
            settings[key] = _value(value) if equals else True
            name = "" if equals else key
        elif name:
            one = _value(word.rstrip(","))
            settings[name] = one if settings[name] is True else [*as_list(settings[name]), one]
        elif (equals or key.startswith("~")) and re.fullmatch(r"[A-Za-z~][\w./@-]*", key):
            settings |= flat({key: _value(value) if equals else "removed"})
        elif UNKNOWN.match(word) and "${@" not in word:
            settings[word] = word
    return settings


def _value(text: str) -> Any:
    """Reads a text as YAML."""
    try:
        return _number(parse_yaml(text))
    except ReadError:
        return text


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and NUMBER.fullmatch(value) else value


# -- `grpo-megatron import TRAINER FILE [key=value ...]`: a config of this program from one of another trainer --------


class ImportOptions(Options):
    """The options of `import`."""

    program = "import"
    description = "Write a config of this program from one of another trainer; what has no equal becomes a comment."
    epilog = "grpo-megatron import verl run_qwen2_7b.sh --output grpo.yaml"
    trainer: Annotated[
        Literal["easyr1", "miles", "nemo-rl", "openrlhf", "prime-rl", "slime", "trl", "trl-gkd", "verl"],
        Argument(
            "whose config FILE is: easyr1, miles, nemo-rl, openrlhf, prime-rl, slime, trl, trl-gkd or verl", "TRAINER"
        ),
    ]
    file: Annotated[Path, Argument("YAML, JSON, TOML, a shell script, or a Python script (TRL)", "FILE")]
    overrides: Annotated[tuple[str, ...], Argument("settings that were given on its command line", "key=value")] = ()
    output: Annotated[Path | None, Option("write it there instead of printing it", "YAML")] = None


def import_config(options: ImportOptions) -> int:
    """Print the config, or write it to --output; returns the exit code. Raises ConfigError."""
    file, output = options.file, options.output
    settings = read_settings(file, list(options.overrides))
    if other := _likelier_trainer(settings, options.trainer):
        raise ConfigError(f"{file} {other[1]}; its command: {COMMAND_NAME} import {other[0]} {shlex.quote(str(file))}")
    result = translate(settings, OTHER_TRAINERS[options.trainer])
    text = as_yaml(result, f"{file.name}, of {options.trainer}")
    is_shown = output is None and sys.stdout.isatty()  # the terminal shows them as comments
    warnings = [*result.warnings, *(note for note in result.notes if note[1] == SECRET)]
    for written, warning in () if is_shown else warnings:
        print(f"warning: {written}: {warning}", file=sys.stderr)
    if output is None:
        print(visible(text), end="")
        return 0
    if output.exists():
        raise ConfigError(f"--output {output} exists; name another file, or remove it")
    try:
        write_file(output, text)
    except OSError as error:
        raise ConfigError(f"cannot write --output {output}: {reason_of(error)}") from error
    left = sum(value == CHANGE_ME for value, _ in result.values.values())
    print(
        f"{output}: {counted(len(result.values), 'key')}, {left} of them {CHANGE_ME};"
        f" {counted(len(warnings), 'warning')}",
        file=sys.stderr,
    )
    print(f"next: {COMMAND_NAME} train {shlex.quote(str(output))} --dry-run", file=sys.stderr)
    return 0


def _likelier_trainer(settings: Settings, named: str) -> tuple[str, str] | None:
    """Finds the trainer whose keys the settings are, and says why; None: they may well be those of the trainer `named`."""
    known = {key.name: key for key in config_keys(Config)}
    counts = {
        name: sum(trainer.rule(key, known) is not None for key in trainer.named(settings)[0])
        for name, trainer in OTHER_TRAINERS.items()
    }
    best = max(counts, key=lambda name: counts[name])
    if counts[best] - counts[named] <= len(settings) / 4:
        return None
    return best, f"is of {best}: of its {len(settings)} keys {counts[best]} are {best}'s, and {counts[named]} {named}'s"


# -- where a key of another trainer is here: for the message about an unknown key ------------------------------------------

MAX_HINTS = 5
VERL_PREFIX = "actor_rollout_ref."
SECTIONS_OF = {"actor_rollout_ref": "verl", "worker": "easyr1", "orchestrator": "prime-rl"}
SECTIONS_OF |= dict.fromkeys(("grpo", "loss_fn"), "nemo-rl")
SECTIONS = ("data", "algorithm", "critic", "trainer", "reward_model")  # of both programs


def explained(value: Any, key: str) -> str:
    """Explains the keys below an unknown one, if its value is a table; else ""."""
    below = flat(value, f"{key}.") if isinstance(value, dict) else {}
    return "; ".join(f"{name}: {hint}" for name in list(below)[:MAX_HINTS] if (hint := known_elsewhere(name)))


MEANT = "did you mean"  # how a key of ours that lacks its section is announced
SAME_NAME = "there is"  # how a mere namesake in another section is announced


def known_elsewhere(key: str) -> str | None:
    """Explains another trainer's key, or a key in another section. None: no explanation is known.

    A key may be written as there (`actor_rollout_ref.actor.clip_ratio`, `learning_rate`) or below a section of ours
    (`actor.lr`, `algorithm.beta`): then its last part counts.
    """
    if key in SECTIONS_OF:
        return f"`grpo-megatron import {SECTIONS_OF[key]} FILE` writes a config of {SECTIONS_OF[key]} in this program's terms"
    names = [name.name for name in config_keys(Config)]
    places = {".".join(name.split(".")[:depth]): None for name in names for depth in range(1, name.count(".") + 2)}
    ours = sorted(
        (place for place in places if place.endswith(f".{key}")), key=lambda place: not place.startswith("actor")
    )
    if ours:  # without the section that it stands in
        return f"{MEANT} {' or '.join(map(repr, ours[:MAX_HINTS]))}?"
    local_key = key.removeprefix(VERL_PREFIX)
    for trainer in OTHER_TRAINERS.values():
        if trainer is TRL and local_key != key and local_key in names:  # verl's section, without a rule of its own
            break
        if trainer.name in ("slime", "miles") and "-" not in key:  # their flags without one are words of every trainer
            continue
        for name in dict.fromkeys([key, f"{ACTOR}{key.removeprefix('actor.')}", key.rpartition(".")[2]]):
            if name in trainer.rules and name not in SECTIONS:
                rule = trainer.rules[name]
                return (
                    f"{trainer.name}'s {name} is {rule.ours!r}"
                    if rule.ours
                    else f"{trainer.name}'s {name}: {rule.note}"
                )
    if local_key in names:
        return f"here it is {local_key!r}"
    section, _, leaf = key.rpartition(".")
    same = [name for name in names if section and name.endswith(f".{leaf}")]
    same = [name for name in same if name.startswith(f"{section.partition('.')[0]}.")] or same
    if 0 < len(same) <= 3:
        return f"{SAME_NAME} {' and '.join(map(repr, same))}"
    alike = with_words_of(leaf, names) if not section else []
    return f"{MEANT} {' or '.join(map(repr, alike[:MAX_HINTS]))}?" if alike else None


def with_words_of(key: str, names: Sequence[str]) -> list[str]:
    """The names whose last part has all words of a key: total_training_steps for total_steps. Those that begin alike first."""
    words = key.split("_")
    parts = {name: name.rpartition(".")[2].split("_") for name in names}
    return sorted((name for name in names if {*words} <= {*parts[name]}), key=lambda name: parts[name][0] != words[0])
