// Attention to int8 KV with AMX tiles of whole numbers, for 3 to 8 query heads, four at a time. K
// and V are loaded straight from their planes; products and sums are exact, so that the only new
// error is the rounding of queries and weights to whole numbers of 24 bits: those of a head's
// largest query element, and of its largest weight among 32 tokens. A whole number is three bytes,
// its terms.
//
// Logits: 16 tokens x 64 of head_dim x 16 columns per instruction; each term of a query head has a
// column of its own.
//
// Values: 32 tokens x 16 of head_dim per instruction, with V's bytes interleaved by four tokens in
// scratch memory; each term of a head's weights has a row of its own.
#pragma once

#include "kernels_cpu/paged_decode_attention_amx.h"

namespace swiftapex::SWIFTAPEX_ISA {

// Shapes of the tile registers.
//   0: logits of 16 tokens                  3: weights of three terms of four heads x 32 tokens
//   1: four query heads                     4: 8 x 4 tokens of V x 16 of head_dim
//   2: 16 tokens of K x 64 of head_dim      5, 6: values of three terms of four heads x 16
struct alignas(64) Int8Tiles {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 32, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 12, 8, 12, 12};
};

// Tile 2: `rows` of 16 rows x 64 bytes; the others hold anything. The tail of a row that is
// shorter is what lies behind it, in the last row scales: callers multiply it by zero.
struct Int8Rows {
    alignas(64) Int8 copy[16 * 64];

    [[gnu::always_inline]] void load(const Int8* x, int64_t stride, int rows) {
        if (rows >= 16) {
            _tile_loadd(2, x, stride);
            return;
        }
        for (int i = 0; i < rows; ++i) {
            _mm512_store_si512(copy + i * 64, _mm512_loadu_si512(x + i * stride));
        }
        tile_fence();
        _tile_loadd(2, copy, 64);
    }
};

// As TokenScales, and for vectors that hold kPadded heads of each token.
struct SpreadTokenScales {
    static constexpr bool kScaled = true;
    const float* k;
    const float* v;

    template <class Shape>
    static F32 spread(const float* p) {
        if constexpr (Shape::kTokenStride == 1) {
            return repeat<Shape::kTokens>(p);
        } else {
            const __m512i i = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
            const F32 x = repeat<Shape::kTokens>(p);
            return _mm512_permutexvar_ps(Shape::kPadded == 4 ? i : _mm512_srli_epi32(i, 1), x);
        }
    }
    template <class Shape>
    F32 scaled_score(F32 x, int token) const {
        return mul(x, spread<Shape>(k + token));
    }
    template <class Shape>
    F32 scaled_weight(F32 x, int token) const {
        return mul(x, spread<Shape>(v + token));
    }
};

template <>
struct Scores<Int8> {
    using Fma = FmaScores<Int8>;
    template <int Heads>
    static constexpr bool kUseTiles = Heads >= 3;
    template <int Heads>
    using Shape = TileShape<Heads, kUseTiles<Heads>>;
    using Scales = SpreadTokenScales;
    static constexpr int kQueryRows = 4;
    static constexpr int kSteps = 3;  // of a prefetch, per quad, 16 tokens and 64 of head_dim

    static void begin(int) {
        const Int8Tiles tiles;
        __asm__ volatile("" : : "r"(&tiles) : "memory");  // GCC takes 8 bytes to be read below
        _tile_loadconfig(&tiles);
    }
    static void end() { _tile_release(); }

    template <int Heads, class A>
    static float remaining_scale(float) {
        return 1.0f;
    }

    static int chunks(int head_dim) { return (head_dim + 63) / 64; }
    template <int Heads>
    static constexpr int kQuads = (Heads + 3) / 4;

