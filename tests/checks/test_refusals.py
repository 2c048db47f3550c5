"""Combinations of keys that could not mean what they say are refused: one message, with the reason and the remedy.

CASES has a line for each: overrides of a config of a plain GRPO run => part of the message. The names of this module are a
user's own functions, which are checked by the facts that they declare, like the registered ones.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from grpo_megatron.algo.advantages import Advantages, advantage_estimators
from grpo_megatron.algo.losses import (
    LossInputs,
    LossMetrics,
    is_corrected,
    needs_old_logprobs,
    policy_losses,
    reads_reference,
)
from grpo_megatron.checks.components import (
    check_environment,
    environment_problems,
    name_problems,
    reward_name_problems,
)
from grpo_megatron.checks.layout import batch_problems, placement_problems
from grpo_megatron.checks.methods import (
    method_problems,
    rollout_file_problems,
    schedule_problems,
    sharing_problems,
    suspicions,
)
from grpo_megatron.checks.models import ModelFolders, beside_problems, score_head_problems, trains_scores
from grpo_megatron.cli.config_file import load_config, reward_defaults
from grpo_megatron.config import ActorConfig, AlgorithmConfig, Config, ConfigError
from grpo_megatron.environments.environment import ChatMessage, Environment, Step
from grpo_megatron.planning.layout import world_problems
from grpo_megatron.starting.generated import STEP_SEPARATOR
from grpo_megatron.types import GroupTable
from tests.runs import texts

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BASE = "model: {path: m}\ndata: {task: arithmetic}\ntrainer: {total_training_steps: 100}\n"

# -- a user's own functions and environments ---------------------------------------------------------------------------


@policy_losses.declare(
    is_likelihood=True, paired=True, needs_reference=True, aggregation=("seq-mean-token-mean", "seq-mean-token-sum")
)
def preference(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, LossMetrics]:
    raise NotImplementedError


def plain_loss(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, LossMetrics]:
    raise NotImplementedError


@advantage_estimators.declare(compares_group=True, makes_pairs=True, ignores_token_penalties=True)
def pairs(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    raise NotImplementedError


@advantage_estimators.declare(needs_rewards=False)
def without_rewards(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    raise NotImplementedError


@advantage_estimators.declare(needs_step_rewards=True, needs_greedy_reward=True)
def steps_over_greedy(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    raise NotImplementedError


def plain_estimator(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    raise NotImplementedError


class Game(Environment):
    gives_rewards = True

    def __init__(self, level: int = 1) -> None:
        self.level = level

    def reset(self, row: Mapping[str, Any], seed: int) -> list[ChatMessage]:
        return []

    def step(self, completion: str) -> Step:
        return Step([])


class Talk(Game):
    gives_rewards = False


SHORT = {  # in CASES
    "OWN:": f"{__name__}:",
    "DPO": "actor.loss_mode=dpo actor.loss_agg_mode=seq-mean-token-mean",
    "PAIRS": "algorithm.adv_estimator=best_worst",
    "SFT": "algorithm.source=file algorithm.adv_estimator=constant actor.loss_mode=sft",
    "GAE": "algorithm.adv_estimator=gae",
    "PARTIAL": "rollout.partial.over_sample=1.5",
    "ROLES": "rollout.placement=separate rollout.num_ranks=2",
    "SHARE": "actor.share_prompts=true",
    "SCORE": "actor.loss_mode=bradley_terry actor.loss_agg_mode=seq-mean-token-mean algorithm.adv_estimator=preference"
    " algorithm.source=file actor.use_kl_loss=false trainer.val_before_train=false trainer.test_freq=-1",
    "PLAYS": "rollout.multi_turn.environment",
    "PARTS": "reward.components",
    "TEACHER": "teachers.t.path=t",
    "SERVER": "teachers.t.url=http://host:1/v1 teachers.t.model=m",
    "RATES": "data.sampling.pass_rates=p",
}
CASES = r"""
guards.entropy.high=0 => guards.entropy.high=0 fires at every step
guards.response_length.low=4000 => guards.response_length.low=4000 fires at every step: the number is 2048 at most
rollout.n=1 => rollout.n=1: algorithm.adv_estimator='grpo' compares the samples of a prompt with each other
algorithm.adv_estimator=remax algorithm.source=file actor.loss_mode=sft => needs a greedy response to every prompt
algorithm.adv_estimator=grpo_process => set reward.function to a module:function that returns
algorithm.adv_estimator=OWN:steps_over_greedy => needs rewards of single steps, and the reward 'arithmetic' gives one
algorithm.adv_estimator=gdpo => needs parts of the reward, and the config gives one for the whole response
algorithm.adv_estimator=gdpo algorithm.gdpo_reward_keys=[a,b] algorithm.gdpo_reward_weights=[1] => has 1 numbers for 2 names
actor.use_unbiased_kl=true actor.kl_loss_type=k2 => is unbiased for the values of k1 and k3 alone
algorithm.rollout_correction.prox_logp_method=loglinear algorithm.rollout_correction.rollout_rs=token => set prox_logp_method
algorithm.rollout_correction.prox_logp_method=loglinear actor.top_entropy_quantile=0.2 => set prox_logp_method=recompute
rollout.top_p=0.9 => leaves any number of tokens, and their ids are recorded for the policy, 4 bytes each; set rollout.top_k=64
rollout.top_k=1 => leaves one token, whose log-probability and gradient are 0; set rollout.top_k=2 or more
rollout.min_p=0.1 => set rollout.top_k=64, say, which bounds them
TEACHER rollout.top_k=20 => cuts the policy's distribution, and teachers score the full vocabulary
actor.echo_coef=0.1 => actor.echo_coef=0.1 has no effect with rollout.multi_turn.environment=null
reward.length.kind=target => reward.length.kind=target needs reward.length.target_len
actor.loss_mode=dapo => 'dapo' is a method, not a policy loss; set method=dapo, which sets all keys of it
actor.loss_mode=gspo => set loss_agg_mode=seq-mean-token-mean
actor.loss_mode=OWN:preference algorithm.adv_estimator=OWN:pairs => =seq-mean-token-mean or seq-mean-token-sum
DPO => actor.loss_mode=dpo needs pairs, and algorithm.adv_estimator='grpo' makes none
DPO PAIRS actor.ppo_micro_batch_size_per_gpu=1 => has no room for a pair
DPO PAIRS actor.ppo_max_token_len_per_gpu=4000 => 2 x (data.max_prompt_length + data.max_response_length) = 6144
algorithm.adv_estimator=zero => leaves all that is learnt to teachers
distillation.kl=forward => distillation.kl=forward has no effect with teachers={}; set teachers
TEACHER distillation.loss_agg_mode=token-men => distillation.loss_agg_mode: unknown
TEACHER distillation.beta=0.3 => has no effect with distillation.kl=sampled; set distillation.kl=jsd
TEACHER distillation.top_k=8 => set another distillation.kl
TEACHER distillation.kl=reverse distillation.discount=0.5 => has no effect with distillation.kl=reverse
TEACHER teachers.from_token_2.path=t => the name is part of metric names
TEACHER teachers.u.path=t => teachers has 2, and nothing says which of them scores a row; set distillation.key
TEACHER teachers.u.path=t teachers.u.key=t distillation.key=c => teachers.u and teachers.t have the key 't'
TEACHER teachers.t.self=start => teachers.t needs either path, or self=start or current
TEACHER teachers.t.key=x => teachers.t.key='x' has no effect without a column; set distillation.key
TEACHER teachers.t.pipeline_model_parallel_size=2 => has no effect without tensor_model_parallel_size
teachers.t.self=start teachers.t.tensor_model_parallel_size=2 => it is the policy, in the policy's layout
TEACHER teachers.t.max_prompt_length=9 => has no effect without prompt_column
teachers.t.self=current => teaches nothing without a prompt_column
teachers.t.self=start algorithm.adv_estimator=zero => teachers.t.self=start is the policy itself, which teaches nothing
teachers.t.self=start teachers.t.renew_steps=100 => is never reached in trainer.total_training_steps=100
teachers.t.self=start teachers.t.dtype=float32 => it is the policy, in model.dtype
teachers.t.self=current distillation.kl=forward distillation.top_k=0 => teachers.t changes, and its output head with it
teachers.t.self=start teachers.t.renew_steps=2 distillation.kl=forward distillation.top_k=0 => and its output head with it
teachers.t.self=start teachers.t.renew_steps=2 teachers.t.lag_steps=2 => teachers.t has renew_steps and lag_steps, two times
TEACHER teachers.t.lag_steps=2 => teachers.t.lag_steps=2 is of the policy as it was; set self=start, or leave it out
TEACHER teachers.t.renew_steps=2 => teachers.t.renew_steps=2 is of the policy as it was; set self=start, or leave it out
TEACHER SERVER => teachers.t needs either path, or self=start or current, or url; set exactly one of them
TEACHER teachers.t.model=m => teachers.t.model and api_key_env are of a server; set url, or leave them out
SERVER teachers.t.url=host:1 => teachers.t.url='host:1' is no http address
SERVER teachers.t.api_key_env=NO_SUCH_KEY => teachers.t.api_key_env='NO_SUCH_KEY': this environment variable is not set
teachers.t.url=http://host:1/v1 => teachers.t.url needs the teacher's name at the server; set model to it
SERVER teachers.t.dtype=float32 => teachers.t.dtype and its layout are the server's; leave them out
SERVER rollout.temperature=0.7 => teachers.t.url with rollout.temperature=0.7: a server's prompt log-probabilities are of
SERVER distillation.kl=reverse distillation.top_k=0 => a server returns its best tokens only; set it to 20, say
TEACHER SFT distillation.kl=forward distillation.key=c => chooses by a column of prompts, and algorithm.source=file
TEACHER SCORE => trains a model that scores, without a head over the vocabulary; leave teachers out
TEACHER SFT => actor.loss_mode=sft has no ratio to these; set distillation.kl=forward, or loss_mode=
TEACHER DPO PAIRS distillation.kl=forward => compares pairs
TEACHER model.exact=true => is not made for teachers
algorithm.source=initial => actor.loss_mode=vanilla is only for those; set loss_mode=dpo or sft
algorithm.source=initial actor.loss_mode=sft ref.path=other => ref.path names another
algorithm.source=initial algorithm.replay.ratio=0.5 actor.loss_mode=sft => keeps samples of the policy
algorithm.source=file actor.loss_mode=sft => set adv_estimator=constant (SFT), or best_worst with actor.loss_mode=dpo
SFT algorithm.adv_estimator=OWN:plain_estimator => reads responses without rewards
SFT PAIRS => reads pairs, and actor.loss_mode=sft takes none; set loss_mode=dpo
SFT algorithm.dupo=true => chooses among sampled groups
SFT rollout.temperature=0.7 => rollout.temperature=0.7 would also divide the logits of the training
algorithm.dupo=true algorithm.filter_groups.enable=true => fill the same places
algorithm.adv_estimator=reinforce_plus_plus algorithm.dupo=true rollout.n=1 => compares the samples of a prompt, and rollout.n=1
PARTIAL algorithm.source=initial actor.loss_mode=sft => goes on under newer weights, and algorithm.source=initial has none
PARTIAL rollout.partial.chunk_tokens=2048 => chunk_tokens=2048 is not less than data.max_response_length=2048
PARTIAL algorithm.rollout_correction.rollout_is=null => trains on tokens of up to 2 earlier steps
PARTIAL PLAYS=tools rollout.multi_turn.tools=[calculator] rollout.partial.chunk_turns=9 => chunk_turns=9 is not less than
ROLES rollout.lag=1 algorithm.rollout_correction.rollout_is=null => trains on samples of as many steps older weights, and
ROLES algorithm.source=initial actor.loss_mode=sft => samples from the policy that is trained, and algorithm.source=initial
ROLES algorithm.rollout_correction.bypass_mode=true => rollout_is=token would count them again; set rollout_is=null
ROLES SFT trainer.val_before_train=false trainer.test_freq=-1 => algorithm.source=file does not; set placement=colocated
ROLES rollout.num_ranks=8 => rollout.num_ranks=8 of 8 ranks leaves none to train; set 7 or less
ROLES rollout.num_ranks=null rollout.num_nodes=1 => rollout.num_nodes=1 x trainer.n_gpus_per_node=8 = 8 of 8 ranks leaves none
ROLES rollout.num_nodes=1 => one of them says how many ranks generate
ROLES trainer.nnodes=2 => rollout.num_ranks=2 cuts a node of trainer.n_gpus_per_node=8, whose ranks would train and sample
ROLES rollout.tensor_model_parallel_size=4 => does not divide the 2 rollout ranks; set rollout.tensor_model_parallel_size=2
ROLES actor.megatron.tensor_model_parallel_size=4 => = 4 does not divide the world size 6
rollout.lag=1 => rollout.lag=1 has no effect with rollout.placement=colocated; set rollout.placement=separate
data.train_batch_size=4 algorithm.replay.ratio=0.2 => set it to 0.25 or more
reward.overlong_buffer.len=4096 => more than data.max_response_length=2048
algorithm.iteration_steps=5 actor.use_kl_loss=false => this run has neither
algorithm.iteration_steps=100 => set it to 50 or less
# keys without effect
rollout.partial.max_staleness=3 => rollout.partial.max_staleness=3 has no effect with rollout.partial.over_sample=1; set
data.gen_batch_size=8 => data.gen_batch_size=8 has no effect with algorithm.filter_groups.enable=false; set
algorithm.adv_estimator=rft algorithm.use_kl_in_reward=true => algorithm.use_kl_in_reward=true has no effect
guards.kl.high=1 actor.use_kl_loss=false => guards.kl.high=1 has no effect with actor.use_kl_loss=false; set
guards.rollout_gap.high=1 SFT => has no effect with actor.loss_mode=sft and algorithm.use_kl_in_reward=false
'PARTS=[{name: accuracy}]' reward.kwargs.a=1 => reward.kwargs={'a': 1} has no effect with reward.components; set
rollout.multi_turn.tools=[calculator] => has no effect with rollout.multi_turn.environment=null; set
critic.lam=0.5 => critic.lam=0.5 has no effect with algorithm.adv_estimator=grpo; set algorithm.adv_estimator=gae
algorithm.lam=0.95 => algorithm.lam=0.95 has no effect
reward_model.steps=7 => reward_model.steps=7 has no effect with reward_model.path=null; set reward_model.path, or leave it out
reward_model.kind=process => has no effect with reward_model.path=null and actor.loss_mode=vanilla; set reward_model.path or
actor.use_kl_loss=false actor.kl_loss_coef=0.1 => actor.kl_loss_coef=0.1 has no effect with actor.use_kl_loss=false; set
actor.use_kl_loss=false actor.kl_loss_type=k1 => actor.kl_loss_type=k1 has no effect with actor.use_kl_loss=false
actor.use_kl_loss=false ref.path=r => ref.path='r' has no effect with actor.use_kl_loss=false and
algorithm.kl_ctrl.kl_coef=0.2 => has no effect with algorithm.use_kl_in_reward=false; set
algorithm.kl_penalty=abs => has no effect with algorithm.use_kl_in_reward=false
algorithm.use_kl_in_reward=true algorithm.kl_ctrl.target_kl=0.2 => has no effect with algorithm.kl_ctrl.type=fixed
algorithm.gamma=0.9 => has no effect with algorithm.adv_estimator=grpo; set algorithm.adv_estimator=reinforce_plus_plus
algorithm.rft_threshold=0.5 => has no effect with algorithm.adv_estimator=grpo; set algorithm.adv_estimator=rft
algorithm.replay.size=64 => has no effect with algorithm.replay.ratio=0; set algorithm.replay.ratio above 0
algorithm.filter_groups.max_num_gen_batches=3 => has no effect with algorithm.filter_groups.enable=false
algorithm.rollout_correction.rollout_is=null algorithm.rollout_correction.rollout_is_threshold=3 => has no effect with
algorithm.rollout_correction.rollout_rs_threshold=3 => has no effect with algorithm.rollout_correction.rollout_rs=null
actor.dpo_beta=0.3 => has no effect with actor.loss_mode=vanilla; set actor.loss_mode=dpo
actor.cispo_clip_ratio_low=0.5 => has no effect with actor.loss_mode=vanilla; set actor.loss_mode=cispo
actor.tau_pos=2 => has no effect with actor.loss_mode=vanilla; set actor.loss_mode=sapo
actor.loss_scale_factor=3 => has no effect with actor.loss_agg_mode=token-mean and critic.loss_agg_mode=token-mean; set
actor.optim.min_lr=1e-7 => has no effect with actor.optim.lr_decay_style=constant; set another actor.optim.lr_decay_style
reward.overlong_buffer.penalty_factor=2 => has no effect with reward.overlong_buffer.len=null
rollout.delta_full_every=9 => has no effect with rollout.sync=full; set rollout.sync=delta
RATES data.sampling.uniform_share=0.5 => has no effect with data.sampling.weight=uniform; set another data.sampling.weight
RATES data.sampling.min_pass_rate=0.5 data.sampling.max_pass_rate=0.4 => 0.5 is above max_pass_rate=0.4
RATES data.sampling.weight=1-p data.shuffle=false => set shuffle=true, or weight=uniform
# LoRA
actor.lora.alpha=8 => actor.lora.alpha=8 has no effect with actor.lora.rank=null; set actor.lora.rank, or leave it out
actor.lora.rank=4 actor.lora.dropout=0.1 => actor.lora.dropout=0.1 has no effect with actor.lora.mode=merged; set
critic.lora.rank=4 => critic.lora.rank=4 has no effect with algorithm.adv_estimator=grpo; set algorithm.adv_estimator=gae
# the critic
GAE algorithm.lam=0.95 critic.lam_alpha=0.05 => critic.lam_alpha=0.05 gives each response a lambda by its length
GAE trainer.critic_warmup=100 => leaves no step of trainer.total_training_steps=100 to train the policy; set it to 99 or less
GAE algorithm.source=file actor.loss_mode=sft => reads responses without rewards
GAE algorithm.rollout_correction.rollout_rs=off_policy => rollout_rs=off_policy drops responses of negative advantage
GAE critic.loss_agg_mode=token-men => critic.loss_agg_mode: unknown
GAE critic.ppo_mini_batch_size=7 data.train_batch_size=16 => critic.ppo_mini_batch_size=7 does not divide
GAE critic.ppo_epochs=2 critic.optim.lr_warmup_steps=200 => leaves no step at the full rate: the critic's 200 updates; set it to
GAE actor.optim.lr_warmup_steps=96 trainer.critic_warmup=4 => trainer.total_training_steps=100 - 4 that train the critic alone;
# shared prompts
SHARE actor.megatron.context_parallel_size=2 => context_parallel_size=2 cuts every sequence
SHARE => transformer_impl=auto may take Transformer Engine's
SHARE DPO PAIRS actor.megatron.transformer_impl=local => the pairs of actor.loss_mode=dpo
SHARE GAE trainer.device=cpu => not made for the critic
# sums of rewards
'PARTS=[{name: accuracy}]' reward.function=gsm8k => reward.function='gsm8k' beside reward.components: a run has one or the other
'PARTS=[{name: accuracy, weight: 0}]' => all weights are 0
'PARTS=[{name: accuracy}, {name: acc, function: format}]' => [1] (acc): the name is taken by another metric
'PARTS=[{name: accuracy}, {name: accuracy}]' => [1] (accuracy): the name is given twice
'PARTS=[{name: length}]' => cannot be called: nothing gives its parameter 'max_length', which has no default
'PARTS=[{name: format, kwargs: {layuot: 1}}]' => it has no parameter 'layuot', which the kwargs hold; did you mean 'layout'
'PARTS=[{name: x, function: composite}]' => a sum of components cannot be a component
'PARTS=[{name: accuracy}]' data.task=jsonl => it is the task's own reward, and data.task='jsonl' has none; set its function
'PARTS=[{name: accuracy, gate: {component: formt, min: 1}}]' => gate.component='formt' is no component above it (none)
'PARTS=[{name: format, gate: {component: accuracy, min: 1}}, {name: accuracy}]' => gate.component='accuracy' is no component
'PARTS=[{name: accuracy}, {name: format, gate: {component: accuracy}}]' => a gate needs a bound
'PARTS=[{name: accuracy}, {name: format, gate: {component: accuracy, min: 2, max: 1}}]' => gate.min=2 is above gate.max=1
'PARTS=[{name: judge, kwargs: {base_url: u, model: m, prompt: p, timeout_s: 20}}]' => is not below reward.timeout_s=10, after
reward.function=composite => reward.function='composite' is the sum of reward.components; set those, and leave reward.function
# environments
PLAYS=tool => unknown environment 'tool'; did you mean 'tools'?
PLAYS=OWN:plain_loss => is no subclass of
PLAYS=OWN:Talk data.apply_chat_template=false => set data.apply_chat_template=true
PLAYS=OWN:Talk data.val_tasks=[math500] => name the files in data.val_files
PLAYS=command rollout.multi_turn.kwargs.command=[python] rollout.temperature=0.8 => is what requests of the program may name
PLAYS=OWN:Talk data.max_response_length=400 rollout.multi_turn.max_tool_response_length=400 => 400 tokens of one observation
PLAYS=OWN:Game reward.function=gsm8k => reward.function='gsm8k' would not be called, because rollout.multi_turn.environment=
PLAYS=OWN:Game 'PARTS=[{name: format}]' => reward.components would not be called
PLAYS=OWN:Game reward_model.path=rm => reward_model.combine=replace would discard them; set combine=add
# a model that learns to score
SCORE algorithm.source=policy => it generates no responses; set algorithm.source=file
SCORE data.val_tasks=[gsm8k] => cannot answer data.val_files or data.val_tasks
SCORE actor.use_kl_loss=true => there is no KL to a reference; set actor.use_kl_loss=false
SCORE actor.entropy_coeff=0.1 => it has no entropy
SCORE sft.steps=3 => cannot learn from sft.steps=3
SCORE reward_model.path=x => give rewards to sampled responses; leave them out
SCORE algorithm.adv_estimator=constant => has no labels for it; set preference
SCORE actor.loss_mode=dpo => adv_estimator=preference labels what a scalar head scores, and actor.loss_mode=dpo does
SCORE actor.megatron.context_parallel_size=2 => it reads whole sequences on each rank
"""
ACCEPTED = """

