#pragma once

#include "kernels_cpu/share.h"

namespace swiftapex::SWIFTAPEX_ISA {

// Four independent sums hide the latency of an add; the compiler vectorises them. Threads take what
// is left, chunk by chunk: on a shared machine they are not equally fast, and what counts is what
// all of them can read.
inline void read_stream(const ReadStreamArgs& args, int thread) {
    constexpr int64_t kStep = 64;  // words: eight cache lines
    constexpr int64_t kAhead = 512;
    uint64_t sums[kStep] = {};
    for (;;) {
        int64_t i = __atomic_fetch_add(args.next, args.chunk, __ATOMIC_RELAXED);
        if (i >= args.count) break;
        const int64_t end = i + args.chunk < args.count ? i + args.chunk : args.count;
        for (; i + kStep <= end; i += kStep) {
            if (i + kAhead + kStep <= end) {
                for (int64_t j = 0; j < kStep; j += 8) {
                    __builtin_prefetch(args.words + i + kAhead + j);
                }
            }
            for (int64_t j = 0; j < kStep; ++j) sums[j] += args.words[i + j];
        }
        for (; i < end; ++i) sums[0] += args.words[i];
    }
    uint64_t sum = 0;
    for (uint64_t part : sums) sum += part;
    args.partial[8 * thread] = sum;
}

}  // namespace swiftapex::SWIFTAPEX_ISA
