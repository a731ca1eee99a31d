// Attention to bfloat16 KV with AMX tiles, for 5 to 8 query heads: registers, and the logits. For
// fewer heads vectors are faster.
//
// 16 tokens x 16 columns x 32 of head_dim per instruction. A is loaded straight from the K plane; B
// holds the query heads, packed once per piece: a column per head and bfloat16 term. Activations
// in bfloat16 have one term, others two.
#pragma once

#include <immintrin.h>
#include <string.h>

#include "kernels_cpu/paged_decode_attention_dots.h"

namespace swiftapex::SWIFTAPEX_ISA {

// All tile registers have 16 rows of 64 bytes. Changing shapes takes as long as ten tile products,
// so the logits and the values share them.
//   logits: 0: of 16 tokens; 1: query heads; 2: 16 rows of K x 32 of head_dim
//   values: 0, 1: of the heads' terms x 16 of head_dim; 2, 3: 16 rows of V x 32 of head_dim;
//           4 to 7: weights of the heads' terms x 16 tokens
struct alignas(64) AttentionTiles {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// GCC does not know what memory the tile instructions read.
inline void tile_fence() { __asm__ volatile("" : : : "memory"); }

// The first `rows` of 16 rows that lie `stride` apart, n of 32 elements each, and zeros.
inline void copy_tile(const BFloat16* x, int64_t stride, int rows, int n, BFloat16* tile) {
    const __mmask32 lanes = n >= 32 ? ~__mmask32(0) : (__mmask32(1) << n) - 1;
    for (int i = 0; i < 16; ++i) {
        const __mmask32 wanted = i < rows ? lanes : 0;
        _mm512_store_si512(tile + i * 32, _mm512_maskz_loadu_epi16(wanted, x + i * stride));
    }
}

// In each quarter: x[i] word j <-> x[j] word i.
inline void transpose_quarters(__m512i (&x)[4]) {
    const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
    const __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
    x[0] = _mm512_unpacklo_epi64(a, c);
    x[1] = _mm512_unpackhi_epi64(a, c);
    x[2] = _mm512_unpacklo_epi64(b, d);
    x[3] = _mm512_unpackhi_epi64(b, d);
}

template <>
struct Scores<BFloat16> {
    using Vectors = DotScores;  // for fewer heads
    template <int Heads>
    static constexpr bool kUseTiles = Heads >= 5;
    template <int Heads>
    using Shape = TileShape<Heads, kUseTiles<Heads>>;
    static constexpr int kQueryRows = 2;  // 16 columns take 8 rows of float32
    static constexpr int kSteps = 4;      // of a prefetch, per 16 tokens and 32 of head_dim

    static void begin(int) {
        const AttentionTiles tiles;
        __asm__ volatile("" : : "r"(&tiles) : "memory");  // GCC takes 8 bytes to be read below
        _tile_loadconfig(&tiles);
    }

    template <int Heads, class A>
    static float remaining_scale(float scale) {
        return kUseTiles<Heads> ? scale : Vectors::remaining_scale<Heads, A>(scale);
    }

    // rows: [padded head_dim / 2][term, head] pairs of bfloat16; unused columns are zero.
    template <int Heads, class A>
    static void pack_queries(const A* q, int head_dim, float* rows) {
        for (int d = 0; d < padded_head_dim(head_dim); d += 32) {
            const int n = head_dim - d < 32 ? head_dim - d : 32;
            __m512i terms[2][8];
            for (auto& term : terms) {
                for (__m512i& x : term) x = _mm512_setzero_si512();
            }
            for (int h = 0; h < Heads; ++h) {
                query_terms(q + int64_t(h) * head_dim + d, n, h, terms);
            }
            for (int term = 0; term < 2; ++term)
                store_columns(terms[term], rows + d * 8 + term * 8);
        }
    }

    // 32 elements of head h, zero from n on.
    static void query_terms(const BFloat16* q, int n, int h, __m512i (&terms)[2][8]) {
        terms[0][h] = _mm512_maskz_loadu_epi16(__mmask32((uint64_t{1} << n) - 1), q);
    }
    template <class A>
    static void query_terms(const A* q, int n, int h, __m512i (&terms)[2][8]) {
        F32 x[2];
        load_pair_partial(q, n, x[0], x[1]);
        for (auto& term : terms) {
            BFloat16 part[2 * kWidth];
            for (int i = 0; i < 2; ++i) {
                store(part + i * kWidth, x[i]);
                x[i] = sub(x[i], load(part + i * kWidth));
            }
            term[h] = _mm512_loadu_si512(part);
        }
    }