    // rows: [quad][chunk][64 / 4][16 columns] of four bytes, then what a head's whole numbers are
    // to be multiplied by, [16]. A column is (term, head of the quad).
    template <int Heads, class A>
    static void pack_queries(const A* q, int head_dim, float scale, float* rows) {
        constexpr int kPadded = Shape<Heads>::kPadded;
        float* factors = rows + chunks(head_dim) * kQuads<Heads> * 256;
        F32 inverses[Heads];
        store(factors, zero());
        for (int h = 0; h < Heads; ++h) {
            const float factor = whole_unit(q + int64_t(h) * head_dim, head_dim, inverses[h]);
            for (int i = h; i < 16; i += kPadded) factors[i] = factor * scale;
        }
        for (int quad = 0; quad < Heads; quad += 4) {
            for (int d = 0; d < head_dim; d += 64, rows += 256) {
                __m512i columns[16];
                for (__m512i& column : columns) column = _mm512_setzero_si512();
                for (int h = quad; h < Heads && h < quad + 4; ++h) {
                    __m512i terms[3];
                    split_whole(q + int64_t(h) * head_dim + d, head_dim - d, inverses[h], terms);
                    for (int i = 0; i < 3; ++i) columns[i * 4 + h - quad] = terms[i];
                }
                transpose_words(columns);
                for (int i = 0; i < 16; ++i) _mm512_storeu_si512(rows + i * 16, columns[i]);
            }
        }
    }

    // The largest magnitude is 127 * 65536 units; inverse: of a unit. NaN or infinite if one of x
    // is.
    template <class A>
    static float whole_unit(const A* x, int head_dim, F32& inverse) {
        F32 largest = zero(), nothing = zero();
        for_vectors(head_dim, [&](int64_t i, int lanes) {
            const F32 part = load_lanes(x + i, lanes);
            largest = max(largest, max(part, sub(zero(), part)));
            nothing = fma(part, zero(), nothing);
        });
        constexpr float kLargest = 127.0f * 65536.0f;
        const float limit = reduce_max(largest);
        inverse = set1(limit > 0.0f ? kLargest / limit : 0.0f);
        return limit / kLargest + reduce_add(nothing);
    }

    // terms [64] of 8 bits, zero from n on; each is rounded, so that what is left fits 8 bits too.
    template <class A>
    static void split_whole(const A* x, int n, F32 inverse, __m512i (&terms)[3]) {
        __m128i parts[3][4];
        for (int i = 0; i < 4; ++i) {
            const int lanes = n - i * 16 >= 16 ? 16 : n > i * 16 ? n - i * 16 : 0;
            __m512i whole = _mm512_cvtps_epi32(mul(load_lanes(x + i * 16, lanes), inverse));
            for (int term = 2; term >= 0; --term) {
                const __m128i part = _mm512_cvtepi32_epi8(whole);
                whole = _mm512_srai_epi32(_mm512_sub_epi32(whole, _mm512_cvtepi8_epi32(part)), 8);
                parts[term][i] = part;
            }
        }
        for (int term = 0; term < 3; ++term) {
            const __m128i(&x)[4] = parts[term];
            const __m256i low = _mm256_set_m128i(x[1], x[0]), high = _mm256_set_m128i(x[3], x[2]);
            terms[term] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
        }
    }

