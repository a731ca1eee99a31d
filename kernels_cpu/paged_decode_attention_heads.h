// Paged decode attention, one level above the inner loops: rows of heads in and
// out of float32, a group's query heads cut into tiles, and what a tile does
// with one block. Included by every isa/<name>.cpp.
#pragma once

#include "kernels_cpu/paged_decode_attention_tile.h"
#include "kernels_cpu/paged_decode_attention_types.h"
#include "kernels_cpu/quantize.h"

namespace swiftapex::SWIFTAPEX_ISA {

// Rows of one head between a tensor and float32 in T's pair order; A: the
// tensor's dtype.
template <class T, class A>
inline void read_head(const A* x, int head_dim, float scale, float* y) {
    const F32 factor = set1(scale);
    for (int d = 0; d < head_dim; d += kPair) {
        const int n = head_dim - d < kPair ? head_dim - d : kPair;
        F32 a = load_partial(x + d, n < kWidth ? n : kWidth);
        F32 b = n > kWidth ? load_partial(x + d + kWidth, n - kWidth) : zero();
        a = mul(a, factor);
        b = mul(b, factor);
        split_pair<T>(a, b);
        store(y + d, a);
        store(y + d + kWidth, b);
    }
}

template <class T, class A>
inline void write_head(const float* x, int head_dim, float scale, A* y) {
    const F32 factor = set1(scale);
    for (int d = 0; d < head_dim; d += kPair) {
        const int n = head_dim - d < kPair ? head_dim - d : kPair;
        F32 a = mul(load(x + d), factor), b = mul(load(x + d + kWidth), factor);
        join_pair<T>(a, b);
        store_partial(y + d, n < kWidth ? n : kWidth, a);
        if (n > kWidth) store_partial(y + d + kWidth, n - kWidth, b);
    }
}

template <class T>
inline void convert_head(const T* x, int head_dim, T* y) {
    __builtin_memcpy(y, x, size_t(head_dim) * sizeof(T));
}

template <class T, class A>
inline void convert_head(const A* x, int head_dim, T* y) {
    for_vectors(head_dim,
                [&](int64_t i, int lanes) { store_lanes(y + i, lanes, load_lanes(x + i, lanes)); });
}

// The heads of a group are cut into tiles as even as possible: with 4 at most,
// 6 = 3 + 3.
constexpr int kMaxTileHeads = kWidth == 16 ? 8 : 4;

struct HeadTiles {
    int count;
    int least, larger;  // heads of a tile; tiles, the first ones, that have one more

    explicit HeadTiles(int group)
        : count((group + kMaxTileHeads - 1) / kMaxTileHeads),
          least(group / count),
          larger(group % count) {}
    int begin(int tile) const { return least * tile + (tile < larger ? tile : larger); }
    int heads(int tile) const { return least + int(tile < larger); }
    bool are_even() const { return larger == 0; }
};

// Calls body.template run<heads>() with the number of heads as a constant.
template <class Body>
inline void with_tile_heads(int heads, const Body& body) {
    switch (heads) {
        case 1:
            return body.template run<1>();
        case 2:
            return body.template run<2>();
        case 3:
            return body.template run<3>();
        case 4:
            return body.template run<4>();
    }
    if constexpr (kMaxTileHeads == 8) {
        switch (heads) {
            case 5:
                return body.template run<5>();
            case 6:
                return body.template run<6>();
            case 7:
                return body.template run<7>();
            case 8:
                return body.template run<8>();
        }
    }
}

// Logits with fused multiply-adds of float32. Query rows are scaled to base 2 beforehand.
template <class T>
struct FmaScores {
    template <int Heads>
    using Shape = TileShape<Heads, false>;
    static constexpr int kQueryRows = 1;  // of float32 per query head
    using Scales = TokenScales;

    // Of the scale, what queries do not hold and logits are still to be multiplied by.
    template <int Heads, class A>
    static float remaining_scale(float) {
        return 1.0f;
    }

