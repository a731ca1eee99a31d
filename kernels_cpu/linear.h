// y = x * w^T + bias + residual for few rows of x: w is read from memory once, everything else
// stays in the caches.
//
// A thread takes a range of w's rows (outputs). Its copy of x is packed so that the inner loop
// needs no conversion; a tile of kTileRows x up to kTileColumns outputs shares its loads of w and
// x. float32 sums of kChunk outputs for all n are collected in cache, then bias, residual and
// rounding follow with full vectors.
#pragma once

#include "kernels_cpu/kernel_table.h"
#include "kernels_cpu/share.h"

namespace swiftapex::SWIFTAPEX_ISA {

constexpr int kTileColumns = 4;                      // rows of x
constexpr int kTileRows = kRegisters >= 32 ? 4 : 2;  // rows of w
constexpr int64_t kChunk = 64;                       // rows of w between two epilogues
constexpr int64_t kDepth = 2048;                     // of k: 64 rows of packed x fit in L2
constexpr int64_t kLine = 64;                        // bytes of a cache line

// How a tile multiplies: here in float32. Packed x and w come in the same order of lanes.
template <class T>
struct FmaDot {
    using Weight = T;
    using Packed = float;
    static constexpr int kStep = 2 * kWidth;  // elements of k
    struct Lanes {
        F32 a, b;
    };
    static Lanes load_weight(const T* w) {
        Lanes x;
        load_pair(w, x.a, x.b);
        return x;
    }
    static Lanes load_weight(const T* w, int n) {
        Lanes x;
        load_pair_partial(w, n, x.a, x.b);
        return x;
    }
    static F32 dot(Lanes w, const float* x, F32 sum) {
        return fma(w.b, load(x + kWidth), fma(w.a, load(x), sum));
    }
    static void pack(const T* x, int n, float* packed) {
        const Lanes lanes = n == kStep ? load_weight(x) : load_weight(x, n);
        store(packed, lanes.a);
        store(packed + kWidth, lanes.b);
    }
};

constexpr int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

// Copies x [n, in] to packed [n, round_up(in, kStep)], zero past the end.
template <class Dot>
inline void pack_rows(const LinearArgs& args, typename Dot::Packed* packed) {
    const int64_t stride = round_up(args.in, Dot::kStep);
    for (int64_t row = 0; row < args.n; ++row) {
        const auto* x = static_cast<const typename Dot::Weight*>(args.x) + row * args.x_stride;
        for (int64_t k = 0; k < args.in; k += Dot::kStep) {
            const int64_t left = args.in - k;
            Dot::pack(x + k, left < Dot::kStep ? int(left) : Dot::kStep, packed + row * stride + k);
        }
    }
}

// sums[column * kChunk + row] += w[row, 0..depth) . x[column, 0..depth) for one tile.
// `ahead`: elements from a line of w to the one that is prefetched meanwhile.
template <class Dot, int kRows, int kColumns>
inline void tile(const typename Dot::Weight* w, int64_t w_stride, const typename Dot::Packed* x,
                 int64_t x_stride, int64_t depth, int64_t ahead, float* sums) {
    F32 acc[kRows * kColumns];
    for (F32& sum : acc) sum = zero();
    int64_t k = 0;
    for (; k + Dot::kStep <= depth; k += Dot::kStep) {
        typename Dot::Lanes lanes[kRows];
        for (int r = 0; r < kRows; ++r) {
            const typename Dot::Weight* line = w + r * w_stride + k;
            if (ahead != 0) {
                for (int64_t byte = 0; byte < int64_t(Dot::kStep * sizeof(*w)); byte += kLine) {
                    prefetch(line + ahead + byte / int64_t(sizeof(*w)));
                }
            }
            lanes[r] = Dot::load_weight(line);
        }
        for (int c = 0; c < kColumns; ++c) {
            for (int r = 0; r < kRows; ++r) {
                acc[c * kRows + r] = Dot::dot(lanes[r], x + c * x_stride + k, acc[c * kRows + r]);
            }
        }
    }
    if (k < depth) {
        for (int r = 0; r < kRows; ++r) {
            const auto lanes = Dot::load_weight(w + r * w_stride + k, int(depth - k));
            for (int c = 0; c < kColumns; ++c) {
                acc[c * kRows + r] = Dot::dot(lanes, x + c * x_stride + k, acc[c * kRows + r]);
            }
        }
    }
    float totals[(kRows * kColumns + kWidth - 1) / kWidth * kWidth];
    for (int i = 0; i < kRows * kColumns; i += kWidth) {
        F32 group[kWidth];
        for (int j = 0; j < kWidth; ++j) group[j] = i + j < kRows * kColumns ? acc[i + j] : zero();
        store(totals + i, transpose_sum(group));
    }
    for (int c = 0; c < kColumns; ++c) {
        for (int r = 0; r < kRows; ++r) sums[c * kChunk + r] += totals[c * kRows + r];
    }
}

// All columns of one row block.
template <class Dot, int kRows>
inline void row_block(const typename Dot::Weight* w, int64_t w_stride,
                      const typename Dot::Packed* x, int64_t x_stride, int64_t n, int64_t depth,
                      int64_t ahead, float* sums) {
    int64_t c = 0;
    for (; c + kTileColumns <= n; c += kTileColumns) {
        tile<Dot, kRows, kTileColumns>(w, w_stride, x + c * x_stride, x_stride, depth,
                                       c == 0 ? ahead : 0, sums + c * kChunk);
    }
    const auto* rest = x + c * x_stride;
    if (c != 0) ahead = 0;
    sums += c * kChunk;
    if (n - c == 3) tile<Dot, kRows, 3>(w, w_stride, rest, x_stride, depth, ahead, sums);
    if (n - c == 2) tile<Dot, kRows, 2>(w, w_stride, rest, x_stride, depth, ahead, sums);
    if (n - c == 1) tile<Dot, kRows, 1>(w, w_stride, rest, x_stride, depth, ahead, sums);
}

// sums [n][kChunk] of outputs [first, first + count) -> y. The product is rounded to T before the
// residual is added, as separate operations would.
template <class T>
inline void finish(const LinearArgs& args, const float* sums, int64_t first, int64_t count) {
    const T* bias = static_cast<const T*>(args.bias);
    for (int64_t row = 0; row < args.n; ++row) {
        T* y = static_cast<T*>(args.y) + row * args.y_stride + first;
        const T* residual = static_cast<const T*>(args.residual);
        if (residual != nullptr) residual += row * args.residual_stride + first;
        for_vectors(count, [&](int64_t i, int lanes) {
            F32 sum = load(sums + row * kChunk + i);
            if (bias != nullptr) sum = add(sum, load_lanes(bias + first + i, lanes));
            if (residual != nullptr) {
                sum = add(rounded<T>(sum), load_lanes(residual + i, lanes));
            }
            store_lanes(y + i, lanes, sum);
        });
    }
}

// Scratch: packed x, then sums; kernels_cpu/launch.cpp provides enough for any instruction set.
template <class Dot>
inline void linear(const LinearArgs& args, void* scratch, int thread, int num_threads) {
    using T = typename Dot::Weight;
    const Range rows = share(args.out, kTileRows, thread, num_threads);
    if (rows.begin == rows.end) return;
    const int64_t x_stride = round_up(args.in, Dot::kStep), w_stride = args.weight_stride;
    auto* x = static_cast<typename Dot::Packed*>(scratch);
    float* sums = reinterpret_cast<float*>(static_cast<char*>(scratch) +
                                           round_up(args.n * x_stride * sizeof(*x), kLine));
    pack_rows<Dot>(args, x);
    // Short rows: prefetch the next row block; long ones: further on in the same row.
    const int64_t row_bytes = args.in * int64_t(sizeof(T));
    const int64_t ahead = row_bytes <= 4096 ? kTileRows * w_stride : 1024 / int64_t(sizeof(T));
    for (int64_t first = rows.begin; first < rows.end; first += kChunk) {
        const int64_t count = rows.end - first < kChunk ? rows.end - first : kChunk;
        for (int64_t i = 0; i < args.n * kChunk; ++i) sums[i] = 0.0f;
        for (int64_t k = 0; k < args.in; k += kDepth) {
            const int64_t depth = args.in - k < kDepth ? args.in - k : kDepth;
            const T* w = static_cast<const T*>(args.weight) + first * w_stride + k;
            int64_t r = 0;
            for (; r + kTileRows <= count; r += kTileRows) {
                row_block<Dot, kTileRows>(w + r * w_stride, w_stride, x + k, x_stride, args.n,
                                          depth, ahead, sums + r);
            }
            for (; r < count; ++r) {
                row_block<Dot, 1>(w + r * w_stride, w_stride, x + k, x_stride, args.n, depth, ahead,
                                  sums + r);
            }
        }
        finish<T>(args, sums, first, count);
    }
}

}  // namespace swiftapex::SWIFTAPEX_ISA
