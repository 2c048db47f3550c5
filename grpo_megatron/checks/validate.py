"""Validation: finds what is wrong before a process group, a model or an engine exists. Every rank runs it.

Each check is a small generator of problems, in the file of its topic. CHECKS lists them; all of them run, so that one
start shows every mistake. A section's own values are checked in `config/`. What is read from disk (`inputs.py`) goes
to the trainer in `Checked`, so that no file is read twice.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from grpo_megatron.checks import components, inputs, layout, machine, methods, models, resume, reward_call
from grpo_megatron.checks.components import CheckedEnvironment
from grpo_megatron.checks.inputs import RunRows
from grpo_megatron.checks.machine import is_auto_cpu
from grpo_megatron.checks.models import CRITIC, MAIN, OTHERS, ModelFolders
from grpo_megatron.checks.reward_call import RewardTrial
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.config.passthrough import transformer_problems
from grpo_megatron.config.problems import Problem, ProblemList, Problems, keys_of
from grpo_megatron.data.tokenizer import EndTokens, read_end_tokens
from grpo_megatron.exact.limits import exact_problems
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.heads.reward_folder import RewardFolder
from grpo_megatron.models.layers.precision import hardware_problems, precision_problems
from grpo_megatron.planning.layout import OVERRIDES, world_problems
from grpo_megatron.planning.parameters import RunModels
from grpo_megatron.planning.phases import phase_shortages
from grpo_megatron.planning.traffic import staging_shortages
from grpo_megatron.processes.variables import cache_problems, check_rank_variables
from grpo_megatron.rollout.build import engine_problems, exact_engine_problem


@dataclass(frozen=True)
class RunStart:
    """`problems`: those that the caller has found. `device`: bytes of --gpu.

    `wrong_keys`: keys of the file that cannot be read; the config has their defaults.
    """

    problems: Sequence[Problem | str] = ()
    device: float | None = None
    wrong_keys: Collection[str] = ()

    def knows(self, *keys: str) -> bool:
        """Says if all values of these keys or sections could be read. A wrong key may be a misspelt one of them."""
        return not any(_concerns(wrong, key) for wrong in self.wrong_keys for key in keys)


def _concerns(wrong: str, key: str) -> bool:
    is_part = f"{wrong}.".startswith(f"{key}.") or f"{key}.".startswith(f"{wrong}.")
    return is_part or bool(difflib.get_close_matches(wrong, [key], cutoff=0.8))


SHORTAGE_KEYS = (  # keys and sections that the arithmetic of memory reads
    *("model", "actor", "ref", "critic", "reward_model", "reward_models", "teachers", "rollout", "algorithm"),
    *("data.max_prompt_length", "data.max_response_length", "data.train_files", "data.val_files"),
    *("trainer.nnodes", "trainer.n_gpus_per_node", "trainer.device"),
)


@dataclass(frozen=True, kw_only=True)
class Checked(RunRows):
    """The results of validation that the trainer uses: rows, models, tokenizer, environment."""

    arch: Architecture
    has_weights: bool  # false only in a dry run
    models: RunModels
    reward_folder: RewardFolder | None = None  # reward_model.path
    reward_folders: dict[str, RewardFolder] = field(default_factory=dict)  # reward_models
    critic_folder: RewardFolder | None = None  # critic.path
    teachers: dict[str, Architecture] = field(default_factory=dict)  # by name
    scored_folder: RewardFolder | None = None  # model.path, where a scalar head is trained
    tokenizer: Any  # None only in a dry run for another machine
    end_tokens: EndTokens | None = None  # None only where `tokenizer` is
    environment: CheckedEnvironment | None = None  # rollout.multi_turn.environment
    episode: list[tuple[str, str]]  # (who, text) of one on a real row, if that environment was to be called
    reward_calls: list[RewardTrial]  # on real rows, if the rewards were to be called
    config: Config  # with the training steps, the tasks that were recognised, and the folders of the Hub's models

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes token ids, without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


class Validation:
    """State of the checks of a config for a world of `world_size` ranks.

    `dry_run`: the model folder may lack weights, and the machine Megatron-Core and vLLM. `elsewhere`: the plan is for
    another machine, so the tokenizer and data files may be missing on this one. `rehearsed`: look whether another run uses
    the output folder, and run the user's code, the reward functions and the environment's reset, on a row of the data, in a
    worker process; one process of a run is enough.
    """

    def __init__(
        self, config: Config, world_size: int, start: RunStart, *, dry_run: bool, elsewhere: bool, rehearsed: bool
    ) -> None:
        self.world_size, self.start = world_size, start
        self.dry_run, self.elsewhere, self.rehearsed = dry_run, elsewhere, rehearsed
        self.problems = ProblemList()
        self.problems.add(start.problems)
        self.failed: set[str] = set()  # names of checks with a problem, or left out
        recognised = components.with_recognised_tasks(config)
        self.config = config = models.with_hub_models(recognised, weights=not dry_run, shapes=elsewhere)
        self.folders = ModelFolders.read(config, self.problems)
        self.arch = self.folders.arch
        self.has_task = components.task_problem(config) is None
        self.has_weights = models.has_weights(config.model.path)
        self.tokenizer: Any = None
        self.end_tokens: EndTokens | None = None
        self.environment: CheckedEnvironment | None = None
        self.rows = RunRows()
        self.calls: list[RewardTrial] | None = None
        self.episode: list[tuple[str, str]] | None = None

    @property
    def training(self) -> int:
        """Counts the ranks that train."""
        return self.world_size - (0 if "placement" in self.failed else self.config.num_rollout_ranks)

    @property
    def num_steps_is_known(self) -> bool:
        """Says if the rows that total_epochs counts could be read, where it is set."""
        return bool(self.rows.num_trained) or self.config.trainer.total_epochs is None

    @property
    def memory_is_known(self) -> bool:
        """Says if all that the arithmetic of memory reads is right, and its verdict is not that of the plan."""
        configs = [(self.config, one.arch) for one in self.folders.beside.values()]
        for name, arch in self.folders.teachers.items():
            layout = self.config.teachers[name].layout(self.config.actor)
            configs.append((self.config.with_values({"actor": layout}), arch))
        others = (models.second_layout_problems(config, self.training, arch) for config, arch in configs)
        is_wanted = self.folders.are_complete and self.start.knows(*SHORTAGE_KEYS)
        return is_wanted and bool(self.problems.problems or not self.dry_run) and not any(map(any, others))

    def run(self, check: Check) -> None:
        """Gathers the problems of a check. It is left out where its inputs are wrong themselves."""
        count, is_right = len(self.problems.problems), False
        if self.failed.isdisjoint(check.needs) and check.when(self):
            self.problems.add(check.find(self) or (), *([check.key] if check.key else []))
            is_right = len(self.problems.problems) == count
        if not is_right:
            self.failed.add(check.name)

    def exact_engine_problems(self) -> Problems:
        """Checks `model.exact` against the engine and the rest of the config."""
        engine = exact_engine_problem(self.config.rollout.engine) if self.config.model.exact else None
        return exact_problems(self.config, self.training, self.arch, engine, elsewhere=self.dry_run)

    def engine_problems(self) -> Problems:
        """Checks the engine's options, for a run that samples."""
        replays, arch = self.config.actor.moe.route_replay == "engine", self.arch
        has_images, has_experts = bool(arch and arch.vision), bool(arch and arch.num_experts)
        return engine_problems(self.config.rollout, replays=replays, has_images=has_images, has_experts=has_experts)

    def check_weights(self) -> None:
        """Checks names and shapes of all tensors; a plan needs none."""
        policy = self.has_weights or not self.dry_run
        self.folders.check_weights(self.config, self.problems, policy=policy, elsewhere=self.elsewhere)

    def read_tokenizer(self) -> None:
        """Reads the tokenizer, its end tokens, and the environment that renders with it."""
        config, attempt = self.config, self.problems.attempt
        is_reported = self.arch is None and config.model.tokenizer_path is None  # the folder is missing
        if is_reported or (self.elsewhere and not inputs.has_tokenizer(config)):
            return
        self.tokenizer = attempt("model.tokenizer_path", inputs.read_tokenizer, config, self.arch)
        if self.tokenizer is None:
            return
        size = self.arch.vocab_size if self.arch else None
        self.end_tokens = attempt("model.path", read_end_tokens, self.tokenizer, config.model.path, size)
        if config.rollout.multi_turn.environment is not None:
            self.environment = attempt(
                "rollout.multi_turn", components.check_environment, config, self.tokenizer, self.end_ids
            )

    @property
    def end_ids(self) -> list[int]:
        """Returns the ids that end a response; none where they could not be read."""
        return self.end_tokens.ids if self.end_tokens else []

    def read_rows(self) -> None:
        """Reads the data files; without those that are missing on this machine, where the plan is for another one."""
        self.config = inputs.only_present(self.config) if self.elsewhere else self.config
        is_launcher = self.world_size > 1 and "RANK" not in os.environ  # its ranks measure all prompts
        read = self.config, self.problems, self.tokenizer, self.environment, self.end_ids
        self.rows = RunRows.read(*read, is_plan=self.dry_run or is_launcher)

    def count_steps(self) -> Problems:
        """Checks total_epochs and sets the number of steps."""
        yield from methods.epoch_problems(self.config, self.rows.num_trained)
        self.config = methods.with_total_steps(self.config, self.rows.num_trained)

    def call_rewards(self) -> None:
        """Calls the reward functions on rows of the data."""
        self.calls = self.problems.attempt("reward.function", reward_call.call_rewards, self.config, self.rows.examples)

    def ask_teachers(self) -> None:
        """Asks the servers of teachers."""
        if self.arch is not None:
            size = self.arch.vocab_size
            self.problems.attempt("teachers", reward_call.ask_teachers, self.config, self.tokenizer, size)

    def play_episode(self) -> None:
        """Plays the environment on a row of the data."""
        self.episode = self.problems.attempt(
            "rollout.multi_turn", reward_call.play_episode, self.config, self.rows.first_of_each
        )

    def checked(self) -> Checked:
        """Returns what was read. Raises ConfigError with every problem, one per line."""
        self.problems.raise_if_any()
        folders = self.folders
        assert self.arch is not None
        return Checked(
            **vars(self.rows),
            arch=self.arch,
            has_weights=self.has_weights,
            models=folders.models(self.config),
            reward_folder=folders.beside.get(MAIN),
            reward_folders={key.removeprefix(OTHERS): one for key, one in folders.rewards.items() if key != MAIN},
            critic_folder=folders.beside.get(CRITIC),
            teachers=folders.teachers,
            scored_folder=folders.scored,
            tokenizer=self.tokenizer,
            end_tokens=self.end_tokens,
            environment=self.environment,
            episode=self.episode or [],
            reward_calls=self.calls or [],
            config=self.config,
        )