    // out[i * 16 + h] = word i of x[h], for 16 words.
    static void store_columns(const __m512i (&x)[8], float* out) {
        __m512i low[4] = {x[0], x[1], x[2], x[3]}, high[4] = {x[4], x[5], x[6], x[7]};
        transpose_quarters(low);  // word i of quarter k: word 4 * k + j of x[i] in low[j]
        transpose_quarters(high);
        for (int j = 0; j < 4; ++j) {
            const __m512i pairs[2] = {_mm512_shuffle_i32x4(low[j], high[j], 0x44),
                                      _mm512_shuffle_i32x4(low[j], high[j], 0xEE)};
            for (int k = 0; k < 4; ++k) {  // the quarters k and k + 2 of a pair are a row
                const __m512i row = _mm512_permutex2var_epi64(
                    pairs[k / 2],
                    k % 2 == 0 ? _mm512_setr_epi64(0, 1, 4, 5, 0, 1, 4, 5)
                               : _mm512_setr_epi64(2, 3, 6, 7, 2, 3, 6, 7),
                    pairs[k / 2]);
                _mm256_storeu_si256((__m256i*)(out + (4 * k + j) * 16),
                                    _mm512_castsi512_si256(row));
            }
        }
    }

    template <int Heads, class A>
    static void read_queries(const A* q, int head_dim, float scale, float* rows) {
        if constexpr (kUseTiles<Heads>) {
            pack_queries<Heads>(q, head_dim, rows);
        } else {
            Vectors::read_queries<Heads>(q, head_dim, scale, rows);
        }
    }

    template <int Heads>
    static int steps(int head_dim, int tokens) {
        if constexpr (kUseTiles<Heads>) {
            return (tokens + 15) / 16 * ((head_dim + 31) / 32) * kSteps;
        } else {
            return Vectors::steps<Heads>(head_dim, tokens);
        }
    }

    template <int Heads, class A>
    static void score(const BFloat16* k, int head_dim, int tokens, const float* rows,
                      Prefetch ahead, float* scores) {
        if constexpr (kUseTiles<Heads>) {
            score_tiles<Heads, A>(k, head_dim, tokens, rows, ahead, scores);
        } else {
            Vectors::score<Heads, A>(k, head_dim, tokens, rows, ahead, scores);
        }
    }

    // Tile state that is in use makes context switches slower.
    static void end() { _tile_release(); }

    template <int Heads, class A>
    static void score_tiles(const BFloat16* k, int head_dim, int tokens, const float* rows,
                            Prefetch ahead, float* scores) {
        alignas(64) BFloat16 copy[16 * 32];
        alignas(64) float products[2][16 * 16];
        for (int token = 0; token < tokens; token += 32) {  // two products at a time
            for (int t = token; t < tokens && t < token + 32; t += 16) {
                const BFloat16* first = k + int64_t(t) * head_dim;
                _tile_zero(0);
                for (int d = 0; d < head_dim; d += 32) {
                    if (head_dim - d >= 32) {
                        _tile_loadd(2, first + d, int64_t(head_dim) * 2);
                    } else {
                        copy_tile(first + d, head_dim, 16, head_dim - d, copy);
                        tile_fence();
                        _tile_loadd(2, copy, 64);
                    }
                    ahead.step();
                    _tile_loadd(1, rows + d * 8, 64);
                    ahead.step();
                    _tile_dpbf16ps(0, 2, 1);
                    ahead.step();
                    ahead.step();
                }
                _tile_stored(0, products[(t - token) / 16], 64);
            }
            tile_fence();
            for (int t = token; t < tokens && t < token + 32; t += 16) {
                join_terms<A>(products[(t - token) / 16], scores + t * 8);
            }
        }
    }

    // products [16 tokens][term, head] -> scores [16 tokens][head].
    template <class A>
    static void join_terms(const float (&products)[256], float* scores) {
        for (int t = 0; t < 16; t += 2) {
            const F32 a = load(products + t * 16), b = load(products + t * 16 + 16);
            F32 sum = _mm512_shuffle_f32x4(a, b, 0x44);
            if constexpr (kQueryTerms<A> == 2) sum = add(sum, _mm512_shuffle_f32x4(a, b, 0xEE));
            store(scores + t * 8, sum);
        }
    }
};

}  // namespace swiftapex::SWIFTAPEX_ISA
