#!/usr/bin/env bash
# Evaluate a 70B model:   sbatch slurm/evaluate_70b.sh MODEL [options of grpo_megatron evaluate]
#
#   sbatch slurm/evaluate_70b.sh outputs/llama3_70b/hf
#   TASKS=gsm8k,math500 DATA=/data sbatch --nodes=4 slurm/evaluate_70b.sh outputs/llama3_70b/checkpoints/step_000100 --samples 16
#   DRY_RUN=1 bash slurm/evaluate_70b.sh MODEL            # show the commands, start nothing
#
# MODEL is a Hugging Face folder or a training checkpoint. An engine spans TP ranks (default 8, one node). More nodes run
# more engines. Completions on the disk are not sampled again: a job that was pre-empted or ran out of time is requeued and
# continues. ranks.sh has the variables for folders and containers.
#SBATCH --job-name=evaluate-70b
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#SBATCH --signal=B:USR1@60
set -uo pipefail

export JOB_NAME=evaluate_70b DEFAULT_NODES=1
cd "${REPO:-${SLURM_SUBMIT_DIR:-$PWD}}" && [ -f slurm/ranks.sh ] || { echo "error: submit from the project's root, or set REPO" >&2; exit 2; }
# shellcheck source=slurm/ranks.sh
source slurm/ranks.sh

MAX_ATTEMPTS=${MAX_ATTEMPTS:-20}
TASKS=${TASKS:-gsm8k,math500} DATA=${DATA:-data} TP=${TP:-8}
[ $# -gt 0 ] && [[ $1 != -* ]] || die "the first argument is the model: a Hugging Face folder or a training checkpoint"
MODEL=$1 && shift
[ -e "$MODEL" ] || [ "$DRY_RUN" = 1 ] || die "no model $MODEL in $PWD"
[ $((RANKS % TP)) = 0 ] || die "TP=$TP does not divide the $RANKS ranks ($NODES nodes x $RANKS_PER_NODE)"

finish() {
    say "job $JOB attempt $RESTARTS: $2"
    exit "$1"
}

# shellcheck disable=SC2329 # called by the trap
out_of_time() {
    [ $((RESTARTS + 1)) -lt "$MAX_ATTEMPTS" ] || finish 1 "out of time in attempt $((RESTARTS + 1)) of MAX_ATTEMPTS=$MAX_ATTEMPTS"
    trap '' TERM
    scontrol requeue "$JOB" && finish 75 "out of time; requeued, continues with the missing completions"
    finish 75 "out of time, but Slurm does not requeue it: submit it again"
}

print_place
if [ "$DRY_RUN" = 1 ]; then say "the command:"; fi
trap out_of_time USR1
on_ranks -- "$PYTHON" -m grpo_megatron evaluate --model "$MODEL" --tasks "$TASKS" --data "$DATA" --tp "$TP" --device "$DEVICE" "$@" &
wait $!
status=$?
[ "$DRY_RUN" = 1 ] && exit "$status"
[ "$status" = 0 ] && finish 0 "finished"
finish "$status" "failed with $status; the reason is above"
