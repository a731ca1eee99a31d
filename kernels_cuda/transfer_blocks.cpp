#include "kernels_cuda/transfer_blocks.h"

#include "kernels_cuda/launch.h"

namespace swiftapex {
namespace {

using Sources = std::vector<const void*>;
using Targets = std::vector<void*>;

void one_by_one(const Sources& from, const Targets& to, size_t bytes, cudaStream_t stream) {
    for (size_t i = 0; i < from.size(); ++i) {
        check("transfer_blocks", cudaMemcpyAsync(to[i], from[i], bytes, cudaMemcpyDefault, stream));
    }
}

// False: this driver has no call for many copies.
bool all_at_once(const Sources& from, const Targets& to, size_t bytes, cudaStream_t stream) {
#if CUDART_VERSION >= 13000
    const std::vector<size_t> sizes(from.size(), bytes);
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    size_t first = 0;
    const cudaError_t error = cudaMemcpyBatchAsync(to.data(), from.data(), sizes.data(),
                                                   from.size(), &attributes, &first, 1, stream);
    if (error == cudaErrorCallRequiresNewerDriver || error == cudaErrorNotSupported) {
        cudaGetLastError();
        return false;
    }
    check("transfer_blocks", error);
    return true;
#else
    return false;
#endif
}

}  // namespace

void transfer_blocks(const void* src, void* dst, const std::vector<int64_t>& src_ids,
                     const std::vector<int64_t>& dst_ids, int64_t block_bytes,
                     cudaStream_t stream) {
    require(src_ids.size() == dst_ids.size() && block_bytes >= 1, "transfer_blocks: bad sizes");
    if (src_ids.empty()) return;
    Sources from(src_ids.size());
    Targets to(dst_ids.size());
    for (size_t i = 0; i < from.size(); ++i) {
        require(src_ids[i] >= 0 && dst_ids[i] >= 0,
                "transfer_blocks: a block's number is negative");
        from[i] = static_cast<const char*>(src) + src_ids[i] * block_bytes;
        to[i] = static_cast<char*>(dst) + dst_ids[i] * block_bytes;
    }
    const size_t bytes = static_cast<size_t>(block_bytes);
    if (!all_at_once(from, to, bytes, stream)) one_by_one(from, to, bytes, stream);
}

}  // namespace swiftapex
