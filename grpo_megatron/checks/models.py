"""The models of a run: what the config.json of each folder describes, whether the folders are complete, and how they go together.

Models beside the policy score: the critic, and the reward models. They read the policy's tokens in its layout, so lengths,
layout and vocabulary must fit. A policy may learn to score, too: then it has a scalar head.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.algo.losses import policy_losses, reads_reference
from grpo_megatron.config import ActorConfig, AlgorithmConfig, Config, ConfigError, ScoringModel, VisionConfig
from grpo_megatron.config.problems import Problem, ProblemList, Problems, keys_of, marked, written
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import read_architecture
from grpo_megatron.models.heads.reward_folder import HeadKind, RewardFolder, check_reward_weights, read_reward_folder
from grpo_megatron.models.lora.peft_folder import PeftFolder, is_peft_folder
from grpo_megatron.models.weights.hf_folder import check_hf
from grpo_megatron.planning.layout import world_problems
from grpo_megatron.planning.parameters import RunModels
from grpo_megatron.rewards.reward import rewards
from grpo_megatron.storage.hub import known_shape, model_folder
from grpo_megatron.untrusted import ReadError, read_json, special_file_in

MAIN, OTHERS, CRITIC, TEACHERS = "reward_model", "reward_models.", "critic", "teachers."  # keys of the config
HEAD_KINDS: dict[str, HeadKind] = {"response": "outcome", "step": "process"}  # LossFacts.scores -> kind of the folder

# -- The folders -------------------------------------------------------------------------------------------------------


def trains_scores(config: Config) -> bool:
    """Says if the model that is trained has a scalar head."""
    return bool(policy_losses.facts(config.actor.loss_mode).scores)


def has_critic(algorithm: AlgorithmConfig) -> bool:
    """Says if the estimator reads values."""
    return advantage_estimators.facts(algorithm.adv_estimator).needs_values


def scoring_models(config: Config) -> dict[str, ScoringModel]:
    """Lists the reward models with a folder, by key."""
    models = {MAIN: config.reward_model, **{f"{OTHERS}{name}": model for name, model in config.reward_models.items()}}
    return {key: model for key, model in models.items() if model.path is not None}


def read_model(path: Path, key: str = "model.path", family: str | None = None) -> Architecture:
    """Reads the architecture that `path`/config.json describes, of a folder of regular files. `family`: `model.family`."""
    if is_peft_folder(path):
        of_adapters = f"{key.removesuffix('path')}adapters" if key.startswith(TEACHERS) else "actor.lora.path"
        raise ConfigError(
            f"{key}={str(path)!r} has adapters only; set {key} to their base and {of_adapters} to this folder, or make a"
            f" whole model: grpo-megatron convert merge {shlex.quote(str(path))} OUT"
        )
    try:
        if not model_folder(path, weights=False).is_dir():
            raise ReadError("it is not a folder, and no id of the Hub")
        if problem := special_file_in(path):
            raise ReadError(f"it holds {problem}; remove it")
        return read_architecture(path, family)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{key}={str(path)!r}: {error}; set it to a folder of a supported model") from error


def read_head_folder(path: Path, kind: HeadKind, key: str, context: str = "") -> RewardFolder:
    """Reads the folder that `key` names, as a model with a scalar head of this kind. Raises ConfigError.

    `context`: why such a folder is asked for, if the key alone does not say so.
    """
    read_model(path, key)  # the checks of every model folder
    try:
        return read_reward_folder(path, kind)
    except ValueError as error:
        raise ConfigError(f"{key}={str(path)!r}{context}: {error}; set it to such a folder") from error


def has_weights(path: Path) -> bool:
    """Says if the folder has weight files, complete or not."""
    return (path / "model.safetensors.index.json").exists() or any(path.glob("*.safetensors"))


def check_complete(key: str, check: Callable[..., None], *folder: object) -> None:
    """Checks that the folder has exactly the tensors of the model, by name and shape. Raises ConfigError."""
    try:
        check(*folder)
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise ConfigError(f"{key}: {error}\n  (fetch the folder again, or set {key} to a complete one)") from error


def _check_adapters(folder: Path, arch: Architecture) -> None:
    PeftFolder(folder).check(arch)


def check_reference(config: Config, arch: Architecture) -> None:
    """Checks that `ref.path` has a model of the policy's architecture: the same computation with other weights."""
    path = config.ref.path
    assert path is not None
    reference = dataclasses.asdict(read_model(path, "ref.path", config.model.family))
    different = [
        f"{name} {reference[name]} against {value}"
        for name, value in dataclasses.asdict(arch).items()
        if name not in ("family", "max_position_embeddings") and reference[name] != value
    ]
    if different:
        raise ConfigError(
            f"ref.path={str(path)!r} is another architecture than model.path ({', '.join(different)}); the reference"
            " must be of the policy's: leave ref.path out, or set actor.use_kl_loss=false"
        )
    check_complete("ref.path", check_hf, path, arch)