class Check(NamedTuple):
    """One check: what it yields is wrong. It runs where no check that it `needs` has failed, and `when` is true.

    `key`: what a problem is about that names no key itself.
    """

    name: str
    find: Callable[[Validation], Iterable[Problem | str] | None]
    key: str = ""
    needs: tuple[str, ...] = ()
    when: Callable[[Validation], object] = lambda v: True


def _is_run(v: Validation) -> bool:
    return not v.dry_run


CHECKS = (  # in the order in which problems are found
    Check("placement", lambda v: layout.placement_problems(v.config, v.world_size)),
    Check("world", lambda v: world_problems(v.config, v.training, v.arch), needs=("placement",)),
    Check("healing", lambda v: layout.healing_problems(v.config)),
    Check("experts", lambda v: layout.engine_expert_problems(v.config, v.arch)),
    Check("routes", lambda v: layout.route_problems(v.config, v.arch), "actor.moe.route_replay"),
    Check("override", lambda v: transformer_problems(v.config.at(OVERRIDES)), OVERRIDES),
    Check("family", lambda v: layout.family_problems(v.config, v.arch)),
    Check("vision", lambda v: models.vision_problems(v.config, v.arch)),
    Check("lora", lambda v: layout.lora_problems(v.config, v.folders.lora_archs)),
    Check("batches", lambda v: layout.batch_problems(v.config)),
    Check("lengths", lambda v: layout.length_problems(v.config, v.arch)),
    Check("names", lambda v: components.name_problems(v.config)),
    Check("sources", lambda v: components.source_problems(v.config), when=lambda v: v.has_task),
    Check("streams", lambda v: components.stream_problems(v.config)),
    Check("score head", lambda v: models.score_head_problems(v.config)),
    Check("budget", lambda v: methods.budget_problems(v.config)),
    Check("rollout files", lambda v: methods.rollout_file_problems(v.config)),
    Check("shared prompts", lambda v: methods.sharing_problems(v.config, v.arch)),
    Check("environment", lambda v: components.environment_problems(v.config)),
    Check("output", lambda v: machine.output_problems(v.config, is_plan=v.dry_run)),
    Check("precision", lambda v: precision_problems(v.config, v.arch), "actor.megatron.fp8"),
    Check("exact", Validation.exact_engine_problems, "model.exact"),
    Check("engine", Validation.engine_problems, "rollout.engine", when=lambda v: v.config.has_rollouts),
    Check("needed keys", lambda v: inputs.missing_keys(v.config)),
    Check("models beside", lambda v: models.beside_problems(v.config, v.training, v.folders)),
    Check("rewards", lambda v: components.reward_name_problems(v.config)),
    Check("packages", lambda v: machine.package_problems(v.config), when=_is_run),
    Check("caches", lambda v: cache_problems(), when=_is_run),
    Check("devices", lambda v: machine.device_problems(v.config, v.world_size), when=_is_run),
    Check(
        "auto",
        lambda v: layout.cpu_engine_problems(v.config, v.arch),
        when=lambda v: _is_run(v) and is_auto_cpu(v.config),
    ),
    Check("hardware", lambda v: hardware_problems(v.config), "actor.megatron", when=_is_run),
    Check("weights", Validation.check_weights),
    Check("tokenizer", Validation.read_tokenizer),
    Check("rows", Validation.read_rows, when=lambda v: v.has_task and v.start.knows("data.task", "data.sources")),
    Check("epochs", Validation.count_steps),
    Check("method", lambda v: methods.method_problems(v.config)),
    Check("schedule", lambda v: methods.schedule_problems(v.config), when=lambda v: v.num_steps_is_known),
    Check(
        "resume", lambda v: resume.resume_problems(v.config), when=lambda v: v.num_steps_is_known and not v.elsewhere
    ),
    Check(
        "changed inputs",
        lambda v: resume.input_problems(v.config, prints=not v.dry_run, is_right=not v.problems.problems),
        when=lambda v: v.rehearsed and not (v.elsewhere or v.start.wrong_keys),
    ),
    Check(
        "reward calls",
        Validation.call_rewards,
        needs=("rewards",),
        when=lambda v: v.rehearsed and v.start.knows("data.task", "data.sources", "reward"),
    ),
    Check(
        "teachers' servers",
        Validation.ask_teachers,
        needs=("tokenizer", "method"),
        when=lambda v: v.rehearsed and not v.elsewhere and v.tokenizer is not None and v.start.knows("teachers"),
    ),
    Check(
        "episode",
        Validation.play_episode,
        when=lambda v: v.rehearsed and v.environment is not None and v.start.knows("rollout.multi_turn"),
    ),
    Check(
        "memory",
        lambda v: phase_shortages(
            v.config, v.training, v.folders.models(v.config), v.start.device, elsewhere=v.elsewhere
        ),
        "actor.megatron",
        needs=("placement", "world", "experts", "override"),
        when=lambda v: v.memory_is_known,
    ),
    Check(
        "host memory",
        lambda v: staging_shortages(v.config, v.folders.models(v.config).arch, v.training),
        "rollout.lag",
        needs=("placement", "world", "experts", "override"),
        when=lambda v: v.memory_is_known and not v.elsewhere,
    ),
)