algorithm.adv_estimator=OWN:pairs actor.loss_mode=OWN:preference actor.loss_agg_mode=seq-mean-token-sum
SFT algorithm.adv_estimator=OWN:pairs actor.loss_mode=OWN:preference actor.loss_agg_mode=seq-mean-token-sum
SFT algorithm.adv_estimator=OWN:without_rewards
algorithm.adv_estimator=OWN:plain_estimator actor.loss_mode=OWN:plain_loss
algorithm.adv_estimator=OWN:plain_estimator rollout.n=1 algorithm.use_kl_in_reward=true
GAE rollout.n=1
GAE critic.lam_alpha=0.05 critic.pretrain_steps=4 critic.cliprange_value=null trainer.critic_warmup=99
GAE critic.ppo_mini_batch_size=8 data.train_batch_size=16
SHARE trainer.device=cpu
SHARE actor.megatron.transformer_impl=local
actor.kl_loss_coef=0
'PARTS=[{name: accuracy}, {name: length, kwargs: {max_length: 9}}]'
PLAYS=OWN:Game data.task=jsonl
PLAYS=OWN:Game algorithm.adv_estimator=grpo_process
PLAYS=tools rollout.multi_turn.tools=[calculator]
SCORE
"""


def config_of(folder: Path, overrides: str) -> Config:
    for short, text in SHORT.items():
        overrides = overrides.replace(short, text)
    (folder / "run.yaml").write_text(BASE)
    return load_config(folder / "run.yaml", shlex.split(overrides))


def problems(config: Config) -> list[str]:
    """Runs all checks that read the config alone."""
    checks = (method_problems, name_problems, reward_name_problems, schedule_problems, batch_problems)
    found = [problem for check in (*checks, environment_problems, score_head_problems) for problem in check(config)]
    found += placement_problems(config, world := config.trainer.nnodes * config.trainer.n_gpus_per_node)
    if (training := world - config.num_rollout_ranks) > 0 and config.num_rollout_ranks:
        found += world_problems(config, training, None)
    found += [*sharing_problems(config, None), *beside_problems(config, 2, ModelFolders(None, None, {}, False))]
    return texts(found)


@pytest.mark.parametrize("case", [line for line in CASES.splitlines() if " => " in line])
def test_refused_with_reason_and_remedy(tmp_path: Path, case: str) -> None:
    overrides, _, message = case.partition(" => ")
    found = problems(config_of(tmp_path, overrides))
    assert any(message in problem for problem in found), found
    assert len(found) == len(set(found)) <= 2
    assert all(";" in problem or "known:" in problem for problem in found), found


@pytest.mark.parametrize("overrides", ACCEPTED.splitlines())
def test_what_fits_is_accepted(tmp_path: Path, overrides: str) -> None:
    assert problems(config_of(tmp_path, overrides)) == []


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("methods/*.yaml")), ids=lambda path: path.stem)
def test_the_examples_are_short_and_sound(path: Path) -> None:
    assert texts(method_problems(load_config(path))) == []
    assert len(path.read_text().splitlines()) <= 30


@pytest.mark.parametrize("name", ["outcome", "process", "grpo"])
def test_the_examples_of_reward_models_are_sound(name: str) -> None:
    config = load_config(EXAMPLES / f"reward_models/{name}.yaml", defaults=None if name == "grpo" else reward_defaults)
    assert texts(score_head_problems(config)) == []
    assert config.has_rollouts == (name == "grpo") and not (name == "grpo" and config.has_rule)
    assert trains_scores(config) == (name != "grpo")
    assert name != "process" or config.reward_model.step_separator == STEP_SEPARATOR


def test_the_trainer_reads_the_same_facts() -> None:
    algorithm = AlgorithmConfig(rollout_correction={"rollout_is": "token"})  # type: ignore[arg-type]
    plain, paired = (
        ActorConfig(use_kl_loss=False, loss_mode=f"{__name__}:{loss.__name__}") for loss in (plain_loss, preference)
    )
    for need, expected in ((is_corrected, True), (needs_old_logprobs, True), (reads_reference, False)):
        assert need(algorithm, plain) is expected
        assert need(algorithm, paired) is not expected


def test_an_environment_is_made_once_before_the_run(tmp_path: Path) -> None:
    class Tokenizer:
        chat_template, eos_token_id = None, 1

    with pytest.raises(ConfigError, match="cannot be made with .*'depth': 3.*; correct rollout.multi_turn.kwargs"):
        check_environment(config_of(tmp_path, "PLAYS=OWN:Game rollout.multi_turn.kwargs.depth=3"), Tokenizer())
    with pytest.raises(ConfigError, match="the tokenizer has none; set data.chat_template"):
        check_environment(config_of(tmp_path, "PLAYS=OWN:Game"), Tokenizer())


def test_rollouts_are_not_written_beside_the_rows_of_the_run(tmp_path: Path) -> None:
    source = "[{name: a, files: [d/t.jsonl], weight: 1}]"
    for rows in ("data.train_files=[d/t.jsonl]", "data.val_files=[d/t.jsonl]", f"'data.sources={source}'"):
        config = config_of(tmp_path, f"{rows} trainer.rollout_data_dir=d")
        assert "trainer.rollout_data_dir='d' is the folder of 'd/t.jsonl'" in " ".join(
            texts(rollout_file_problems(config))
        )


@pytest.mark.parametrize(
    "overrides",
    [
        "actor.use_kl_loss=false actor.kl_loss_coef=0 algorithm.kl_ctrl.kl_coef=0",
        f"actor.loss_mode={__name__}:plain_loss actor.tau_pos=2 actor.dpo_beta=0.3",
    ],
)
def test_coefficients_of_zero_and_keys_of_the_users_own_functions_are_no_mistakes(
    tmp_path: Path, overrides: str
) -> None:
    assert texts(method_problems(config_of(tmp_path, overrides))) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("", None),
        ("actor.optim.lr=0", "actor.optim.lr=0: this model learns nothing"),
        ("actor.optim.lr=1", "actor.optim.lr=1 is above 0.05, which is rarely meant: an update of AdamW moves"),
        ("actor.kl_loss_coef=100", "actor.kl_loss_coef=100 is above 10"),
        ("actor.optim.lr=0.03 actor.ppo_epochs=4", None),
        ("rollout.val_kwargs.n=4 data.val_files=[v.jsonl]", "the 4 answers to a prompt are the same"),
        ("rollout.val_kwargs.top_p=0.9", "rollout.val_kwargs.top_p=0.9 has no effect with temperature=0"),
        ("data.chat_template=t.jinja data.apply_chat_template=false", "'t.jinja' is not applied to prompts"),
        ("trainer.save_freq=200", "trainer.save_freq=200 is beyond trainer.total_training_steps=100"),
        (
            "trainer.test_freq=200 trainer.total_epochs=1 trainer.total_training_steps=7",
            "trainer.test_freq=200 is beyond trainer.total_training_steps=7",
        ),
        ("actor.entropy_coeff=-0.1", "actor.entropy_coeff=-0.1 lowers the entropy"),
        ("actor.clip_ratio_low=0 actor.clip_ratio_high=0", "clip every ratio but 1"),
        ("data.train_files=[t.jsonl] data.val_files=[t.jsonl]", "t.jsonl, which is validated on, is trained on, too"),
        (
            "'data.sources=[{name: a, files: [t.jsonl], weight: 1}, {name: b, files: [t.jsonl], weight: 1}]'",
            "t.jsonl is in source a and in source b: its rows are sampled as rows of each",
        ),
    ],
)
def test_what_is_rarely_meant(tmp_path: Path, overrides: str, expected: str | None) -> None:
    found = list(suspicions(config_of(tmp_path, overrides)))
    assert len(found) == (expected is not None) and all(expected in text for text in found if expected)
