#!/usr/bin/env bash
# hvdtrain under torchrun. Arguments after the script's name go to hvdtrain.
#
#   NP=2 launchers/torchrun.sh --task digits                                   one host
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 NP=8 launchers/torchrun.sh ...      on host0
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=host0 NP=8 launchers/torchrun.sh ...      on the other
#
# NP         ranks on this host [1]: torchrun counts by host
# DRY_RUN=1  print the command instead of running it
set -eu

if [ "${NNODES:-1}" -eq 1 ]; then
    # --standalone takes a free port, so several jobs can share the host.
    set -- torchrun --standalone --nproc-per-node "${NP:-1}" -m hvdtrain "$@"
else
    set -- torchrun --nnodes "$NNODES" --node-rank "${NODE_RANK:?set it: 0 on the first host}" \
        --master-addr "${MASTER_ADDR:?set it to the name of the first host}" \
        --master-port "${MASTER_PORT:-29500}" \
        --nproc-per-node "${NP:-1}" -m hvdtrain "$@"
fi

if [ "${DRY_RUN:-0}" = 1 ]; then
    printf '%q ' "$@" && echo && exit
fi
exec "$@"
