#!/bin/sh
# Builds the native runtime, thread pool, attention and copies as a plain executable under
# ThreadSanitizer, then under AddressSanitizer with UndefinedBehaviorSanitizer, and runs its tests.
# Usage: scripts/sanitize.sh [jobs]    Build folders: build/sanitize-*
set -eu
cd "$(dirname "$0")/.."
jobs=${1:-$(nproc)}

for sanitizer in thread address,undefined; do
    build=build/sanitize-$(echo "$sanitizer" | cut -d, -f1)
    echo "== -fsanitize=$sanitizer ($build)"
    cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=None -DSWIFTAPEX_SANITIZE="$sanitizer" \
        -DSWIFTAPEX_BINDINGS=OFF >/dev/null
    cmake --build "$build" --target kernels_cpu_tests --parallel "$jobs"
    "$build/kernels_cpu_tests"
done
echo "no findings"
