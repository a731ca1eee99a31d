#include "kernels_cpu/attention_runtime.h"

#include <numeric>
#include <utility>

namespace swiftapex {

AttentionRuntime::AttentionRuntime(int num_threads, const std::vector<int>& cpus, TaskOrder order,
                                   int spin_us, Attention attention)
    : attention_(attention),
      pool_(num_threads, cpus, Caller::kWorks, spin_us),
      lane_(order, "swiftapex-attn", cpus.empty() ? -1 : cpus[0], spin_us) {}

std::shared_ptr<Task> AttentionRuntime::submit(int64_t layer, DecodePlan& plan,
                                               const DecodeAttentionArgs& args, TaskWords words) {
    auto attend = [this, &plan, args] {
        attention_(pool_, plan, args);
        const std::vector<int32_t>& contexts = plan.context_lens();
        num_tasks_ += 1;
        num_rows_ += plan.rows();
        num_tokens_ += std::accumulate(contexts.begin(), contexts.end(), int64_t{0});
    };
    auto task = std::make_shared<Task>(std::move(attend), layer, words);
    lane_.submit(task);
    return task;
}

Attended AttentionRuntime::attended() const { return {num_tasks_, num_rows_, num_tokens_}; }

void AttentionRuntime::close() {
    lane_.close();
    pool_.close();
}

}  // namespace swiftapex
