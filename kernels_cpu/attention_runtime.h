// Attention of CPU decodes beside whoever submits it: threads of its own, and a queue of calls.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels_cpu/paged_decode_attention.h"
#include "kernels_cpu/task_lane.h"
#include "kernels_cpu/thread_pool.h"

namespace swiftapex {

// What has been attended: calls, rows in all of them, tokens of KV that those rows read.
struct Attended {
    int64_t tasks = 0, rows = 0, tokens = 0;
};

// Calls run one at a time, each on all threads; see task_lane.h for the hand-off. A call whose
// data are late is overtaken by others in either order: calls in flight are for different layers
// or different rows and do not depend on each other.
class AttentionRuntime {
  public:
    using Attention = void (*)(ThreadPool&, DecodePlan&, const DecodeAttentionArgs&);

    // Thread i of `num_threads` is pinned to cpus[i], if given. `order`: kArrivedFifo, or
    // kDeepestFirst, which lets those requests finish their token first that have gone furthest.
    AttentionRuntime(int num_threads, const std::vector<int>& cpus, TaskOrder order, int spin_us,
                     Attention attention = paged_decode_attention);

    // Queues one layer's call for the rows of one batch. `plan` and the memory that `args` names
    // must live, and the plan be used by no one else, until the task has finished.
    std::shared_ptr<Task> submit(int64_t layer, DecodePlan& plan, const DecodeAttentionArgs& args,
                                 TaskWords words);

    int num_threads() const { return pool_.num_threads(); }
    int64_t busy_ns() const { return lane_.busy_ns(); }
    // By the calls whose time busy_ns() holds; one that is just ending may count in one of them.
    Attended attended() const;

    // Lets the running call finish, cancels the others, joins all threads.
    void close();

  private:
    const Attention attention_;
    std::atomic<int64_t> num_tasks_{0}, num_rows_{0}, num_tokens_{0};
    ThreadPool pool_;  // the lane's thread takes part as thread 0
    TaskLane lane_;    // after the pool: it ends first
};

}  // namespace swiftapex
