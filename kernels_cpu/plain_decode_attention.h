// Paged decode attention as a textbook has it: what the tuned kernel is compared with in ablations.
#pragma once

#include "kernels_cpu/paged_decode_attention.h"

namespace swiftapex {

// Computes what paged_decode_attention() does, in its own order of operations: threads share out
// rows x query heads, and each query head reads all of its K and V again. No KV in int8. Throws
// std::invalid_argument as paged_decode_attention() does. The result is the same, bit by bit, for
// any number of threads.
void plain_decode_attention(ThreadPool& pool, DecodePlan& plan, const DecodeAttentionArgs& args);

}  // namespace swiftapex
