#!/usr/bin/env bash
# One machine, one process per GPU: bash examples/launch/torchrun.sh configs/digits.yaml, or your own script:
# bash examples/launch/torchrun.sh train.py. PROCESSES=2 for a machine without GPUs. Several machines: the same on each,
# with --nnodes, --node_rank and --master_addr.
set -eu
if [ -f "${VENV:=.venv}/bin/activate" ]; then . "$VENV/bin/activate"; fi
PROCESSES=${PROCESSES:-${GPUS:-8}}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) / PROCESSES > 0 ? $(nproc) / PROCESSES : 1))} # CPUs of a process
target=${1:?a config file, or your own script}
shift
case $target in
*.py) set -- "$target" "$@" ;;
*) set -- -m jaxtrain.run --config "$target" "$@" ;;
esac
# a log per process: logs/<time>/.../<rank>/stdout.log; --tee 3 shows them here, too
exec torchrun --nproc_per_node="$PROCESSES" --log-dir "${LOGS:-logs}" --redirects 3 --tee 3 "$@"
