# Runs a program as one rank: sets torchrun's variables from those of the Slurm task.
# shellcheck shell=bash
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
exec "$@"