def with_hub_models(config: Config, *, weights: bool, shapes: bool = False) -> Config:
    """Replaces ids of the Hub by the folders of their models, where they can be had (storage/hub.py).

    `shapes`: for a plan, missing folders by those of the same name that come with the package.
    """

    def local(path: Path | None) -> Path | None:
        try:
            shape = known_shape(path) if shapes and path else None
            return shape or (path and model_folder(path, weights=weights))
        except ReadError:  # `read_model` says why
            return path

    named = (
        *("model.path", "model.tokenizer_path", "ref.path", "critic.path", "reward_model.path"),
        *("actor.lora.path", "critic.lora.path"),
    )
    folders: dict[str, object] = {key: local(config.at(key)) for key in named}
    for section in ("reward_models", "teachers"):
        models = getattr(config, section).items()
        folders[section] = {name: model.with_values({"path": local(model.path)}) for name, model in models}
    return config.with_values(folders)


@dataclass(frozen=True)
class ModelFolders:
    """A folder that cannot be read is None, or absent from `beside`: reward models and critic, by their section."""

    arch: Architecture | None  # of the policy
    scored: RewardFolder | None  # model.path, where a scalar head is trained
    beside: dict[str, RewardFolder]
    are_complete: bool  # every folder that the config names could be read
    teachers: dict[str, Architecture] = dataclasses.field(default_factory=dict)  # by name

    @classmethod
    def read(cls, config: Config, problems: ProblemList) -> ModelFolders:
        """Reads each folder's config.json."""
        path, mode, scored = config.model.path, config.actor.loss_mode, None
        if scores := policy_losses.facts(mode).scores:
            why = f" with actor.loss_mode={mode}"
            scored = problems.attempt("model.path", read_head_folder, path, HEAD_KINDS[scores], "model.path", why)
            arch = scored.arch if scored is not None else None
        else:
            arch = problems.attempt("model.path model.family", read_model, path, "model.path", config.model.family)
        wanted: dict[str, tuple[Path | None, HeadKind]] = {
            key: (model.path, model.kind) for key, model in scoring_models(config).items()
        }
        wanted[CRITIC] = config.critic.path, "value"
        wanted = {key: one for key, one in wanted.items() if one[0] is not None}
        read = {
            key: problems.attempt(f"{key}.path", read_head_folder, folder, kind, f"{key}.path")
            for key, (folder, kind) in wanted.items()
            if folder is not None
        }
        beside = {key: folder for key, folder in read.items() if folder is not None}
        teachers = {}
        for name, teacher in config.local_teachers.items():
            key = f"{TEACHERS}{name}.path"
            of_teacher = arch  # the policy itself
            if teacher.path is not None:
                of_teacher = problems.attempt(key, read_model, teacher.path, key)
            if of_teacher is not None:
                teachers[name] = of_teacher
        are_complete = arch is not None and (len(beside), len(teachers)) == (len(wanted), len(config.local_teachers))
        return cls(arch, scored, beside, are_complete, teachers)

    @property
    def rewards(self) -> dict[str, RewardFolder]:
        """Returns the folders of `scoring_models`."""
        return {key: folder for key, folder in self.beside.items() if key != CRITIC}

    @property
    def lora_archs(self) -> dict[str, Architecture]:
        """Returns the models that may have adapters, by their section. A critic without a folder is the policy's model."""
        if self.arch is None:
            return {}
        return {"actor": self.arch, CRITIC: self.beside[CRITIC].arch if CRITIC in self.beside else self.arch}

    def models(self, config: Config) -> RunModels:
        """Returns what the folders describe. A critic without a folder is the policy without its head."""
        assert self.arch is not None
        critic = None
        if has_critic(config.algorithm):
            critic = self.beside[CRITIC].arch if CRITIC in self.beside else replace(self.arch, tied=True)
        rewards, teachers = tuple(folder.arch for folder in self.rewards.values()), tuple(self.teachers.values())
        return RunModels(self.arch, rewards, critic, has_head=self.scored is None, teachers=teachers)

    def check_weights(self, config: Config, problems: ProblemList, *, policy: bool, elsewhere: bool = False) -> None:
        """Checks names and shapes of all tensors. `policy`: of teachers and `model.path`, too. `elsewhere`: if they are here."""
        if self.arch is not None:
            if policy and self.scored is not None:
                problems.attempt("model.path", check_complete, "model.path", check_reward_weights, self.scored)
            elif policy:
                problems.attempt("model.path", check_complete, "model.path", check_hf, config.model.path, self.arch)
            if reads_reference(config.algorithm, config.actor) and config.ref.path is not None:
                problems.attempt("ref.path model.path", check_reference, config, self.arch)
        for name, arch in self.teachers.items():
            key, path = f"{TEACHERS}{name}.path", config.teachers[name].path
            if path is not None and ((policy and not elsewhere) or has_weights(path)):
                problems.attempt(key, check_complete, key, check_hf, path, arch)
            if (adapters := config.teachers[name].adapters) is not None:
                key = f"{TEACHERS}{name}.adapters"
                problems.attempt(key, check_complete, key, _check_adapters, adapters, arch)
        for key, folder in self.beside.items():
            if elsewhere and not has_weights(folder.path):
                continue
            problems.attempt(f"{key}.path", check_complete, f"{key}.path", check_reward_weights, folder)


