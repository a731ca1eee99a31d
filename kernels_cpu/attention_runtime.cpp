#include "kernels_cpu/attention_runtime.h"

#include <utility>

namespace swiftapex {

AttentionRuntime::AttentionRuntime(int num_threads, const std::vector<int>& cpus, TaskOrder order,
                                   int spin_us, Attention attention)
    : attention_(attention),
      pool_(num_threads, cpus, Caller::kWorks, spin_us),
      lane_(order, "swiftapex-attn", cpus.empty() ? -1 : cpus[0], spin_us) {}

std::shared_ptr<Task> AttentionRuntime::submit(int64_t layer, DecodePlan& plan,
                                               const DecodeAttentionArgs& args, TaskWords words) {
    auto attend = [this, &plan, args] { attention_(pool_, plan, args); };
    auto task = std::make_shared<Task>(std::move(attend), layer, words);
    lane_.submit(task);
    return task;
}

void AttentionRuntime::close() {
    lane_.close();
    pool_.close();
}

}  // namespace swiftapex
