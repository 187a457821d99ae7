#!/usr/bin/env bash
# Everything that one GPU can show, in under ten minutes: bash benchmarks/gpu.sh [FOLDER for the JSON results]
set -u
cd "$(dirname "$0")/.."
out=${1:-${OUT:-benchmarks/results/gpu}}
mkdir -p "$out"
python=${PYTHON:-python}
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$out/../xla-cache}
systems=${SYSTEMS:-"set_completion sparse_autoencoder hjepa criteria_evidence memory_lm memory_adapter fmri_autoencoder"}
for system in $systems; do
  for peer in torch_eager torch_compile; do
    timeout 110 "$python" -m benchmarks.compare --system "$system" --size reference --peer $peer --precision bf16 \
      --rounds 3 --seconds 1.5 --json "$out/$system.$peer.json" 2>"$out/$system.$peer.log" || tail -n 3 "$out/$system.$peer.log"
  done
done
timeout 60 "$python" -m benchmarks.loop_overhead --rounds 2 --json "$out/loop_overhead.json"
timeout 60 "$python" -m benchmarks.checkpoint --json "$out/checkpoint.json"
timeout 60 "$python" -m benchmarks.steps_per_call
"$python" -m benchmarks.table "$out"/*.torch_*.json --output "$out/table.md"
