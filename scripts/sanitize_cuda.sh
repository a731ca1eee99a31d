#!/bin/sh
# Runs the GPU tests marked `sanitize` under compute-sanitizer: memcheck (memory that is not ours),
# then racecheck (shared memory). Only kernels of this project are looked at; every tensor gets an
# allocation of its own, so that an access beside it is seen.
# Usage: scripts/sanitize_cuda.sh [folder]    Default: $OUT, else results/
# LIMIT: seconds per tool (90). Exit: 0 nothing found; 1 findings or a failing test; 124 a tool was
# cut off; 127 there is no compute-sanitizer. The logs are FOLDER/sanitize_<tool>.log.
set -eu
cd "$(dirname "$0")/.."
out=${1:-${OUT:-results}}
limit=${LIMIT:-90}
python=${PYTHON:-python3}
sanitizer=$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
[ -x "$sanitizer" ] || { echo "no compute-sanitizer on the PATH or in CUDA_HOME"; exit 127; }
mkdir -p "$out"

status=0
for tool in memcheck racecheck; do
    log=$out/sanitize_$tool.log
    # 99 tells findings from the tests' own exit codes; pytest gives 5 where nothing was collected.
    code=0
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout -k 5 "$limit" "$sanitizer" --tool "$tool" \
        --kernel-name kernel_substring=swiftapex --error-exitcode 99 --launch-timeout 60 \
        "$python" -m pytest -m sanitize --timeout "$limit" tests/cuda/test_kernels_cuda.py \
        tests/cuda/test_decode_attention_cuda.py >"$log" 2>&1 || code=$?
    case $code in
    0) echo "$tool: nothing found" ;;
    99) echo "$tool: findings, see $log" ;;
    124 | 137) echo "$tool: cut off after $limit s, see $log" ;;
    *) echo "$tool: the tests ended with $code, see $log" ;;
    esac
    case $code in
    0) ;;
    124 | 137) [ $status -ne 0 ] || status=124 ;;
    *) status=1 ;;
    esac
done
exit $status
