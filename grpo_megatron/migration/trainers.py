"""The trainers whose configs are read: a YAML table each (verl.yaml, ...), and functions for the keys that need others.

A function takes their value and all their settings, with their defaults. It returns our keys and values, or why there are none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from grpo_megatron.config.problems import CHANGE_ME
from grpo_megatron.config.section import ConfigKey
from grpo_megatron.config.tables import named_yaml

Settings = dict[str, Any]  # their keys -> values
Convert = Callable[[Any, Settings], "Mapping[str, Any] | str"]

ACTOR = "actor_rollout_ref.actor."
ALSO = ""  # in place of a key of ours: a warning beside the values
OFF: tuple[Any, ...] = (
    None,
    False,
    "",
    "none",
    "None",
    "no",
    [],
    {},
)  # values of a feature that is not used; 0 is equal to False
TABLES: tuple[Literal["none", "changes", "refused"], ...] = ("none", "changes", "refused")


class NotNeeded(str):
    """Why a value is not written, where the run is the same without it."""


@dataclass(frozen=True)
class Rule:
    """The translation of one key. `ours`: the key of the same meaning; None: there is none, and `note` says why.

    A note of the table `changes` is a warning: the run is another one, or `ours` is left to the user. One of the table
    `refused` is an error: nothing is written.
    """

    ours: str | None = None
    note: str = ""
    cases: Mapping[Any, Mapping[str, Any] | str] = field(default_factory=dict)  # value -> what is written for it
    convert: Convert | None = None
    table: Literal["none", "changes", "refused"] = "none"

    def apply(self, value: Any, settings: Settings) -> Mapping[str, Any] | str:
        """Returns our keys and values for a value of theirs, or why there are none."""
        if self.convert is not None:
            return self.convert(value, settings)
        if self.note:
            if str(self.ours).endswith("_files") and re.search("[.](jsonl?|parquet|csv)$", str(value)):
                return {str(self.ours): [value]}  # what the note says is of a data set of the Hub
            return NotNeeded(self.note) if self.table == "none" else self.note if value not in OFF else {}
        if value is None and self.cases:
            return {}
        same = self.cases.get("else", {str(self.ours): value})
        return self.cases.get(value, same) if isinstance(value, str | int | float) else same


@dataclass(frozen=True)
class OtherTrainer:
    """One trainer whose configs are read. A rule for `a.b` also holds for all keys below it that have no rule."""

    name: str
    rules: Mapping[str, Rule]
    defaults: Settings  # that trainer's defaults, where this program's differ
    implied: Settings  # our keys and values that hold for each run of that trainer
    renamed: Mapping[str, str]  # other names of their keys, and of the beginnings of keys
    prefixes: tuple[str, ...] = ()  # a key without a rule has our key's meaning if it is one after this is removed
    switches: tuple[str, ...] = ()  # of LoRA; one that is a table is set by the table's being there

    @classmethod
    def read(cls, name: str, converts: Mapping[str, tuple[str, Convert]], *prefixes: str) -> OtherTrainer:
        """Reads the table in `name`.yaml with these functions (their key -> our key, function). `like`: what it extends."""
        table = named_yaml(Path(__file__).parent, name, "trainer")
        if base := table.pop("like", None):
            first = named_yaml(Path(__file__).parent, base, "trainer")
            table = {part: {**first.get(part, {}), **table.get(part, {})} for part in {**first, **table}}
        rules = {theirs: Rule(ours) for theirs, ours in table["same"].items()}
        for theirs, cases in table["cases"].items():
            ours = next((key for case in cases.values() if isinstance(case, dict) for key in case), None)
            rules[theirs] = Rule(ours, cases=cases)
        for kind in TABLES:
            for theirs, note in table.get(kind, {}).items():
                ours, text = note if isinstance(note, list) else (None, note)
                rules[theirs] = Rule(ours, text, table=kind)
        for part, is_on in (("where", True), ("unless", False)):
            for switch, keys in table.get(part, {}).items():
                converts = {**converts, **{theirs: _only(ours, switch, is_on=is_on) for theirs, ours in keys.items()}}
        for switch, names in table.get("lora", {}).items():
            converts = {**converts, **_lora(switch, names, table.get("layers", {}))}
        rules |= {theirs: Rule(ours, convert=convert) for theirs, (ours, convert) in converts.items()}
        others = table.get("renamed", {}), prefixes, tuple(table.get("lora", {}))
        return cls(name, rules, table["defaults"], table["implied"], *others)

    def named(self, settings: Settings) -> tuple[Settings, dict[str, str]]:
        """Renames the settings to their present names; also returns present name -> name as it was given.

        A key that is there by both names keeps its earlier one, which no rule has.
        """

        def present(key: str) -> str:
            old = next((old for old in self.renamed if f"{key}.".startswith(f"{old}.")), None)
            return key if old is None else self.renamed[old] + key[len(old) :]

        as_given: dict[str, str] = {}
        for key in settings:
            name = present(key)
            as_given[key if name in settings or name in as_given else name] = key
        named = {name: settings[key] for name, key in as_given.items()}
        tables = (switch for switch in self.switches if any(f"{name}.".startswith(f"{switch}.") for name in named))
        return named | {switch: True for switch in tables if named.get(switch, {}) == {}}, as_given

    def rule(self, key: str, known: Mapping[str, ConfigKey]) -> Rule | None:
        """Finds the rule for their `key`; `known` are our keys. None: no key of that trainer that we know."""
        if key in self.rules:
            return self.rules[key]
        for prefix in self.prefixes:
            name = key.removeprefix(prefix)
            free = (parent for parent in known if isinstance(known[parent].default, dict))
            if name in known or any(name.startswith(f"{parent}.") for parent in free):
                return Rule(name)
        above = (key[: end.start()] for end in reversed(list(re.finditer("[.-]", key))))
        for rule, rest in ((self.rules[name], key[len(name) :]) for name in above if name in self.rules):
            ours = str(rule.ours)
            if ours in known and isinstance(known[ours].default, dict) and rest.startswith("."):
                return Rule(ours + rest)  # a key of a table that is free here, too
            if rule.note:
                return rule
        return None


def _lora(switch: str, names: Mapping[str, str], layers: Mapping[str, list[str]]) -> dict[str, tuple[str, Convert]]:
    """Rules for keys of LoRA (our name -> theirs), which count where their key `switch` is set. `layers`: as names of ours."""

    def rule(ours: str) -> tuple[str, Convert]:
        def convert(value: Any, settings: Settings) -> Mapping[str, Any] | str:
            if settings.get(switch) in OFF or value in OFF:
                return {} if settings.get(switch) in OFF else NotNeeded("off, as here")
            if ours == "dropout":
                return {"actor.lora.dropout": value, "actor.lora.mode": "split"}
            if ours == "exclude_modules" and "visual" in str(value):  # a vision tower has no adapters here
                value = [name for name in value if "visual" not in name] if isinstance(value, list) else []
            if isinstance(value, str) and ours.endswith("_modules") and re.fullmatch(r"[\w, ]+", value):
                value = [name.strip() for name in value.split(",")]
            if not isinstance(value, list):
                return {f"actor.lora.{ours}": value}
            without = ", ".join(one for one in value if layers.get(one) == [])
            also = {ALSO: f"{without}: no adapters here, where a model has such layers"} if without else {}
            return {f"actor.lora.{ours}": [name for one in value for name in layers.get(one, [one])], **also}

        return f"actor.lora.{ours}", convert

    return {
        switch: ("actor.lora.rank", lambda *_: NotNeeded("its other keys decide")),
        **{theirs: rule(ours) for ours, theirs in names.items()},
    }


def _only(ours: str | dict[str, Any], switch: str, *, is_on: bool) -> tuple[str, Convert]:
    """Takes a value where their key `switch` is set, or is not. `ours`: our key, or what is written where the value is set."""

    def convert(value: Any, settings: Settings) -> Mapping[str, Any] | str:
        if (settings.get(switch) not in OFF) != is_on:
            return NotNeeded(f"{switch} decides")
        return {ours: value} if isinstance(ours, str) else ours if value not in OFF else {}

    return next(iter([ours] if isinstance(ours, str) else ours)), convert


NAMES_A_MODEL = (
    "actor_rollout_ref.model.path",
    "worker.actor.model.model_path",
    "actor.model_name_or_path",
    "model_name_or_path",
    "model",
    "model.name",
)
TOWER = ("actor.vision.freeze_tower", "actor.vision.freeze_merger")
READS_IMAGES = re.compile(r"vl(?![a-z])", re.IGNORECASE)  # in the names of these models


def _of_images(*ours: str, lora: tuple[str, ...] = ()) -> tuple[str, Convert]:
    """Keys of a model that reads images, which a text model refuses. `lora`: switches of adapters, which are the decoder's."""

    def convert(value: Any, settings: Settings) -> Mapping[str, Any] | str:
        if not any(READS_IMAGES.search(str(settings.get(name))) for name in NAMES_A_MODEL):
            return NotNeeded(f"for a model that reads images (its name has VL): {', '.join(ours)}")
        if any(settings.get(switch) not in OFF for switch in lora):
            return NotNeeded("adapters are the decoder's alone, and the tower is frozen")
        return {} if value in (None, 0) and ours[0].startswith("data.") else dict.fromkeys(ours, value)

    return ours[0], convert