def read_models(config: Config) -> RunModels:
    """Reads the models of a run from each folder's config.json. Raises ConfigError."""
    problems = ProblemList()
    folders = ModelFolders.read(config, problems)
    problems.raise_if_any()
    return folders.models(config)


# -- Models beside the policy ------------------------------------------------------------------------------------------

METRIC_NAMES = (
    *("score", "step_score", "steps", "agreement", "pairs", "loss", "accuracy", "margin", "grad_norm", "rule_reward"),
)


def beside_problems(config: Config, world_size: int, folders: ModelFolders) -> Problems:
    """Checks the critic and the reward models against the rest of the config."""
    yield from _reward_model_problems(config, folders.rewards)
    if has_critic(config.algorithm):
        yield from _critic_problems(config)
    for key, folder in folders.beside.items():
        if key == CRITIC and not has_critic(config.algorithm):
            continue
        named = f"{marked(f'{key}.path')}={str(folder.path)!r}"
        yield from _second_model_problems(config, world_size, folders.arch, folder.path, folder.arch, named)
    for name, arch in folders.teachers.items():
        path, named = config.teachers[name].path, marked(f"{TEACHERS}{name}")
        if path is not None:
            named = f"{marked(f'{TEACHERS}{name}.path')}={str(path)!r}"
            teacher, parts = config.teachers[name], (config, world_size, folders.arch, path, arch, named)
            layout = teacher.layout(config.actor) if teacher.tensor_model_parallel_size is not None else None
            yield from _second_model_problems(*parts, layout, f"{TEACHERS}{name}")
        yield from _teacher_problems(config, name, folders.arch, arch, named)
    if folders.arch is not None and config.rollout.top_k >= folders.arch.vocab_size:
        yield f"{keys_of(config).rollout.top_k} keeps all of the {folders.arch.vocab_size} ids; set a smaller number"
    objective, num_ids = config.distillation, folders.arch.vocab_size if folders.arch else None
    if config.teachers and objective.kl != "sampled" and num_ids is not None and objective.top_k >= num_ids:
        k = keys_of(config).distillation
        yield f"{k.top_k} are not fewer than the policy's {num_ids} ids; set it to 64, say, or to 0, for all of them"


