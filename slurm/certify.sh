#!/usr/bin/env bash
# Prove what a config relies on, on the nodes of a job:   sbatch slurm/certify.sh CONFIG [section.key=value ...]
#
#   sbatch --nodes=2 slurm/certify.sh grpo.yaml
#   MINUTES=30 sbatch slurm/certify.sh grpo.yaml model.path=/models/qwen
#   DRY_RUN=1 bash slurm/certify.sh grpo.yaml             # show the command, start nothing
#
# The short runs of `certify` (docs/trust.md) use all ranks of the job, one after the other. ranks.sh has the variables for
# folders. With CONTAINER the job has one node, whose ranks are started within one container.
#SBATCH --job-name=certify
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=%x-%j.log
set -uo pipefail

export JOB_NAME=certify DEFAULT_NODES=1
cd "${REPO:-${SLURM_SUBMIT_DIR:-$PWD}}" && [ -f slurm/ranks.sh ] || { echo "error: submit from the project's root, or set REPO" >&2; exit 2; }
# shellcheck source=slurm/ranks.sh
source slurm/ranks.sh

[ $# -gt 0 ] && [[ $1 != *=* ]] || die "the first argument is the config, a YAML file; the rest are section.key=value"
CERTIFY=("$PYTHON" -m grpo_megatron certify "$@" trainer.nnodes="$NODES" trainer.n_gpus_per_node="$RANKS_PER_NODE"
    trainer.device="$DEVICE" "${ROLES[@]}" --minutes "${MINUTES:-10}")

print_place
if [ -n "$CONTAINER" ]; then
    [ "$NODES" = 1 ] || die "$NODES nodes with CONTAINER; certify one node, or leave CONTAINER out"
    mapfile -t IMAGE < <(printf '%s\n' "${OUTSIDE[@]}" | grep '^--container')
    run srun --nodes=1 --ntasks=1 ${CPUS:+--cpus-per-task="$CPUS"} "${IMAGE[@]}" "${INSIDE[@]}" "${CERTIFY[@]}"
else
    run "${CERTIFY[@]}" --start "srun ${OUTSIDE[*]} bash slurm/as_rank.sh $PYTHON"
fi
status=$?
[ "$status" = 0 ] || say "ended with $status; the lines above say why"
exit "$status"