    template <int Heads, class A>
    static void read_queries(const A* q, int head_dim, float scale, float* rows) {
        for (int h = 0; h < Heads; ++h) {
            read_head<T>(q + h * head_dim, head_dim, scale, rows + h * padded_head_dim(head_dim));
        }
    }

    // Called before a thread's pieces, and where tiles of a group differ in heads; after them.
    static void begin(int) {}
    static void end() {}

    template <int Heads>
    static int steps(int head_dim, int tokens) {
        return score_steps<Shape<Heads>>(head_dim, tokens);
    }

    template <int Heads, class A>
    static void score(const T* k, int head_dim, int tokens, const float* rows, Prefetch ahead,
                      float* scores) {
        score_tokens<Shape<Heads>>(k, head_dim, tokens, rows, padded_head_dim(head_dim), ahead,
                                   scores);
    }
};

// How the logits of a KV dtype are computed; an instruction set may specialise it.
template <class T>
struct Scores : FmaScores<T> {};

// Weighted sums of V with fused multiply-adds of float32.
template <class T>
struct FmaValues {
    template <int Heads>
    using Shape = typename Scores<T>::template Shape<Heads>;

    template <int Heads>
    static int steps(int head_dim, int tokens) {
        return value_steps<Shape<Heads>>(head_dim, tokens);
    }

    template <int Heads>
    static void add(const T* v, int head_dim, int tokens, float* weights, const float* rescale,
                    Prefetch ahead, float* values, int stride) {
        add_values<Shape<Heads>>(v, head_dim, tokens, weights, rescale, ahead, values, stride);
    }

    // Puts a tile's values, once all are added, into the order of vector pairs.
    template <int Heads>
    static void finish(float*, int) {}
};

// As Scores.
template <class T>
struct Values : FmaValues<T> {};

#ifdef __AVX512BF16__
}  // namespace swiftapex::SWIFTAPEX_ISA
#include "kernels_cpu/paged_decode_attention_dots.h"
#ifdef __AMX_BF16__
#include "kernels_cpu/paged_decode_attention_amx_int8_values.h"
#include "kernels_cpu/paged_decode_attention_amx_values.h"
#endif
namespace swiftapex::SWIFTAPEX_ISA {
#endif

// Attention of a tile's query heads to one block. T: dtype of KV, A: of the activations.
template <class T, class A>
struct BlockRunner {
    const T* k;  // planes [block_size, head_dim]
    const T* v;
    const T* next;  // the planes that are read after these, or null
    int block_size, head_dim, tokens, next_tokens;
    float scale;
    int tile, num_tiles;
    float *queries, *values, *maxima, *sums;  // of the tile's first query head
    float* scores;

    // This tile's part of a plane's bytes that hold `count` tokens.
    int part_begin(int count, int i) const {
        const int size = count * head_dim * int(sizeof(T));
        return i == 0 ? 0 : i == num_tiles ? size : int(int64_t(size) * i / num_tiles);
    }
    int part_groups(int count) const {
        const int size = part_begin(count, tile + 1) - part_begin(count, tile);
        return (size + Prefetch::kGroup - 1) / Prefetch::kGroup;
    }

    // While `plane`, K or V, is read: a half of this tile's part of the next K plane, and of the V
    // plane.
    [[gnu::always_inline]] Prefetch ahead(const T* plane, int steps) const {
        const int groups = next != nullptr ? part_groups(next_tokens) : 0;
        const int half = groups * Prefetch::kGroup / 2;
        const char* next_k = reinterpret_cast<const char*>(next) + part_begin(next_tokens, tile) +
                             (plane == k ? 0 : half);
        const char* next_v = next_k + (v - k) * int64_t(sizeof(T));
        return Prefetch::over({next_k, next_v}, groups, near(plane, plane == k ? v : next), steps);
    }