def second_layout_problems(config: Config, world_size: int, arch: Architecture) -> Problems:
    """Yields what the layout does not allow of a model beside the policy, which is not in the engine."""
    problems = world_problems(config, world_size, arch)
    return (problem for problem in problems if not Problem.of(problem).keys[0].startswith("rollout."))


def _second_model_problems(
    config: Config,
    world_size: int,
    policy: Architecture | None,
    path: Path,
    arch: Architecture,
    named: str,
    layout: ActorConfig | None = None,
    key: str = "",
) -> Problems:
    """Checks a model that reads the policy's tokens. `named`: its key and folder. `layout`: its own, of the section `key`."""
    k, total = keys_of(config).data, config.data.max_prompt_length + config.data.max_response_length
    if total > arch.max_position_embeddings:
        yield (
            f"{k.max_prompt_length:key} + {k.max_response_length:key} = {total} exceed the max_position_embeddings"
            f" {arch.max_position_embeddings} of {named}; lower one of them"
        )
    if layout is None:
        of_policy = set(world_problems(config, world_size, policy))
        for problem in second_layout_problems(config, world_size, arch):
            if problem not in of_policy:
                yield f"{named} is cut in the policy's layout: {problem}"
    else:
        config = config.with_values({"actor": layout})
        for problem in second_layout_problems(config, world_size, arch):
            yield f"{named} has a layout of its own: {str(problem).replace('actor.megatron.', key + '.')}"
    if policy is not None:
        yield from _vocabulary_problems(config, policy, path, arch, named)


def _teacher_problems(
    config: Config, name: str, policy: Architecture | None, arch: Architecture, named: str
) -> Problems:
    """Checks a teacher, which scores every token that the policy may sample."""
    k, teacher = keys_of(config).data, config.teachers[name]
    if teacher.prompt_column is not None:
        prompt = teacher.max_prompt_length or config.data.max_prompt_length
        total = prompt + config.data.max_response_length
        if arch.max_position_embeddings is not None and total > arch.max_position_embeddings:
            yield (
                f"{named}: its prompts of {prompt} tokens ({marked(f'{TEACHERS}{name}.max_prompt_length')}) +"
                f" {k.max_response_length:key} = {total} exceed its max_position_embeddings"
                f" {arch.max_position_embeddings}; lower one of them"
            )
    if arch.vision is not None or (policy is not None and policy.vision is not None):
        yield f"{named}: distillation of models that read images is not made; take models that read text alone"
    if config.actor.share_prompts and arch.latent is not None:
        yield (
            f"{marked('actor.share_prompts')}=true is not made for the latent attention of {named}; set share_prompts=false"
        )


