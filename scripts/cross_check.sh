#!/bin/sh
# Checks the CPU kernels of another architecture: builds the native tests for this machine and, with
# a cross compiler, for 64-bit Arm, and runs the latter under emulation. Layer math, attention and
# copies only: scripts/sanitize.sh is for the threads.
# Usage: scripts/cross_check.sh [jobs]    Build folders: build/native-*
# Debian: apt-get install g++-aarch64-linux-gnu qemu-user
set -eu
cd "$(dirname "$0")/.."
jobs=${1:-$(nproc)}
tests="layer_math argmax convert decode_attention copy_blocks"

# check <architecture> <expected instruction sets> <emulator> <cmake argument>...
check() {
    build=build/native-$1
    expected="CPU kernels for $1: $2"
    emulator=$3
    shift 3
    echo "== $build"
    cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DSWIFTAPEX_BINDINGS=OFF "$@" >"$build.log"
    if ! grep "$expected\$" "$build.log"; then
        echo "expected: $expected; got:" && grep "CPU kernels" "$build.log"
        exit 1
    fi
    cmake --build "$build" --target kernels_cpu_tests --parallel "$jobs"
    # shellcheck disable=SC2086  # the emulator and the tests are lists of words
    $emulator "$build/kernels_cpu_tests" $tests
}

mkdir -p build
check "$(uname -m)" ".*" ""
for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
    if ! command -v "$tool" >/dev/null; then
        echo "skipped 64-bit Arm: there is no $tool (Debian: g++-aarch64-linux-gnu, qemu-user)"
        exit 0
    fi
done
check aarch64 "scalar;neon" "qemu-aarch64 -L /usr/aarch64-linux-gnu" -DCMAKE_SYSTEM_NAME=Linux \
    -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
echo "no findings"
