#!/usr/bin/env bash
# OpenMPI, one process per GPU. On several machines name the host of process 0: -x MASTER_ADDR=host.
set -eu
mpirun -np "${GPUS:-8}" python -m jaxtrain.run --config "${1:?a config file}" "${@:2}"