def _vocabulary_problems(
    config: Config, arch: Architecture, path: Path, of_other: Architecture, named: str
) -> Problems:
    """Checks that both have the same vocabulary: the model reads the policy's token ids unchanged."""
    policy, other = _vocabulary(config.model.tokenizer_path or config.model.path), _vocabulary(path)
    if policy is None or other is None:
        if of_other.vocab_size != arch.vocab_size:
            yield (
                f"{named} has {of_other.vocab_size} tokens and the policy {arch.vocab_size}, and one of them has no"
                " tokenizer.json to tell whether they are the same; put the tokenizer into both folders"
            )
        return
    for token, token_id in policy.items():
        if other.get(token) != token_id:
            yield (
                f"{named} has another tokenizer than the policy: token {token!r} is {token_id} to the policy and"
                f" {other.get(token, 'unknown')} to it; take a model of the policy's family"
            )
            return


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Reads token -> id of a folder's tokenizer.json; None without a readable one."""
    try:
        tokenizer = read_json(folder / "tokenizer.json")
        vocabulary = tokenizer["model"]["vocab"]
        if isinstance(vocabulary, list):  # unigram: [piece, score] in the order of ids
            vocabulary = {piece: token_id for token_id, (piece, _) in enumerate(vocabulary)}
        return {**vocabulary, **{added["content"]: added["id"] for added in tokenizer.get("added_tokens", ())}}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _critic_problems(config: Config) -> Problems:
    k, algorithm, critic = keys_of(config), config.algorithm, config.critic
    if critic.lam_alpha is not None and algorithm.lam != AlgorithmConfig().lam:
        yield (
            f"{k.critic.lam_alpha} gives each response a lambda by its length, and {k.algorithm.lam} gives all the same; set"
            " one of them (critic.lam is that of the value's targets)"
        )
    total = config.trainer.total_training_steps
    for key, steps in (
        (k.trainer.critic_warmup, config.trainer.critic_warmup),
        (k.critic.pretrain_steps, critic.pretrain_steps),
    ):
        if steps >= total > 0:
            yield (
                f"{key} leaves no step of {k.trainer.total_training_steps} to train the policy; set it to {total - 1} or less"
            )
    if algorithm.rollout_correction.rollout_rs == "off_policy":
        yield (
            f"{k.algorithm.rollout_correction.rollout_rs} drops responses of negative advantage, and"
            f" {k.algorithm.adv_estimator!r} computes advantages per token, after the correction; set rollout_rs=token,"
            " sequence or geometric"
        )


def _reward_model_problems(config: Config, folders: dict[str, RewardFolder]) -> Problems:
    """Checks the reward models. `folders`: those of `scoring_models` that can be read."""
    k, algorithm, models = keys_of(config), config.algorithm, scoring_models(config)
    for name, model in config.reward_models.items():
        key = marked(f"{OTHERS}{name}")
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name) or name in METRIC_NAMES:
            yield (
                f"{key}: the name is part of metric names (reward_model/{name}/score/mean); use letters, digits, - and _,"
                f" beginning with a letter, and none of {', '.join(METRIC_NAMES)}"
            )
        if model.path is None:
            yield f"{key}.path is not set; set it to the folder of a reward model, or leave the model out"
    if not models:
        return
    for filter_key, is_on in (
        (k.algorithm.filter_groups.enable, algorithm.filter_groups.enable),
        (k.algorithm.replay.ratio, algorithm.replay.ratio > 0),
    ):
        if is_on and not config.has_rule:  # nothing is known of a group when it is sampled
            yield (
                f"{filter_key:key} compares rewards while responses are sampled, and the reward models score them later; set"
                f" {k.reward.function:key}, whose reward is then compared, or switch it off"
            )
    if algorithm.adv_estimator == "remax":
        yield (
            f"{k.algorithm.adv_estimator!r} needs the reward of a greedy response, and a reward model scores only the sampled"
            " responses; set another estimator, or leave the reward models out"
        )
    has_steps = any(model.kind == "process" for model in models.values())
    function = config.reward.function or ""
    rule_steps = config.reward_model.combine == "add" and (":" in function or rewards.facts(function).gives_steps)
    if algorithm.adv_estimator == "grpo_process" and not has_steps and not rule_steps:
        yield (
            f"{k.algorithm.adv_estimator!r} needs rewards of single steps, and an outcome reward model scores each response"
            " as a whole; set reward_model.kind=process with such a model, or another estimator"
        )
    if has_steps and config.rollout.multi_turn.environment is not None:
        yield (
            f"{k.rollout.multi_turn.environment!r}: a process reward model scores the steps of one answer, and here"
            " observations are between them; use kind=outcome"
        )
    if MAIN in models and algorithm.iteration_steps is not None:
        yield from _learning_problems(config)
    for key, folder in folders.items():
        steps = algorithm.iteration_steps if key == MAIN else None
        if not folder.has_head and not (steps and config.reward_model.start_iteration):
            remedy = "set it to a folder with a trained head"
            if key == MAIN:
                remedy = f"set {k.algorithm.iteration_steps:key}, or a folder with a trained head"
            if steps:
                start = f"{k.reward_model.start_iteration:key}=1"
                remedy = f"set {start} (the reward function alone rewards the first iteration)"
            yield (
                f"{marked(f'{key}.path')}={str(folder.path)!r} is a language model, whose new head scores every response 0"
                f" until trained; {remedy}"
            )


