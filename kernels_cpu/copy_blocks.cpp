#include "kernels_cpu/copy_blocks.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels_cpu/dispatch.h"

namespace swiftapex {
namespace {

size_t element_bytes(DType dtype) { return dtype == kFloat32 ? 4 : 2; }

void check_ids(const char* side, const std::vector<int64_t>& ids, int64_t num_blocks) {
    for (const int64_t id : ids) {
        if (id >= 0 && id < num_blocks) continue;
        throw std::out_of_range(std::string("copy_blocks: ") + side + " block " +
                                std::to_string(id) + " of " + std::to_string(num_blocks));
    }
}

}  // namespace

void copy_blocks(const CopyBlocksArgs& args) {
    if (args.source_ids.size() != args.target_ids.size()) {
        throw std::invalid_argument("copy_blocks: as many source as target blocks are needed");
    }
    check_ids("source", args.source_ids, args.source_num_blocks);
    check_ids("target", args.target_ids, args.target_num_blocks);
    const size_t elements = static_cast<size_t>(args.block_elements);
    const size_t source_bytes = elements * element_bytes(args.source_dtype);
    const size_t target_bytes = elements * element_bytes(args.target_dtype);
    const auto convert = active_kernels().convert[args.source_dtype][args.target_dtype];
    for (size_t i = 0; i < args.source_ids.size(); ++i) {
        const char* source = static_cast<const char*>(args.source) +
                             static_cast<size_t>(args.source_ids[i]) * source_bytes;
        char* target = static_cast<char*>(args.target) +
                       static_cast<size_t>(args.target_ids[i]) * target_bytes;
        if (args.source_dtype != args.target_dtype) {
            convert(source, target, args.block_elements);
        } else if (source != target) {
            std::memcpy(target, source, source_bytes);
        }
    }
}

CopyLane::CopyLane(int spin_us) : lane_(TaskOrder::kStrictFifo, "swiftapex-copy", -1, spin_us) {}

std::shared_ptr<Task> CopyLane::submit(CopyBlocksArgs args, TaskWords words) {
    auto copy = [args = std::move(args)] { copy_blocks(args); };
    auto task = std::make_shared<Task>(std::move(copy), 0, words);
    lane_.submit(task);
    return task;
}

}  // namespace swiftapex
