#!/usr/bin/env bash
# One machine, one process per GPU. Several machines: the same on each, with --nnodes, --node_rank and --master_addr.
set -eu
torchrun --nproc_per_node="${GPUS:-8}" -m jaxtrain.run --config "${1:?a config file}" "${@:2}"