    // x[i] word j <-> x[j] word i.
    static void transpose_words(__m512i (&x)[16]) {
        for (int i = 0; i < 16; i += 4) transpose_quarters(reinterpret_cast<__m512i(&)[4]>(x[i]));
        for (int i = 0; i < 4; ++i) {
            const __m512i a = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x44);
            const __m512i b = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x44);
            const __m512i c = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xEE);
            const __m512i d = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xEE);
            x[i] = _mm512_shuffle_i32x4(a, b, 0x88);
            x[i + 4] = _mm512_shuffle_i32x4(a, b, 0xDD);
            x[i + 8] = _mm512_shuffle_i32x4(c, d, 0x88);
            x[i + 12] = _mm512_shuffle_i32x4(c, d, 0xDD);
        }
    }

    template <int Heads, class A>
    static void read_queries(const A* q, int head_dim, float scale, float* rows) {
        if constexpr (kUseTiles<Heads>) {
            pack_queries<Heads>(q, head_dim, scale, rows);
        } else {
            Fma::read_queries<Heads>(q, head_dim, scale, rows);
        }
    }

    template <int Heads>
    static int steps(int head_dim, int tokens) {
        if constexpr (kUseTiles<Heads>) {
            return (tokens + 15) / 16 * kQuads<Heads> * chunks(head_dim) * kSteps;
        }
        return Fma::steps<Heads>(head_dim, tokens);
    }

    template <int Heads, class A>
    static void score(const Int8* k, int head_dim, int tokens, const float* rows, Prefetch ahead,
                      float* scores) {
        if constexpr (kUseTiles<Heads>) {
            score_tiles<Heads>(k, head_dim, tokens, rows, ahead, scores);
        } else {
            Fma::score<Heads, A>(k, head_dim, tokens, rows, ahead, scores);
        }
    }

    template <int Heads>
    static void score_tiles(const Int8* k, int head_dim, int tokens, const float* rows,
                            Prefetch ahead, float* scores) {
        constexpr int kPadded = Shape<Heads>::kPadded;
        alignas(64) int32_t products[2][kQuads<Heads>][16 * 16];
        const F32 factors = load(rows + chunks(head_dim) * kQuads<Heads> * 256);
        for (int token = 0; token < tokens; token += 32) {  // two products at a time
            for (int t = token; t < tokens && t < token + 32; t += 16) {
                for (int quad = 0; quad < kQuads<Heads>; ++quad) {
                    multiply(k + int64_t(t) * head_dim, head_dim, tokens - t,
                             rows + quad * chunks(head_dim) * 256, ahead,
                             products[(t - token) / 16][quad]);
                }
            }
            tile_fence();
            for (int t = token; t < tokens && t < token + 32; t += 16) {
                join_terms(products[(t - token) / 16], factors, scores + t * kPadded);
            }
        }
    }

    // products [16 tokens][term, head].
    static void multiply(const Int8* k, int head_dim, int tokens, const float* queries,
                         Prefetch& ahead, int32_t (&products)[256]) {
        Int8Rows loader;
        _tile_zero(0);
        for (int d = 0; d < head_dim; d += 64) {
            ahead.step();
            loader.load(k + d, head_dim, tokens);
            ahead.step();
            _tile_loadd(1, queries, 64);
            queries += 256;
            _tile_dpbssd(0, 2, 1);
            ahead.step();
        }
        _tile_stored(0, products, 64);
    }

    // The products of 4 tokens -> [4 tokens][4 heads].
    static F32 join_quad(const int32_t* products) {
        const __m512i a = _mm512_load_si512(products), b = _mm512_load_si512(products + 16);
        const __m512i c = _mm512_load_si512(products + 32), d = _mm512_load_si512(products + 48);
        const __m512i ab = _mm512_shuffle_i32x4(a, b, 0x44), cd = _mm512_shuffle_i32x4(c, d, 0x44);
        const __m512i high = _mm512_shuffle_i32x4(ab, cd, 0x88);
        const __m512i middle = _mm512_shuffle_i32x4(ab, cd, 0xDD);
        const __m512i low = _mm512_shuffle_i32x4(_mm512_shuffle_i32x4(a, b, 0xEE),
                                                 _mm512_shuffle_i32x4(c, d, 0xEE), 0x88);
        const F32 rest = fma(_mm512_cvtepi32_ps(middle), set1(256.0f), _mm512_cvtepi32_ps(low));
        return fma(_mm512_cvtepi32_ps(high), set1(65536.0f), rest);
    }

    // products [quad][16 tokens][term, head] -> scores [16 tokens][all heads].
    static void join_terms(const int32_t (&products)[1][256], F32 factors, float* scores) {
        for (int t = 0; t < 16; t += 4) {
            store(scores + t * 4, mul(join_quad(products[0] + t * 16), factors));
        }
    }
    static void join_terms(const int32_t (&products)[2][256], F32 factors, float* scores) {
        const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);  // of four tokens
        const __m512i last = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
        for (int t = 0; t < 16; t += 4) {
            const __m512d a = _mm512_castps_pd(join_quad(products[0] + t * 16));
            const __m512d b = _mm512_castps_pd(join_quad(products[1] + t * 16));
            const F32 low = _mm512_castpd_ps(_mm512_permutex2var_pd(a, first, b));
            const F32 high = _mm512_castpd_ps(_mm512_permutex2var_pd(a, last, b));
            store(scores + t * 8, mul(low, factors));
            store(scores + t * 8 + 16, mul(high, factors));
        }
    }
};

}  // namespace swiftapex::SWIFTAPEX_ISA
