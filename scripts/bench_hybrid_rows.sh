#!/bin/sh
# Hybrid throughput of two models and four sizes of the GPU's KV, ten pairs of lengths, on 8
# multiprocessors with 74 GiB of CPU KV: bench_hybrid.py with windows that begin with about as many
# requests as model_based settles at (`@N`), and on the CPU with the share of their output that it
# leaves them there (`:share`), by a simulation of the policies over measured profiles.
# Usage: scripts/bench_hybrid_rows.sh [7b | 8b | all] [folder]    Default: all, $OUT or results/
# A profile is measured where there is none (under 90 s each); then about three minutes a model.
set -eu
cd "$(dirname "$0")/.."
part=${1:-all}
out=${2:-${OUT:-results}}
python=${PYTHON:-python3}
mkdir -p "$out"

row() { # row <model> <tokens of GPU KV> <lengths..>
    model=$1 kv=$2
    shift 2
    "$python" scripts/bench_hybrid.py --model "$model" --sms 8 --gpu-kv "$kv" --cpu-gib 74 \
        --block-size 16 --profile on --warmup 8 --seconds 15 --stretch 2 \
        --strategies model_based --lengths "$@" | tee "$out/rows_${model}_$kv.jsonl"
}

if [ "$part" != 8b ]; then
    row llama2-7b 864 372x45@135:0.9 400x200@289
    row llama2-7b 4096 400x50@85:0.88 400x200@285 400x500@225
fi
if [ "$part" != 7b ]; then
    row llama3.1-8b 26400 1000x300@80:0.7 1000x600@495:0.5
    row llama3.1-8b 44992 1000x100@43 1000x300@110:0.6 1000x600@520:0.35
fi
