#pragma once

#include "kernels_cpu/share.h"

namespace swiftapex::SWIFTAPEX_ISA {

// Four independent sums hide the latency of an add; the compiler vectorises them.
inline void read_stream(const ReadStreamArgs& args, int thread, int num_threads) {
    constexpr int64_t kStep = 64;  // words: eight cache lines
    const auto [begin, end] = share(args.count, kStep, thread, num_threads);
    uint64_t sums[kStep] = {};
    int64_t i = begin;
    for (; i + kStep <= end; i += kStep) {
        for (int64_t j = 0; j < kStep; j += 8) __builtin_prefetch(args.words + i + 512 + j);
        for (int64_t j = 0; j < kStep; ++j) sums[j] += args.words[i + j];
    }
    for (; i < end; ++i) sums[0] += args.words[i];
    uint64_t sum = 0;
    for (uint64_t part : sums) sum += part;
    args.partial[8 * thread] = sum;
}

}  // namespace swiftapex::SWIFTAPEX_ISA
