# Runs a program as one rank: sets torchrun's variables from those of the Slurm task. --node: as the launcher of a node's ranks.
# shellcheck shell=bash
if [ "$1" = --node ]; then
    address=$SLURMD_NODENAME # or the address that Slurm uses if the name does not resolve
    getent hosts "$address" >/dev/null || address=$(scontrol show node "$address" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    export GRPO_MEGATRON_NODE_RANK=$SLURM_NODEID GRPO_MEGATRON_NODE_ADDRESS=$address
    trap : TERM USR1 INT # the launcher receives them, too
    for _ in 1 2 3; do # one that is killed joins the others again
        "${@:2}" && exit
        code=$?
        [ "$code" -eq 137 ] || break
    done
    exit "$code"
fi
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
exec "$@"
