#!/usr/bin/env bash
# hvdtrain under Open MPI's mpirun. Arguments after the script's name go to hvdtrain.
#
#   NP=2 launchers/mpirun.sh --task digits                          one host
#   NP=16 HOSTS=host0:8,host1:8 launchers/mpirun.sh ...             several, over ssh
#
# NP         ranks on all hosts together [1]
# HOSTS      host:ranks,... [this host]
# DRY_RUN=1  print the command instead of running it
#
# As root, which Open MPI advises against, it wants both of
#   OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# and for more ranks than cores
#   OMPI_MCA_rmaps_base_oversubscribe=1
# These are yours to set: this script does not.
set -eu

hosts=()
if [ -n "${HOSTS:-}" ]; then
    hosts=(-H "$HOSTS")
    # mpirun passes only OMPI_* and what -x names to other hosts.
    for name in PATH PYTHONPATH LD_LIBRARY_PATH MASTER_ADDR MASTER_PORT \
        "${!HVDTRAIN_@}" "${!HOROVOD_@}" "${!NCCL_@}" "${!GLOO_@}" "${!OMP_@}"; do
        [ -z "${!name:-}" ] || hosts+=(-x "$name")
    done
fi

# --bind-to none: mpirun would bind each rank to one core, and its threads and loaders with it.
set -- mpirun -np "${NP:-1}" --bind-to none "${hosts[@]}" hvdtrain "$@"

if [ "${DRY_RUN:-0}" = 1 ]; then
    printf '%q ' "$@" && echo && exit
fi
exec "$@"
