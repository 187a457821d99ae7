#!/usr/bin/env bash
# OpenMPI, one process per GPU: bash examples/launch/mpirun.sh configs/digits.yaml, or your own script. PROCESSES=2 for
# a machine without GPUs. On several machines name the host of process 0: MASTER_ADDR=host.
set -eu
if [ -f "${VENV:=.venv}/bin/activate" ]; then . "$VENV/bin/activate"; fi
PROCESSES=${PROCESSES:-${GPUS:-8}}
target=${1:?a config file, or your own script}
shift
case $target in
*.py) set -- "$target" "$@" ;;
*) set -- -m jaxtrain.run --config "$target" "$@" ;;
esac
# --map-by slot:PE=n gives a process n CPUs; every process has a log in logs/
exec mpirun -np "$PROCESSES" --map-by "slot:PE=${CPUS_PER_PROCESS:-1}" ${MASTER_ADDR:+-x MASTER_ADDR} -x PATH \
    --output-filename "${LOGS:-logs}" python "$@"