def _learning_problems(config: Config) -> Problems:
    """Checks a reward model that learns: it needs pairs, and some step must use it."""
    k, model, steps = keys_of(config), config.reward_model, config.algorithm.iteration_steps
    assert steps is not None
    if config.rollout.n == 1:
        yield f"{k.rollout.n}: {k.reward_model.path:key} learns from pairs of one prompt's samples; set rollout.n=2 or more"
    if model.kind == "process":
        yield (
            f"{k.reward_model.kind} with {k.algorithm.iteration_steps:key}: it would learn from pairs of whole responses,"
            " which is for kind=outcome; leave algorithm.iteration_steps out, or put it into reward_models, where it is frozen"
        )
    total = config.trainer.total_training_steps
    if total and model.start_iteration * steps >= total:
        yield (
            f"{k.reward_model.start_iteration} x {k.algorithm.iteration_steps} = {model.start_iteration * steps} steps leave"
            f" none of {k.trainer.total_training_steps} to the reward model; lower one, or train longer"
        )
    length = config.data.max_prompt_length + config.data.max_response_length
    if config.actor.ppo_max_token_len_per_gpu < 2 * length:
        yield (
            f"{k.actor.ppo_max_token_len_per_gpu} is less than a pair of full sequences, 2 x {length} (a pair is never"
            f" split); set it to {2 * length} or more"
        )


# -- A policy that reads images ----------------------------------------------------------------------------------------


