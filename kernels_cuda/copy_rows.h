// Rows between device memory and pinned host memory, and the words by which host threads and the
// stream follow each other (docs/architecture.md, "Native code").
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace swiftapex {

// Copies n rows of row_bytes from device memory to pinned host memory, `dst` being the address at
// which the device sees it. Then, once all rows are visible to the host, stores 1 into `arrival`
// (pinned host memory; null: no word). `counter`: an int32 in device memory that is zero and that
// no kernel of another stream uses at the same time; zero again afterwards. With n = 0 only the
// word is stored.
void gather_rows(const void* src, void* dst, int64_t n, int64_t row_bytes, int64_t src_stride_bytes,
                 int64_t dst_stride_bytes, int32_t* arrival, int32_t* counter, cudaStream_t stream);

// The way back: rows from pinned host memory to device memory, then `done` (pinned host memory;
// null: no word) is reset to 0, when all rows have been read.
void scatter_rows(const void* src, void* dst, int64_t n, int64_t row_bytes,
                  int64_t src_stride_bytes, int64_t dst_stride_bytes, int32_t* done,
                  int32_t* counter, cudaStream_t stream);

}  // namespace swiftapex
