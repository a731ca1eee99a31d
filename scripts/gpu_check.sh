#!/bin/sh
# On a machine with an NVIDIA GPU and nvcc: builds, runs the tests that need a GPU, then the
# benchmarks, and leaves their JSON in a folder. Under nine minutes on an H200.
# The build takes what is installed: torch, pybind11, scikit-build-core, cmake and ninja.
# Usage: scripts/gpu_check.sh [folder]    Default: $OUT, else results/
set -eu
cd "$(dirname "$0")/.."
out=${1:-${OUT:-results}}
python=${PYTHON:-python3}
mkdir -p "$out"

"$python" -m pip install -q --no-build-isolation --no-deps -e . >"$out/build.log" 2>&1 || {
    tail -n 5 "$out/build.log"
    echo "the build failed: $out/build.log"
    exit 1
}
parallel=$("$python" -c 'import importlib.util as u; print("-n 8" if u.find_spec("xdist") else "")')
# shellcheck disable=SC2086
"$python" -m pytest -m gpu $parallel tests/cuda >"$out/tests.log" 2>&1 && failed=0 || failed=1
tail -n 5 "$out/tests.log"

run() { # run <seconds> <file> <command..>: goes on after a failure, which the file then shows
    limit=$1 file=$out/$2
    shift 2
    echo "== $*"
    timeout "$limit" "$python" "$@" >"$file" 2>"$file.err" || { echo "failed or cut off: $file.err"; failed=1; }
}
run 60 exactness_bfloat16.jsonl scripts/exactness.py --device cuda --dtype bfloat16 \
    --models mha gqa-3 gqa-8 --schedules 3 --jobs 4
run 60 gpu_decode.jsonl scripts/bench_gpu_decode.py --steps 25
run 40 gpu_attention.json scripts/bench_gpu_attention.py
run 150 hybrid.jsonl scripts/bench_hybrid.py --sms 8 --gpu-kv 4096 --cpu-gib 32 \
    --kinds window decode --seconds 8 --strategies gpu_only fixed:asymmetric fixed:async_overlap \
    model_based
echo "results: $out"
exit $failed