def as_list(value: Any) -> list[Any]:
    """Returns a list as it is, and a list of any other value."""
    return value if isinstance(value, list) else [value]


def _per_prompt(ours: str, group: str) -> tuple[str, Convert]:
    """Converts a number of samples to prompts of groups with the size of the setting `group`."""
    return ours, lambda value, settings: {ours: max(1, value // settings[group])}


def _lengths(response: str) -> tuple[str, Convert]:
    """Splits the tokens of prompt and response, where the setting `response` bounds the response."""

    def lengths(value: Any, settings: Settings) -> Mapping[str, Any] | str:
        tokens = settings.get(response)
        if not isinstance(tokens, int) or not 0 < tokens < value:
            return (
                f"prompt and response share {value} tokens there; here data.max_prompt_length bounds the prompt alone"
            )
        return {"data.max_prompt_length": value - tokens, "data.max_response_length": tokens}

    return "data.max_response_length", lengths


def _kl(coefficient: float, kind: str = "low_var_kl", *, in_loss: bool = True) -> Mapping[str, Any]:
    """Sets a penalty on the KL to the reference: in the loss, or in the rewards."""
    if coefficient and not in_loss:
        return {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": coefficient} | {
            "algorithm.kl_penalty": kind,
            "actor.use_kl_loss": False,
        }
    used = {"actor.kl_loss_coef": coefficient, "actor.kl_loss_type": kind} if coefficient else {}
    return {"actor.use_kl_loss": bool(coefficient), **used}


def _warm_up(value: Any, _: Settings) -> Mapping[str, Any] | str:
    return f"set it to {value:g} x the number of optimizer steps" if value else {}


def _sinks(value: Any, _: Settings) -> Mapping[str, Any]:
    known = ("console", "tensorboard", "wandb", "swanlab", "mlflow")
    return {"trainer.logger": ["jsonl", *(name for name in known if name in as_list(value))]}


# -- verl --------------------------------------------------------------------------------------------------------------


def _reward_function(value: Any, settings: Settings) -> Mapping[str, Any]:
    """Joins a file and a name. Modules are searched beside the YAML file, so the file can lie there.

    The function stays as it is: rewards/reward.py knows verl's.
    """
    name = settings.get("custom_reward_function.name") or "compute_score"
    module = str(value).rpartition("/")[2].removesuffix(".py")
    prefix = "custom_reward_function.reward_kwargs."
    kwargs = {key.removeprefix(prefix): item for key, item in settings.items() if key.startswith(prefix)}
    return {"reward.function": f"{module}:{name}", **{f"reward.kwargs.{key}": item for key, item in kwargs.items()}}


def _overlong(value: Any, settings: Settings) -> Mapping[str, Any]:
    switches = ("reward_model.overlong_buffer.enable", "reward_model.reward_kwargs.overlong_buffer_cfg.enable")
    return {"reward.overlong_buffer.len": value if any(map(settings.get, switches)) else None}


def _name(value: Any, settings: Settings) -> Mapping[str, Any]:
    """Sets the name, and the folder if there is none."""
    folder = {} if settings.get("trainer.default_local_dir") is not None else {"trainer.output_dir": f"outputs/{value}"}
    return {"trainer.experiment_name": value, **folder}


VERL_OBJECTIVES = {"k1": "sampled", "forward_kl_topk": "forward", "reverse_kl_topk": "reverse", "jsd_topk": "jsd"}


def _verl_teachers(value: Any, settings: Settings) -> Mapping[str, Any] | str:
    """Translates the section: the teachers, where it is enabled, their objective, and whether rewards count besides."""
    loss, section = "distillation.distillation_loss.", "distillation.teacher_model"
    mode, in_advantages = settings.get(f"{loss}loss_mode", "k3"), settings.get(f"{loss}use_policy_gradient", False)
    if not value:
        return {}
    if VERL_OBJECTIVES.get(mode) is None or in_advantages != (mode == "k1"):
        return f"loss_mode={mode} with use_policy_gradient={in_advantages} is not here; distillation.kl has what is"
    ours: dict[str, Any] = {"distillation.kl": VERL_OBJECTIVES[mode]}
    if mode != "k1":
        ours["distillation.top_k"] = settings.get(f"{loss}topk", 32)
    if mode == "jsd_topk":
        ours["distillation.beta"] = settings.get(f"{loss}jsd_beta", 0.5)
    coefficient = settings.get(f"{loss}distillation_loss_coef", 1.0)
    if not settings.get(f"{loss}use_task_rewards", True):
        ours["algorithm.adv_estimator"], coefficient = "zero", 1.0
    paths = {key: item for key, item in settings.items() if key.startswith(section) and key.endswith(".model_path")}
    paths = {key: item for key, item in paths.items() if item not in OFF}
    for key, path in paths.items():
        name = key.removesuffix(".model_path").removeprefix(section).removeprefix("s.") or "teacher"
        ours |= {f"teachers.{name}.path": path, f"teachers.{name}.coefficient": coefficient}
        if len(paths) > 1:
            ours |= {f"teachers.{name}.key": settings.get(key.replace("model_path", "key")) or name}
            ours["distillation.key"] = settings.get("distillation.teacher_key", "data_source")
    return ours


CORRECTION = "algorithm.rollout_correction."
VERL_LORA = ("actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.lora.rank")


def _verl_06_correction(value: Any, settings: Settings) -> Mapping[str, Any]:
    """verl 0.6: a switch, with the kind of weight, its bounds and what happens outside them apart."""
    high = settings.get("algorithm.rollout_is_threshold")
    if value in OFF or high is None:
        return {f"{CORRECTION}rollout_is": None}
    kind, low = (
        settings.get("algorithm.rollout_is_level", "token"),
        settings.get("algorithm.rollout_is_threshold_lower"),
    )
    ours = {"rollout_is": kind, "rollout_is_threshold": high}
    if settings.get("algorithm.rollout_is_mode") == "mask":
        ours |= {"rollout_is": "icepop", "rollout_is_threshold_low": low or 1.0 / high}
    return {f"{CORRECTION}{key}": item for key, item in ours.items()}


VERL = OtherTrainer.read(
    "verl",
    {
        f"{ACTOR}freeze_vision_tower": _of_images(*TOWER, lora=VERL_LORA),
        "actor_rollout_ref.rollout.limit_images": _of_images("data.max_images"),
        "actor_rollout_ref.rollout.engine_kwargs.vllm.limit_mm_per_prompt.image": _of_images("data.max_images"),
        f"{ACTOR}clip_ratio": (  # verl reads it where the two others are not set
            "actor.clip_ratio_low",
            lambda value, settings: {
                f"actor.{end}": value
                for end in ("clip_ratio_low", "clip_ratio_high")
                if settings.get(ACTOR + end) is None
            },
        ),
        f"{ACTOR}optim.lr_warmup_steps": (
            "actor.optim.lr_warmup_steps",
            lambda value, _: {"actor.optim.lr_warmup_steps": max(0, value)},
        ),
        f"{ACTOR}optim.lr_warmup_steps_ratio": ("actor.optim.lr_warmup_steps", _warm_up),
        "custom_reward_function.path": ("reward.function", _reward_function),
        "algorithm.rollout_is": (f"{CORRECTION}rollout_is", _verl_06_correction),
        "actor_rollout_ref.rollout.name": (
            "rollout.engine",
            lambda value, _: (
                {"rollout.engine": "vllm"} | ({} if value == "vllm" else {ALSO: "the engine here is vLLM"})
            ),
        ),
        "reward_model.overlong_buffer.len": ("reward.overlong_buffer.len", _overlong),
        "reward_model.reward_kwargs.overlong_buffer_cfg.len": ("reward.overlong_buffer.len", _overlong),
        "trainer.experiment_name": ("trainer.experiment_name", _name),
        "trainer.logger": ("trainer.logger", _sinks),
        "distillation.enabled": ("distillation.kl", _verl_teachers),
    },
    "actor_rollout_ref.",
    "",
)

# -- TRL ---------------------------------------------------------------------------------------------------------------

SCRIPT = "(script)."  # before the name of a function that the script itself defines
OVERLONG = "get_soft_overlong_punishment"  # of the rewards that TRL's command knows by name
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}


def _prompts(value: Any, settings: Settings) -> Mapping[str, Any] | str:
    """Prompts per batch of rollouts. The launcher knows the number of processes; `num_processes=N` behind FILE tells it."""
    if settings.get("generation_batch_size"):
        return {}
    batches = settings.get("steps_per_generation") or settings["gradient_accumulation_steps"]
    prompts = value * batches / settings["num_generations"]
    if isinstance(processes := settings.get("num_processes"), int):
        return {"data.train_batch_size": max(1, int(processes * prompts))}
    return (
        f"it counts prompts: number of processes x {value} x {batches} samples / {settings['num_generations']} per prompt ="
        f" processes x {prompts:g}; give num_processes=N behind FILE"
    )


def _mini_batch(_: Any, settings: Settings) -> Mapping[str, Any] | str:
    """Prompts per optimizer step, where a batch of rollouts has several steps."""
    samples = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"]
    prompts = samples / settings["num_generations"]
    if isinstance(processes := settings.get("num_processes"), int):
        return {"actor.ppo_mini_batch_size": max(1, int(processes * prompts))}
    return f"prompts per optimizer step: number of processes x {prompts:g}; give num_processes=N behind FILE"


def _generation_batch(value: Any, settings: Settings) -> Mapping[str, Any]:
    mini = _mini_batch(value, settings)
    also = {ALSO: f"actor.ppo_mini_batch_size has {mini}"} if isinstance(mini, str) else mini
    return {"data.train_batch_size": max(1, value // settings["num_generations"]), **also}


def _epsilon(value: Any, settings: Settings) -> Mapping[str, Any]:
    ends = {"actor.clip_ratio_low": value}
    return ends if settings.get("epsilon_high") is not None else {**ends, "actor.clip_ratio_high": value}


CORRECTIONS = {"token_truncate": "token", "sequence_truncate": "sequence"}  # their modes that are weights: ours


def _correction(value: Any, settings: Settings) -> Mapping[str, Any] | str:
    if not settings.get("vllm_importance_sampling_correction", True):
        return {}
    if value == "sequence_mask":  # sequences above the cap leave the loss; here its denominators, too
        return {
            f"{CORRECTION}rollout_is": None,
            f"{CORRECTION}rollout_rs": "sequence",
            f"{CORRECTION}rollout_rs_threshold": settings.get("vllm_importance_sampling_clip_max", 3.0),
            f"{CORRECTION}rollout_rs_threshold_low": settings.get("vllm_importance_sampling_clip_min") or 1e-6,
        }
    is_known = value in CORRECTIONS
    return {f"{CORRECTION}rollout_is": CORRECTIONS[value]} if is_known else f"{CORRECTION}rollout_is: icepop is near"


def _cap(value: Any, settings: Settings) -> Mapping[str, Any]:
    mode = settings.get("vllm_importance_sampling_mode", "sequence_mask")
    is_weight = settings.get("vllm_importance_sampling_correction", True) and mode in CORRECTIONS
    return {f"{CORRECTION}rollout_is_threshold": value} if is_weight else {}


LOSS_TYPES = {
    "grpo": {"actor.loss_agg_mode": "seq-mean-token-mean"},
    "bnpo": {"actor.loss_agg_mode": "token-mean"},
    "dapo": {"actor.loss_agg_mode": "token-mean"},
    "dr_grpo": {"actor.loss_agg_mode": "seq-mean-token-sum-norm"},
    "cispo": {"actor.loss_mode": "cispo"},
    "sapo": {"actor.loss_mode": "sapo"},
    "vespo": {
        "actor.loss_mode": "vespo",
        ALSO: "W has the correction's weights there; here with rollout_correction.bypass_mode=true and rollout_is=null",
    },
}


def _loss_type(value: Any, settings: Settings) -> Mapping[str, Any] | str:
    """Sets the loss. With a ratio for each sequence only the mean over responses is here, and TRL has the others, too."""
    if settings.get("importance_sampling_level") != "sequence" or value == "grpo":
        return LOSS_TYPES.get(value, "this loss is not here")
    if value == "luspo":
        return {"actor.loss_agg_mode": "seq-mean-token-sum"}
    why = "with importance_sampling_level=sequence every response counts alike here (GSPO); TRL weighs it by its length"
    return {
        **LOSS_TYPES["grpo"],
        ALSO: why if "loss_agg_mode" in str(LOSS_TYPES.get(value)) else f"{value} has no sequence ratio here",
    }


def _loggers(**switches: str) -> dict[str, tuple[str, Convert]]:
    """Adds each tracker (name=their key) that a run uses."""

    def convert(_: Any, settings: Settings) -> Mapping[str, Any]:
        return _sinks(["console", *(name for name, key in switches.items() if settings.get(key) not in OFF)], {})

    return dict.fromkeys(switches.values(), ("trainer.logger", convert))


def _schedule(value: Any, settings: Settings) -> Mapping[str, Any] | str:
    name = str(value).rpartition(".")[2].lower()
    return {"actor.optim.lr_decay_style": SCHEDULES[name]} if name in SCHEDULES else "constant, linear, cosine, WSD"


def _betas_of(first: str, second: str, *switches: str) -> tuple[str, Convert]:
    def convert(_: Any, settings: Settings) -> Mapping[str, Any] | str:
        if any(settings.get(switch) in OFF for switch in switches):
            return NotNeeded(f"{switches[0]} decides")
        return {"actor.optim.betas": [settings.get(first, 0.9), settings.get(second, 0.999)]}

    return "actor.optim.betas", convert


def _epochs(value: Any, settings: Settings) -> Mapping[str, Any] | str:
    if settings.get("max_steps", -1) > 0:
        return {}
    whole = int(value) == value and value >= 1
    return {"trainer.total_epochs": int(value)} if whole else "set trainer.total_training_steps"


def _reward_funcs(value: Any, settings: Settings) -> Mapping[str, Any] | str:
    """Names as `trl grpo` reads them: functions of trl.rewards, or a dotted path. rewards/reward.py knows how to call them."""
    names = [str(name) for name in as_list(value)]
    if own := [name for name in names if name.startswith(SCRIPT)]:
        own_names = " and ".join(name[len(SCRIPT) :] for name in own)
        return f"functions of a script that trains cannot be imported: move {own_names} to another module"
    if OVERLONG in names:
        return f"reward.overlong_buffer.len=256 is {OVERLONG}; name the other functions as reward.components"
    functions = [name.rpartition(".") if "." in name else ("trl.rewards", ".", name) for name in names]
    weights = settings.get("reward_weights")
    is_apart = settings.get("multi_objective_aggregation") == "normalize_then_sum"
    if len(functions) == 1 and not weights:
        return {"reward.function": f"{functions[0][0]}:{functions[0][2]}"}
    if not isinstance(weights, list) or len(weights) != len(functions):
        weights = [1.0] * len(functions)
    parts = [
        {"name": name, "function": f"{module}:{name}", "weight": weight}
        for (module, _, name), weight in zip(functions, weights, strict=True)
    ]
    apart = {"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_keys": [name for *_, name in functions]}
    apart["algorithm.gdpo_reward_weights"] = weights
    return {"reward.components": parts, **(apart if is_apart else {})}


def _mixture(value: Any, settings: Settings) -> Mapping[str, Any] | str:
    """Names the mixture of policy and reference that becomes TRL's next reference: here the policy alone does."""
    if settings.get("sync_ref_model") in OFF:
        return NotNeeded("sync_ref_model decides")
    return {} if value == 1 else {ALSO: "the reference becomes the policy here, and a mixture of both there"}


TRL_CONVERTS: dict[str, tuple[str, Convert]] = {
    "(freeze_vision_tower)": _of_images(*TOWER, lora=("use_peft",)),  # no key of TRL, which trains all weights
    "per_device_train_batch_size": ("data.train_batch_size", _prompts),
    "generation_batch_size": ("data.train_batch_size", _generation_batch),
    "steps_per_generation": ("actor.ppo_mini_batch_size", _mini_batch),
    "tools": (
        "rollout.multi_turn.tools",
        lambda *_: {
            "rollout.multi_turn.environment": "tools",
            "rollout.multi_turn.tools": CHANGE_ME,
            ALSO: "rollout.multi_turn.tools: [module:function, ...]",
        },
    ),
    "beta": ("actor.kl_loss_coef", lambda value, _: _kl(value)),
    "ref_model_mixup_alpha": ("algorithm.iteration_steps", _mixture),
    "epsilon": ("actor.clip_ratio_low", _epsilon),
    "loss_type": ("actor.loss_agg_mode", _loss_type),
    "vllm_importance_sampling_mode": (f"{CORRECTION}rollout_is", _correction),
    "vllm_importance_sampling_clip_max": (f"{CORRECTION}rollout_is_threshold", _cap),
    "off_policy_mask_threshold": (
        f"{CORRECTION}rollout_rs",
        lambda value, _: {f"{CORRECTION}rollout_rs": "off_policy", f"{CORRECTION}rollout_rs_threshold": value},
    ),
    "reward_funcs": ("reward.components", _reward_funcs),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), _betas_of("adam_beta1", "adam_beta2")),
    "lr_scheduler_type": ("actor.optim.lr_decay_style", _schedule),
    "max_steps": (
        "trainer.total_training_steps",
        lambda value, _: {"trainer.total_training_steps": value} if value > 0 else {},
    ),
    "num_train_epochs": ("trainer.total_epochs", _epochs),
    "report_to": ("trainer.logger", lambda value, _: _sinks(["console", *as_list(value)], {})),
}


def _gkd_beta(value: Any, _: Settings) -> Mapping[str, Any]:
    ends = {0: "forward", 1: "reverse"}  # the limits, which TRL computes as such, too
    return {"distillation.kl": ends[value]} if value in ends else {"distillation.kl": "jsd", "distillation.beta": value}


def _gkd_length(value: Any, _: Settings) -> Mapping[str, Any]:
    return {
        "data.max_response_length": value,
        ALSO: "GKD's divergence is at temperature 1; here, and in GOLD, at rollout.temperature",
    }


GKD_CONVERTS: dict[str, tuple[str, Convert]] = {
    "beta": ("distillation.kl", _gkd_beta),
    "max_new_tokens": ("data.max_response_length", _gkd_length),
    "learning_rate": (
        "actor.optim.lr",
        lambda value, _: value if isinstance(value, str) else {"actor.optim.lr": value},
    ),
}
OF_GRPO = ("loss_type", "vllm_importance_sampling_mode")  # of TRL's keys
TRL = OtherTrainer.read("trl", TRL_CONVERTS)
TRL_GKD = OtherTrainer.read(
    "trl-gkd", {key: rule for key, rule in TRL_CONVERTS.items() if key not in OF_GRPO} | GKD_CONVERTS
)

# -- EasyR1, OpenRLHF and prime-rl -------------------------------------------------------------------------------------

EASYR1 = OtherTrainer.read(
    "easyr1",
    {
        "worker.actor.model.freeze_vision_tower": _of_images(*TOWER, lora=("worker.actor.model.lora.rank",)),
        "data.min_pixels": _of_images("data.image_min_pixels"),
        "data.max_pixels": _of_images("data.image_max_pixels"),
        "worker.rollout.limit_images": _of_images("data.max_images"),
        "algorithm.kl_coef": (
            "actor.kl_loss_coef",
            lambda value, settings: _kl(
                0 if settings["algorithm.disable_kl"] else value,
                settings["algorithm.kl_penalty"],
                in_loss=settings["algorithm.use_kl_loss"],
            ),
        ),
        "trainer.max_try_make_batch": (  # -1: no limit; refused here where no group is filtered
            "algorithm.filter_groups.max_num_gen_batches",
            lambda value, settings: (
                {"algorithm.filter_groups.max_num_gen_batches": value if value > 0 else 1_000_000}
                if settings["algorithm.online_filtering"]
                else {}
            ),
        ),
        "worker.actor.optim.lr_warmup_ratio": ("actor.optim.lr_warmup_steps", _warm_up),
        "trainer.logger": ("trainer.logger", _sinks),
    },
)


def _clip_range(value: Any, _: Settings) -> Mapping[str, Any]:
    return {"actor.clip_ratio_low": as_list(value)[0], "actor.clip_ratio_high": as_list(value)[-1]}


def _openrlhf_correction(value: Any, settings: Settings) -> Mapping[str, Any] | str:
    low, high = settings["algo.advantage.is_correction_threshold"]
    kind = settings["algo.advantage.is_correction_type"] if value else None
    bounds = {"rollout_is_threshold": high} | ({"rollout_is_threshold_low": low} if kind == "icepop" else {})
    kinds = {
        None: {"rollout_is": None},
        "tis": {"rollout_is": "token", **bounds},
        "icepop": {"rollout_is": kind, **bounds},
    }
    return {CORRECTION + key: item for key, item in kinds[kind].items()} if kind in kinds else f"{kind} is not here"


OPENRLHF = OtherTrainer.read(
    "openrlhf",
    {
        "data.max_images_per_prompt": _of_images("data.max_images"),
        **_loggers(wandb="logger.wandb.key", tensorboard="logger.tensorboard_dir"),
        "train.batch_size": _per_prompt("actor.ppo_mini_batch_size", "rollout.n_samples_per_prompt"),
        "data.max_len": _lengths("rollout.max_new_tokens"),
        "actor.eps_clip": ("actor.clip_ratio_low", _clip_range),
        "actor.eps_clip_low_high": ("actor.clip_ratio_low", _clip_range),
        "algo.kl.init_coef": (
            "actor.kl_loss_coef",
            lambda value, settings: _kl(
                value,
                {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}[settings["algo.kl.estimator"]],
                in_loss=settings["algo.kl.use_loss"],
            ),
        ),
        "algo.advantage.is_correction_enable": (f"{CORRECTION}rollout_is", _openrlhf_correction),
    },
)
PRIME_LOSSES = {  # their type: (ours, their keys of the bounds, their values)
    "ipo": ("ipo", ("eps", "eps"), (0.3, 0.3)),
    "kpop": ("kpop", ("kpop_threshold", "kpop_threshold"), (0.1, 0.1)),
    "icepop": ("icepop", ("icepop_ratio_low", "icepop_ratio_high"), (0.2, 5.0)),
    "default": ("dppo_tv", ("dppo_mask_low", "dppo_mask_high"), (0.2, 0.2)),
}


def _prime_loss(value: Any, settings: Settings) -> Mapping[str, Any] | str:
    if value not in PRIME_LOSSES:
        return "module:function of the user's own, on LossInputs (docs/extending.md)"
    loss, names, usual = PRIME_LOSSES[value]
    low, high = (settings.get(f"trainer.loss.{name}", one) for name, one in zip(names, usual, strict=True))
    if value == "ipo":  # the name before 2026-08-27
        low = high = settings.get("trainer.loss.ipo_threshold", high)
    if value == "icepop":
        low, high = round(1.0 - low, 12), round(high - 1.0, 12)
    ours = {"loss_mode": loss, "clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": None}
    correction = {f"{CORRECTION}bypass_mode": True, f"{CORRECTION}rollout_is": None}
    return {f"actor.{key}": item for key, item in ours.items()} | correction


PRIME_RL = OtherTrainer.read(
    "prime-rl",
    {
        "trainer.loss.type": ("actor.loss_mode", _prime_loss),
        "model.vlm.freeze_vision_encoder": _of_images(*TOWER),
        "orchestrator.algo.teacher.base_url": (
            "teachers.teacher.url",
            lambda value, _: {"teachers.teacher.url": as_list(value)[0] if value else None},
        ),
        "orchestrator.batch_size": _per_prompt("data.train_batch_size", "orchestrator.group_size"),
        "seq_len": _lengths("orchestrator.train.sampling.max_completion_tokens"),
    },
)

# -- slime, Miles and NeMo-RL ------------------------------------------------------------------------------------------

KL_KINDS = {"k1": "kl", "k2": "mse", "k3": "low_var_kl", "low_var_kl": "low_var_kl"}


def _slime_clip(value: Any, settings: Settings) -> Mapping[str, Any]:
    low = "cispo_clip_ratio_low" if settings.get("advantage-estimator") == "cispo" else "clip_ratio_low"
    high = {} if settings.get("eps-clip-high") is not None else {"actor.clip_ratio_high": value}
    return {f"actor.{low}": value, **high}


def _slime_kl(value: Any, settings: Settings) -> Mapping[str, Any]:
    ours = dict(_kl(value if settings.get("use-kl-loss") else 0, KL_KINDS[settings.get("kl-loss-type", "k1")]))
    if ours["actor.use_kl_loss"] and settings.get("use-unbiased-kl"):
        ours["actor.use_unbiased_kl"] = True
    return ours


def _slime_correction(value: Any, settings: Settings) -> Mapping[str, Any]:
    bounds = {f"{CORRECTION}rollout_is_threshold": settings.get("tis-clip", 2.0)} if value else {}
    low = {ALSO: "weights below tis-clip-low are raised to it there"} if value and settings.get("tis-clip-low") else {}
    return {f"{CORRECTION}rollout_is": "token" if value else None, **bounds, **low}


MINI, BUCKET = "actor.ppo_mini_batch_size", "rollout.update_weights_bucket_megabytes"


def _slime_teacher(value: Any, settings: Settings) -> Mapping[str, Any] | str:
    if not value:
        return {}
    if settings.get("opd-type") != "megatron":
        return "the teacher is a server there: set teachers.NAME.path to its Hugging Face folder, or url"
    return {
        "teachers.teacher.path": settings.get("opd-teacher-load"),
        "teachers.teacher.coefficient": settings.get("opd-kl-coef", 1.0),
        "distillation.kl": "sampled",
        ALSO: "teachers.teacher.path is a Hugging Face folder here, and a Megatron checkpoint there",
    }


SLIME_CONVERTS: dict[str, tuple[str, Convert]] = {
    "global-batch-size": _per_prompt(MINI, "n-samples-per-prompt"),
    "num-steps-per-rollout": (MINI, lambda value, settings: {MINI: settings["rollout-batch-size"] // value}),
    "eval-prompt-data": ("data.val_files", lambda value, _: {"data.val_files": value[1::2]}),
    "eps-clip": ("actor.clip_ratio_low", _slime_clip),
    "kl-loss-coef": ("actor.kl_loss_coef", _slime_kl),
    "kl-coef": ("algorithm.kl_ctrl.kl_coef", lambda value, _: _kl(value, "kl", in_loss=False) if value else {}),
    "use-tis": (f"{CORRECTION}rollout_is", _slime_correction),
    "use-opd": ("distillation.kl", _slime_teacher),
    **dict.fromkeys(("adam-beta1", "adam-beta2"), _betas_of("adam-beta1", "adam-beta2")),
    "update-weight-buffer-size": (BUCKET, lambda value, _: {BUCKET: max(1, value >> 20)}),
    **_loggers(wandb="use-wandb", tensorboard="use-tensorboard", mlflow="use-mlflow"),
}


def _nemo_steps(value: Any, settings: Settings) -> Mapping[str, Any]:
    epochs = settings.get("grpo.max_num_epochs")
    is_unlimited = epochs is not None and value >= 1_000_000  # as in its example files
    return {"trainer.total_epochs": epochs} if is_unlimited else {"trainer.total_training_steps": value}


def _nemo_baseline(value: Any, settings: Settings) -> Mapping[str, Any]:
    if value and not settings.get("grpo.normalize_rewards", True):
        return {"algorithm.adv_estimator": "rloo"}
    also = {ALSO: "mean and deviation are of the group's other rewards there, of the whole group here"} if value else {}
    return {"algorithm.adv_estimator": "grpo", **also}


def _nemo_kl(value: Any, settings: Settings) -> Mapping[str, Any]:
    kind = KL_KINDS[settings.get("loss_fn.reference_policy_kl_type", "k3")]
    return _kl(value, kind, in_loss=not settings.get("loss_fn.use_kl_in_reward"))


def _nemo_correction(value: Any, settings: Settings) -> Mapping[str, Any] | str:
    names = (f"loss_fn.truncated_importance_sampling_{name}" for name in ("type", "ratio", "ratio_min"))
    kind, high, low = map(settings.get, names)
    kinds = {None: "token", "tis": "token", "icepop": "icepop"}
    if not value or kind not in kinds:
        return f"{kind} is not here" if value else {f"{CORRECTION}rollout_is": None}
    bounds = (
        {f"{CORRECTION}rollout_is_threshold": high} if high else {ALSO: "the weights have no bound there, and 2 here"}
    )
    bounds |= {f"{CORRECTION}rollout_is_threshold_low": low} if kind == "icepop" else {}
    return {f"{CORRECTION}rollout_is": kinds[kind], **bounds}


def _nemo_engines(value: Any, settings: Settings) -> Mapping[str, Any] | str:
    """Translates the resources of generation: nodes of several, or GPUs of one."""
    if settings.get("policy.generation.colocated.enabled", True):
        return NotNeeded("engine and policy share the GPUs")
    is_one, prefix = settings.get("cluster.num_nodes", 1) == 1, "policy.generation.colocated.resources."
    theirs, ours = ("gpus_per_node", "rollout.num_ranks") if is_one else ("num_nodes", "rollout.num_nodes")
    return {ours: settings.get(prefix + theirs) or 1}


def _nemo_async(value: Any, settings: Settings) -> Mapping[str, Any]:
    age = settings.get("grpo.async_grpo.max_trajectory_age_steps", 1)
    also = f"a sample is at most {age} steps old there, and always {age} here"
    return {"rollout.placement": "separate", "rollout.lag": age, ALSO: also} if value else {}


def _nemo_teacher(value: Any, settings: Settings) -> Mapping[str, Any]:
    parts = {"tensor": "tensor_model_parallel_size", "pipeline": "pipeline_model_parallel_size"}
    parts["expert"] = "expert_model_parallel_size"
    has_megatron = settings.get("teacher.megatron_cfg.enabled", settings.get("policy.megatron_cfg.enabled"))
    section = "teacher.megatron_cfg." if has_megatron not in OFF else "teacher.dtensor_cfg."
    sizes = [
        settings.get(section + (name if has_megatron not in OFF else f"{kind}_parallel_size"))
        for kind, name in parts.items()
    ]
    return {"teachers.teacher.path": value, "algorithm.adv_estimator": "zero", "actor.use_kl_loss": False} | {
        f"teachers.teacher.{name}": size for name, size in zip(parts.values(), sizes, strict=True) if size is not None
    }


def _nemo_teachers(value: Any, settings: Settings) -> Mapping[str, Any]:
    """Translates `on_policy_distillation`: the teachers by the names of agents, which are values of a column here."""
    prefix = "on_policy_distillation.teacher_model_by_agent_name."
    paths = {key.removeprefix(prefix): path for key, path in settings.items() if key.startswith(prefix)}
    if not value:
        return {}
    ours: dict[str, Any] = {"distillation.kl": "sampled", "algorithm.adv_estimator": "zero"}
    if len(set(map(str, paths.values()))) == 1:
        return {**ours, "teachers.teacher.path": next(iter(paths.values()))}
    of_column = {
        ALSO: "distillation.key is the column with the agent's name (agent_ref there)",
        "distillation.key": "agent",
    }
    return {**ours, **{f"teachers.{name}.path": path for name, path in paths.items()}, **(of_column if paths else {})}


NEMO_BETAS = [f"policy.megatron_cfg.optimizer.adam_beta{end}" for end in (1, 2)]
TOKENIZER = "model.tokenizer_path"
NEMO_RL = OtherTrainer.read(
    "nemo-rl",
    {
        "grpo.max_num_steps": ("trainer.total_training_steps", _nemo_steps),
        "grpo.async_grpo.enabled": ("rollout.lag", _nemo_async),
        "policy.generation.colocated.resources.num_nodes": ("rollout.num_nodes", _nemo_engines),
        "policy.generation.colocated.resources.gpus_per_node": ("rollout.num_ranks", _nemo_engines),
        "teacher.model_name": ("teachers.teacher.path", _nemo_teacher),
        "on_policy_distillation.enabled": ("distillation.kl", _nemo_teachers),
        "grpo.use_leave_one_out_baseline": ("algorithm.adv_estimator", _nemo_baseline),
        "loss_fn.reference_policy_kl_penalty": ("actor.kl_loss_coef", _nemo_kl),
        "loss_fn.use_importance_sampling_correction": (f"{CORRECTION}rollout_is", _nemo_correction),
        "policy.tokenizer.name": (
            TOKENIZER,
            lambda value, settings: {} if value == settings["policy.model_name"] else {TOKENIZER: value},
        ),
        "policy.train_global_batch_size": _per_prompt(MINI, "grpo.num_generations_per_prompt"),
        "policy.max_total_sequence_length": _lengths("policy.generation.max_new_tokens"),
        **dict.fromkeys(NEMO_BETAS, _betas_of(*NEMO_BETAS, "policy.megatron_cfg.enabled")),
        **_loggers(**{name: f"logger.{name}_enabled" for name in ("wandb", "tensorboard", "mlflow", "swanlab")}),
    },
)
SLIME, MILES = (OtherTrainer.read(name, SLIME_CONVERTS) for name in ("slime", "miles"))

OTHER_TRAINERS = {one.name: one for one in (VERL, TRL, TRL_GKD, EASYR1, OPENRLHF, PRIME_RL, NEMO_RL, SLIME, MILES)}
