// Copies KV blocks between the two sides' stores, of which each may have its own dtype.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels_cpu/kernel_table.h"
#include "kernels_cpu/task_lane.h"

namespace swiftapex {

// One layer: [num_blocks, kv_heads, K|V, block_size, head_dim], contiguous; int8 planes as in
// kernel_table.h. Block source_ids[i] goes to target_ids[i], in that order.
struct CopyBlocksArgs {
    const void* source;
    void* target;
    DType source_dtype, target_dtype;
    int64_t source_num_blocks, target_num_blocks;
    int64_t planes;  // of a block: kv_heads * 2
    int block_size, head_dim;
    std::vector<int64_t> source_ids, target_ids;
};

// On the calling thread, quantising and back where one side is int8. Rounds to nearest, ties to
// even. Throws std::invalid_argument or std::out_of_range, and then has copied nothing.
void copy_blocks(const CopyBlocksArgs& args);

// Copies one request after the other on a thread of its own, strictly in the order of submission:
// a later copy may reuse the blocks that an earlier one has read. See task_lane.h for the hand-off.
class CopyLane {
  public:
    explicit CopyLane(int spin_us);

    // The memory that `args` names must live until the task has finished.
    std::shared_ptr<Task> submit(CopyBlocksArgs args, TaskWords words);

    int64_t busy_ns() const { return lane_.busy_ns(); }
    void close() { lane_.close(); }

  private:
    TaskLane lane_;
};

}  // namespace swiftapex
