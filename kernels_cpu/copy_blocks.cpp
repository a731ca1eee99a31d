#include "kernels_cpu/copy_blocks.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels_cpu/dispatch.h"

namespace swiftapex {
namespace {

size_t plane_bytes(DType dtype, const CopyBlocksArgs& args) {
    const size_t elements = size_t(args.block_size) * size_t(args.head_dim);
    if (dtype == kInt8) return elements + size_t(args.block_size) * sizeof(float);
    return elements * (dtype == kFloat32 ? 4 : 2);
}

void check_ids(const char* side, const std::vector<int64_t>& ids, int64_t num_blocks) {
    for (const int64_t id : ids) {
        if (id >= 0 && id < num_blocks) continue;
        throw std::out_of_range(std::string("copy_blocks: ") + side + " block " +
                                std::to_string(id) + " of " + std::to_string(num_blocks));
    }
}

void convert_plane(const char* source, char* target, const CopyBlocksArgs& args) {
    const KernelTable& kernels = active_kernels();
    if (args.target_dtype == kInt8) {
        kernels.quantize[args.source_dtype](source, target, args.block_size, args.head_dim);
    } else if (args.source_dtype == kInt8) {
        kernels.dequantize[args.target_dtype](source, target, args.block_size, args.head_dim);
    } else {
        kernels.convert[args.source_dtype][args.target_dtype](
            source, target, int64_t(args.block_size) * args.head_dim);
    }
}

}  // namespace

void copy_blocks(const CopyBlocksArgs& args) {
    if (args.source_ids.size() != args.target_ids.size()) {
        throw std::invalid_argument("copy_blocks: as many source as target blocks are needed");
    }
    check_ids("source", args.source_ids, args.source_num_blocks);
    check_ids("target", args.target_ids, args.target_num_blocks);
    const size_t source_plane = plane_bytes(args.source_dtype, args);
    const size_t target_plane = plane_bytes(args.target_dtype, args);
    const size_t planes = static_cast<size_t>(args.planes);
    for (size_t i = 0; i < args.source_ids.size(); ++i) {
        const char* source = static_cast<const char*>(args.source) +
                             static_cast<size_t>(args.source_ids[i]) * planes * source_plane;
        char* target = static_cast<char*>(args.target) +
                       static_cast<size_t>(args.target_ids[i]) * planes * target_plane;
        if (args.source_dtype != args.target_dtype) {
            for (size_t p = 0; p < planes; ++p) {
                convert_plane(source + p * source_plane, target + p * target_plane, args);
            }
        } else if (source != target) {
            std::memcpy(target, source, planes * source_plane);
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
