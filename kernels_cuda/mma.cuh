// The warp-wide matrix instructions that decode_attention uses (PTX ISA, "Matrix
// multiply-accumulate for m16n8k16"). In all fragments lane = 4 g + t.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

namespace swiftapex {

// d[16][8] += a[16][16] * b[16][8], float32 sums. a: rows g, g + 8, g, g + 8, columns 2t + {0, 1},
// in the last two 8 more. b: rows as a's columns, column g. d: rows g and g + 8, columns
// 2t + {0, 1}.
template <class T>
__device__ inline void mma(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                           unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    if constexpr (std::is_same_v<T, __half>) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
#endif
}

// Four 8x8 matrices of 16-bit elements from shared memory; lane i gives the address of row i % 8 of
// matrix i / 8 and gets row g, columns 2t + {0, 1} of each.
__device__ inline void load_matrices(unsigned (&a)[4], unsigned shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(shared)
                 : "memory");
}

// The same, each matrix transposed.
__device__ inline void load_transposed(unsigned (&a)[4], unsigned shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(shared)
                 : "memory");
}

// Four 8x8 matrices of 16-bit elements to shared memory, each transposed: as load_transposed's.
__device__ inline void store_transposed(unsigned shared, const unsigned (&a)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared),
        "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
        : "memory");
#endif
}

// An 8x8 matrix of 16-bit elements, row g and columns 2t + {0, 1} in each lane, transposed.
__device__ inline unsigned transpose(unsigned a) {
    unsigned b;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(b) : "r"(a));
    return b;
}

// The 4x4 words of four neighbouring lanes, a row each, transposed.
__device__ inline void transpose_words(unsigned (&x)[4]) {
#pragma unroll
    for (int distance = 2; distance > 0; distance /= 2) {
        const bool upper = threadIdx.x & distance;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & distance) continue;
            unsigned &low = x[i], &high = x[i + distance];
            const unsigned other = __shfl_xor_sync(0xffffffffu, upper ? low : high, distance);
            low = upper ? other : low, high = upper ? high : other;
        }
    }
}

}  // namespace swiftapex