def validate(
    config: Config,
    world_size: int,
    *,
    dry_run: bool = False,
    elsewhere: bool = False,
    rehearsed: bool = False,
    start: RunStart | None = None,
) -> Checked:
    """Runs all checks of CHECKS. The arguments are those of `Validation`. Raises ConfigError with every problem."""
    validation = Validation(
        config, world_size, start or RunStart(), dry_run=dry_run, elsewhere=elsewhere, rehearsed=rehearsed
    )
    for check in CHECKS:
        validation.run(check)
    checked = validation.checked()
    if not dry_run:
        reward_call.report_trials(checked.config, checked.reward_calls)
    if rehearsed and not dry_run:
        failing = [f"rollout.multi_turn: {text}" for who, text in checked.episode if who == "WARNING"]
        print(
            "".join(f"WARNING: {text}\n" for text in (*methods.suspicions(checked.config), *failing)),
            end="",
            flush=True,
        )
    return checked


OF_LAYOUT = (  # checks whose result depends on the layout
    *("placement", "world", "experts", "routes", "override", "family", "vision"),
    *("lora", "batches", "precision", "exact", "engine", "models beside"),
)


def layout_problems(config: Config, world_size: int) -> list[Problem]:
    """Returns what is wrong with the layout of a config whose other keys are right."""
    validation = Validation(config, world_size, RunStart(), dry_run=True, elsewhere=False, rehearsed=False)
    for check in CHECKS:
        if check.name in OF_LAYOUT:
            validation.run(check)
    return validation.problems.problems


