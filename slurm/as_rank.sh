# One Slurm task becomes one rank: torchrun's variables from Slurm's, then the program.
# shellcheck shell=bash
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
exec "$@"
