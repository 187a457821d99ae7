#!/usr/bin/env bash
# What one GPU can show, in stages of a few minutes, each useful alone:
#     bash benchmarks/gpu.sh contact|compare [FOLDER for the JSON results]
# contact: does everything run, and as in torch. compare: the seven systems at their originals' sizes beside eager torch
# and torch.compile; those of a wave prepare beside each other and are timed one by one. TRACES: a folder for profiles of
# three steps. PREDICTED: what `python -m benchmarks.predict --json F` wrote, to stand beside.
set -u
stage=${1:?contact or compare}
out=$(realpath -m "${2:-${OUT:-benchmarks/results/gpu}}")
cd "$(dirname "$0")/.."
mkdir -p "$out"
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL=2 XLA_PYTHON_CLIENT_PREALLOCATE=false
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-${TMPDIR:-/tmp}/xla-cache}

compare() { # SYSTEM GATE
  timeout -k 5 "${LIMIT:-240}" "$python" -m benchmarks.compare --system "$1" --size reference --precision bf16 ${BATCH:+--batch $BATCH} --rounds ${ROUNDS:-5} \
    --seconds 0.5 --peer ${PEERS:-torch_eager torch_compile} --gate "${GATE:-$2}" --json "$out/$1.json" \
    ${TRACES:+--trace "$TRACES"} ${SETTINGS:-} >"$out/$1.txt" 2>&1 || tail -n 3 "$out/$1.txt"
}

case $stage in
contact) "$python" -m benchmarks.first_contact --jobs "${JOBS:-4}" --json "$out/first_contact.json" ;;
compare)
  # what shares 80 GB; twice as much takes the lines together
  waves=${WAVES:-"criteria_evidence hjepa sparse_autoencoder
    set_completion memory_adapter
    memory_lm
    fmri_autoencoder"}
  number=0
  while read -r wave; do
    number=$((number + 1))
    for system in $wave; do compare "$system" "$out/.gate$number" & done
    wait
    rm -f "$out/.gate$number"
  done <<<"$waves"
  results=$(find "$out" -name '*_*.json' ! -name first_contact.json -o -name hjepa.json | sort)
  [ -z "$results" ] || "$python" -m benchmarks.table $results --output "$out/table.md" ${PREDICTED:+--predicted "$PREDICTED"}
  ;;
esac