FOR_STEPS = (  # checks of what a run with steps has, and a service has not
    *("sources", "needed keys", "rewards", "rows", "epochs", "method", "schedule", "resume", "changed inputs"),
    *("reward calls", "teachers' servers", "episode", "healing"),
)


def validate_service(config: Config, world_size: int) -> Checked:
    """Validates for `serve-training`: all but the data, the rewards and the schedule. Raises ConfigError."""
    validation = Validation(
        config, world_size, RunStart(list(service_problems(config))), dry_run=False, elsewhere=False, rehearsed=True
    )
    for check in CHECKS:
        if check.name not in FOR_STEPS:
            validation.run(check)
    return validation.checked()


def service_problems(config: Config) -> Problems:
    """Yields what a service cannot have: it trains a language model at temperature 1, in ranks that also sample."""
    k, actor = keys_of(config), config.actor
    if config.rollout.placement != "colocated":
        yield f"{k.rollout.placement}: a service's ranks train and sample in turn; leave it out"
    if config.rollout.temperature != 1:
        yield f"{k.rollout.temperature}: each sampling request has its own, and losses are at 1; leave it out"
    if actor.lora.dropout or actor.megatron.fp8.param_gather or actor.megatron.overlap_param_gather:
        yield (
            f"{k.actor.lora.dropout:key}, actor.megatron.fp8.param_gather and overlap_param_gather: models change places between"
            " passes, bit for bit; leave them out"
        )
    if actor.moe.route_replay != "none":
        yield f"{k.actor.moe.route_replay}: clients send no routes; leave it out"


def check_alone(config: Config) -> Checked:
    """Validates for a `Trainer` that was built by hand: in a notebook, or on a rank of torchrun. Raises ConfigError."""
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed\.")  # the user cannot act on them
    check_rank_variables()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))  # 1 too after an earlier Trainer of this process
    if world_size > 1:
        return validate(config, world_size, rehearsed=os.environ["RANK"] == "0")
    nodes, each = config.trainer.nnodes, config.trainer.n_gpus_per_node
    if nodes * each > 1:
        raise ConfigError(
            f"trainer.nnodes={nodes} x trainer.n_gpus_per_node={each} = {nodes * each} ranks, and a Trainer is one of them; set"
            " both to 1, or start the config with: grpo-megatron train CONFIG"
        )
    return validate(config, 1, rehearsed=True)