    // after: the plane that is read after `plane`, or null.
    [[gnu::always_inline]] Prefetch::Near near(const T* plane, const T* after) const {
        const char* end = reinterpret_cast<const char*>(plane + int64_t(tokens) * head_dim);
        const char* at =
            reinterpret_cast<const char*>(plane) + part_begin(tokens, tile) + Prefetch::kNearBytes;
        const int groups = part_groups(tokens);
        if (after == nullptr) {
            const int left = int((end - at + Prefetch::kGroup - 1) / Prefetch::kGroup);
            return {at, end, at, left < 0 ? 0 : left < groups ? left : groups};
        }
        const char* start = reinterpret_cast<const char*>(after);
        if (at < end) return {at, end, start, groups};
        at = start + (at - end);
        return {at, at + groups * Prefetch::kGroup, at, groups};
    }

    void fetch_scales() const {
        for (int i = 0; i < next_tokens; i += 16) {
            prefetch_far(plane_scales(next, block_size, head_dim) + i);
            prefetch_far(plane_scales(next + (v - k), block_size, head_dim) + i);
        }
    }

    template <int Heads>
    void run() const {
        using Shape = typename Scores<T>::template Shape<Heads>;
        alignas(64) float rescale[Shape::kLanes];
        const int steps = Scores<T>::template steps<Heads>(head_dim, tokens);
        const Prefetch while_scoring = ahead(k, steps);
        const Prefetch while_adding = ahead(v, Values<T>::template steps<Heads>(head_dim, tokens));
        Scores<T>::template score<Heads, A>(k, head_dim, tokens, queries, while_scoring, scores);
        const float remaining = Scores<T>::template remaining_scale<Heads, A>(scale);
        if constexpr (kScaleElements<T> > 0) {
            const typename Scores<T>::Scales scales{plane_scales(k, block_size, head_dim),
                                                    plane_scales(v, block_size, head_dim)};
            if (next != nullptr) fetch_scales();
            softmax_tokens<Shape>(scores, tokens, remaining, scales, maxima, sums, rescale);
        } else {
            softmax_tokens<Shape>(scores, tokens, remaining, NoScales{}, maxima, sums, rescale);
        }
        Values<T>::template add<Heads>(v, head_dim, tokens, scores, rescale, while_adding, values,
                                       padded_head_dim(head_dim));
    }
};

// Prepares a tile's query heads and their state for a new piece.
template <class T, class A>
struct StartRunner {
    const A* q;  // of the tile's first query head, as all that follow; null: `queries` has it
    int head_dim;
    float scale;
    float *queries, *values, *maxima, *sums;

    template <int Heads>
    void run() const {
        if (q != nullptr) Scores<T>::template read_queries<Heads>(q, head_dim, scale, queries);
        for (int i = 0; i < Heads * kWidth; i += kWidth) {
            store(maxima + i, set1(-kInfinity));
            store(sums + i, zero());
        }
        for (int i = 0; i < Heads * padded_head_dim(head_dim); i += kWidth) {
            store(values + i, zero());
        }
    }
};

// Writes a tile's output, or keeps what a merge needs of it: its values lie there already.
template <class T, class A>
struct FinishRunner {
    const float *maxima, *sums;  // of the tile's first query head, as all that follow
    float* values;
    int head_dim;
    A* out;                          // null: the tile is a part of a merge
    float *kept_maxima, *kept_sums;  // [heads]

    template <int Heads>
    void run() const {
        using Shape = typename Scores<T>::template Shape<Heads>;
        Values<T>::template finish<Heads>(values, head_dim);
        for (int h = 0; h < Heads; ++h) {
            const int first = h * Shape::kHeadStride;
            float sum = 0.0f;
            for (int t = 0; t < Shape::kTokens; ++t) sum += sums[first + t * Shape::kTokenStride];
            if (out == nullptr) {
                kept_maxima[h] = maxima[first];
                kept_sums[h] = sum;
                continue;
            }
            const float factor = sum > 0.0f ? 1.0f / sum : 0.0f;  // an empty row gives zeros
            write_head<T>(values + h * padded_head_dim(head_dim), head_dim, factor,
                          out + h * head_dim);
        }
    }
};

}  // namespace swiftapex::SWIFTAPEX_ISA
