#!/usr/bin/env bash
# hvdtrain under horovodrun. Arguments after the script's name go to hvdtrain.
#
#   NP=2 launchers/horovodrun.sh --task digits                      one host
#   NP=16 HOSTS=host0:8,host1:8 launchers/horovodrun.sh ...         several, over ssh
#
# NP         ranks on all hosts together [1]
# HOSTS      host:ranks,... [this host]
# DRY_RUN=1  print the command instead of running it
#
# horovodrun uses MPI if there is an mpirun, else Gloo; add --gloo or --mpi below to choose.
# As root, Open MPI's mpirun also wants OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1.
set -eu

if [ -z "${HOSTS:-}" ]; then
    set -- horovodrun -np "${NP:-1}" hvdtrain "$@"
else
    set -- horovodrun -np "${NP:-1}" -H "$HOSTS" hvdtrain "$@"
fi

if [ "${DRY_RUN:-0}" = 1 ]; then
    printf '%q ' "$@" && echo && exit
fi
exec "$@"