def vision_problems(config: Config, arch: Architecture | None) -> Problems:
    """Checks `actor.vision` and what a model that reads images excludes (data.image_*: inputs.py)."""
    k, vision = keys_of(config), config.actor.vision
    if arch is None:
        return
    if arch.vision is None:
        for name, field in VisionConfig.model_fields.items():
            if (value := getattr(vision, name)) != field.default:
                key = f"{marked(f'actor.vision.{name}')}={written(value)}"
                yield f"{key}, but this model ({arch.family}) reads no images; leave it out, or set another model.path"
        return
    images, remedy = f"this model ({arch.family}) reads images", "or set a model.path that reads text alone"
    if config.actor.megatron.context_parallel_size > 1:
        yield (
            f"{k.actor.megatron.context_parallel_size}: {images}, and Megatron-Core would give each rank's part of a sequence"
            " the M-RoPE angles of other tokens; set it to 1"
        )
    graphs = {
        key: value for key, value in config.actor.megatron.override_transformer_config.items() if "cuda_graph" in key
    }
    if arch.vision.levels and any(graphs.values()):
        yield (
            f"{marked('actor.megatron.override_transformer_config')}={graphs}: {images}, and adds them behind"
            f" {arch.vision.levels} layers (DeepStack), which a CUDA graph of a layer would leave out; leave it out"
        )
    trained = [name for name in ("freeze_tower", "freeze_merger") if not getattr(vision, name)]
    if config.actor.lora.rank is not None and trained:
        yield (
            f"{k.actor.lora.rank} trains adapters of the decoder alone, and {marked(f'actor.vision.{trained[0]}')}=false"
            " weights of the tower; set it to true, or leave actor.lora out"
        )
    if config.actor.megatron.overlap_param_gather and trained:
        yield (
            f"{k.actor.megatron.overlap_param_gather} gathers weights in the order of the forward pass, which leaves the"
            f" trained tower out where a micro-batch has no image ({marked(f'actor.vision.{trained[0]}')}=false); set"
            " overlap_param_gather=false"
        )
    if vision.lr is not None and config.actor.optim.lr == 0:
        yield f"{k.actor.vision.lr} has the schedule of {k.actor.optim.lr}, scaled, which 0 cannot be; set actor.optim.lr"
    if config.rollout.quantization is not None:
        yield f"{k.rollout.quantization}: {images}, and vLLM would quantize the tower, too; leave rollout.quantization out"
    if has_critic(config.algorithm):
        yield f"{k.algorithm.adv_estimator!r} needs a critic, which has no images, and {images}; set grpo, {remedy}"
    for key in scoring_models(config):
        yield f"{marked(f'{key}.path')}: a reward model has no images, and {images}; leave it out, {remedy}"


# -- A policy that learns to score: a reward model from pairs, or a process reward model from step labels --------------


def score_head_problems(config: Config) -> Problems:
    """Checks the loss of a scalar head against the rest of the config."""
    k, actor, algorithm, data = keys_of(config), config.actor, config.algorithm, config.data
    facts, estimator = policy_losses.facts(actor.loss_mode), advantage_estimators.facts(algorithm.adv_estimator)
    if estimator.scores and estimator.scores != facts.scores:
        losses = " or ".join(policy_losses.names_with(scores=estimator.scores))
        yield (
            f"{k.algorithm.adv_estimator} labels what a scalar head scores, and {k.actor.loss_mode} does not read it; set"
            f" loss_mode={losses}, or another estimator"
        )
    if not facts.scores:
        return
    estimators = " or ".join(advantage_estimators.names_with(scores=facts.scores))
    excluded = {  # what the run cannot have, and why
        f"{k.algorithm.adv_estimator} has no labels for it; set {estimators}": estimator.scores != facts.scores,
        f"it generates no responses; set {k.algorithm.source:key}=file, with rows in data.train_files": (
            algorithm.source != "file"
        ),
        f"it cannot answer {k.data.val_files:key} or {k.data.val_tasks:key}; leave them out, and set"
        " data.val_loss_files to held-out rows": data.val_files or data.val_tasks,
        f"it cannot learn from {k.sft.steps}; set sft.steps=0": config.sft.steps,
        f"there is no KL to a reference; set {k.actor.use_kl_loss:key}=false and algorithm.use_kl_in_reward=false": (
            actor.use_kl_loss or algorithm.use_kl_in_reward
        ),
        f"it has no entropy; set {k.actor.entropy_coeff:key}=0": actor.entropy_coeff,
        f"{k.reward_model.path:key} or reward_models give rewards to sampled responses; leave them out": config.reward_paths,
        f"it reads whole sequences on each rank; set {k.actor.megatron.context_parallel_size:key}=1": (
            actor.megatron.context_parallel_size > 1
        ),
        f"steps are of one answer, not of several turns; leave {k.rollout.multi_turn.environment:key} out": (
            facts.scores == "step" and config.rollout.multi_turn.environment
        ),
    }
    for reason, is_set in excluded.items():
        if is_set:
            yield f"{k.actor.loss_mode} trains a model that scores, without a head over the vocabulary: {reason}"
