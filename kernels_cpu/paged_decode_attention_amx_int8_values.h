// The values of attention to int8 KV with AMX tiles; paged_decode_attention_amx_int8.h says how.
#pragma once

#include "kernels_cpu/paged_decode_attention_amx_int8.h"

namespace swiftapex::SWIFTAPEX_ISA {

template <>
struct Values<Int8> {
    using Fma = FmaValues<Int8>;
    template <int Heads>
    static constexpr bool kUseTiles = Scores<Int8>::kUseTiles<Heads>;

    // Of four heads: [term, head][token].
    struct alignas(64) WeightTile {
        int8_t bytes[12][32];
    };
    // V of 32 tokens x 64 of head_dim: [block][token / 4][column][token % 4]; columns 4 * i to
    // 4 * i + 3 of block j are the elements from 16 * i + 4 * j on.
    struct alignas(64) ValueTiles {
        int8_t bytes[4][8][64];
    };
    // [block][term, head][column].
    using Products = int32_t[4][12 * 16];

    template <int Heads>
    static int steps(int head_dim, int tokens) {
        if constexpr (kUseTiles<Heads>) {
            return (tokens + 3) / 4 * Scores<Int8>::chunks(head_dim);
        }
        return Fma::steps<Heads>(head_dim, tokens);
    }

    static constexpr float kLargest = 16776960.0f;  // of three bytes; rounding must not exceed them

    // Until finish() the values of 64 of head_dim lie as [block][column].
    template <int Heads>
    static void add(const Int8* v, int head_dim, int tokens, float* weights, const float* rescale,
                    Prefetch ahead, float* values, int stride) {
        if constexpr (kUseTiles<Heads>) {
            add_tiles<Heads>(v, head_dim, tokens, weights, rescale, ahead, values, stride);
        } else {
            Fma::add<Heads>(v, head_dim, tokens, weights, rescale, ahead, values, stride);
        }
    }

    template <int Heads>
    static void add_tiles(const Int8* v, int head_dim, int tokens, float* weights,
                          const float* rescale, Prefetch ahead, float* values, int stride) {
        using Shape = Scores<Int8>::Shape<Heads>;
        constexpr int kPadded = Shape::kPadded, kQuads = Scores<Int8>::kQuads<Heads>;
        WeightTile tiles[kQuads];
        ValueTiles columns;
        alignas(64) Products products[kQuads];
        alignas(64) float units[kWidth];  // that a head's weights are whole numbers of
        for (int token = 0; token < tokens; token += 32) {
            const int left = tokens - token < 32 ? tokens - token : 32;
            const float* factors = token == 0 ? rescale : nullptr;
            split_weights<Shape>(weights + token * kPadded, left, tiles, units);
            for (int d = 0; d < head_dim; d += 64) {
                interleave(v + int64_t(token) * head_dim + d, head_dim, left, ahead, columns);
                tile_fence();
                for (int quad = 0; quad < kQuads; ++quad) {
                    multiply(columns, tiles[quad], products[quad]);
                }
                tile_fence();
                add_products<Heads>(products, units, factors, stride - d, values + d, stride);
            }
        }
    }

    // weights [32 tokens][kPadded], of which `tokens` mean something -> tiles [quad].
    template <class Shape>
    static void split_weights(float* weights, int tokens, WeightTile* tiles, float* units) {
        constexpr int kPadded = Shape::kPadded;
        float* end = weights + 32 * kPadded;
        for (float* rest = weights + tokens * kPadded; rest < end; rest += kWidth) {
            store_partial(rest, end - rest < kWidth ? int(end - rest) : kWidth, zero());
        }
        F32 largest = zero(), nothing = zero();  // nothing: NaN where a weight is not finite
        for (const float* w = weights; w < end; w += kWidth) {
            largest = max(largest, load(w));
            nothing = fma(load(w), zero(), nothing);
        }
        largest = max(max_over_tokens<Shape>(largest), set1(1e-30f));
        const F32 inverse = div(set1(kLargest), largest);
        nothing = sub(nothing, swap_lanes<8>(nothing));  // of all tokens
        if (kPadded == 4) nothing = sub(nothing, swap_lanes<4>(nothing));
        store(units, fma(largest, set1(1.0f / kLargest), nothing));
        for (int half = 0; half < 2; ++half) {
            const float* w = weights + half * 16 * kPadded;
            __m512i x[kPadded];
            for (int i = 0; i < kPadded; ++i) {
                x[i] = _mm512_cvtps_epi32(mul(load(w + i * kWidth), inverse));
            }
            if constexpr (kPadded == 8) part_heads(x);
            for (int first = 0; first < kPadded; first += 4) {
                store_terms(reinterpret_cast<__m512i(&)[4]>(x[first]), half, tiles[first / 4]);
            }
        }
    }

    // [2 tokens][8 heads] each -> [4 tokens][4 heads] each, of heads 0 to 3 and then of 4 to 7.
    static void part_heads(__m512i (&x)[8]) {
        __m512i low[4], high[4];
        for (int i = 0; i < 4; ++i) {
            low[i] = _mm512_shuffle_i32x4(x[2 * i], x[2 * i + 1], 0x88);
            high[i] = _mm512_shuffle_i32x4(x[2 * i], x[2 * i + 1], 0xDD);
        }
        for (int i = 0; i < 4; ++i) {
            x[i] = low[i];
            x[i + 4] = high[i];
        }
    }

    // x: [4 tokens][4 heads] each, of 16 tokens.
    static void store_terms(__m512i (&x)[4], int half, WeightTile& tile) {
        transpose_quarters(x);  // token 4 * i + j of a head is word 4 * j + i
        const __m512i order =
            _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        for (int h = 0; h < 4; ++h) {
            const __m512i whole = _mm512_permutexvar_epi32(order, x[h]);
            const __m512i terms[3] = {_mm512_srli_epi32(whole, 16), _mm512_srli_epi32(whole, 8),
                                      whole};
            for (int term = 0; term < 3; ++term) {
                _mm_store_si128((__m128i*)(tile.bytes[term * 4 + h] + half * 16),
                                _mm512_cvtepi32_epi8(terms[term]));
            }
        }
    }

    // Rows of columns beyond the tokens hold anything: their weights are zero.
    static void interleave(const Int8* v, int64_t head_dim, int tokens, Prefetch& ahead,
                           ValueTiles& columns) {
        for (int row = 0; row * 4 < tokens; ++row) {
            ahead.step();
            const Int8* x = v + row * 4 * head_dim;
            const int left = tokens - row * 4;
            const __m512i a = _mm512_loadu_si512(x);
            const __m512i b = left > 1 ? _mm512_loadu_si512(x + head_dim) : a;
            const __m512i c = left > 2 ? _mm512_loadu_si512(x + 2 * head_dim) : a;
            const __m512i d = left > 3 ? _mm512_loadu_si512(x + 3 * head_dim) : a;
            const __m512i low_ab = _mm512_unpacklo_epi8(a, b), low_cd = _mm512_unpacklo_epi8(c, d);
            const __m512i high_ab = _mm512_unpackhi_epi8(a, b);
            const __m512i high_cd = _mm512_unpackhi_epi8(c, d);
            _mm512_store_si512(columns.bytes[0][row], _mm512_unpacklo_epi16(low_ab, low_cd));
            _mm512_store_si512(columns.bytes[1][row], _mm512_unpackhi_epi16(low_ab, low_cd));
            _mm512_store_si512(columns.bytes[2][row], _mm512_unpacklo_epi16(high_ab, high_cd));
            _mm512_store_si512(columns.bytes[3][row], _mm512_unpackhi_epi16(high_ab, high_cd));
        }
    }

    static void multiply(const ValueTiles& columns, const WeightTile& weights, Products& products) {
        _tile_loadd(3, weights.bytes, 32);
        for (int block = 0; block < 4; block += 2) {
            _tile_zero(5);
            _tile_loadd(4, columns.bytes[block], 64);
            _tile_dpbusd(5, 3, 4);
            _tile_stored(5, products[block], 64);
            _tile_zero(6);
            _tile_loadd(4, columns.bytes[block + 1], 64);
            _tile_dpbusd(6, 3, 4);
            _tile_stored(6, products[block + 1], 64);
        }
    }

    // values: 64 of head_dim as [block][columns], or the last n; factors: of what they are so far,
    // null: 1.
    template <int Heads, int kQuads>
    static void add_products(const Products (&products)[kQuads], const float* units,
                             const float* factors, int n, float* values, int stride) {
        const int lanes = n < 64 ? n / 4 : 16;
        for (int h = 0; h < Heads; ++h) {
            const F32 unit = set1(units[h]), factor = set1(factors != nullptr ? factors[h] : 1.0f);
            for (int block = 0; block < 4; ++block) {
                const auto term = [&](int i) {
                    return _mm512_load_si512(products[h / 4][block] + (i * 4 + h % 4) * 16);
                };
                const __m512i rest = _mm512_add_epi32(_mm512_slli_epi32(term(1), 8), term(2));
                const F32 sum =
                    fma(_mm512_cvtepi32_ps(term(0)), set1(65536.0f), _mm512_cvtepi32_ps(rest));
                float* x = values + h * stride + block * lanes;
                store_lanes(x, lanes, fma(sum, unit, mul(load_lanes(x, lanes), factor)));
            }
        }
    }

    // Puts a tile's values into the order of vector pairs.
    template <int Heads>
    static void finish(float* values, int head_dim) {
        if constexpr (!kUseTiles<Heads>) return;
        const int stride = padded_head_dim(head_dim);
        for (int h = 0; h < Heads; ++h) {
            for (int d = 0; d < stride; d += 64) {
                order_chunk(values + h * stride + d, stride - d < 64 ? 8 : 16);
            }
        }
    }

    // [block][columns] -> elements in order.
    static void order_chunk(float* values, int lanes) {
        __m512i x[4];
        for (int j = 0; j < 4; ++j) {
            x[j] = _mm512_castps_si512(load_lanes(values + j * lanes, lanes));
        }
        const __m512i a = _mm512_shuffle_i32x4(x[0], x[1], 0x44);
        const __m512i b = _mm512_shuffle_i32x4(x[2], x[3], 0x44);
        const __m512i c = _mm512_shuffle_i32x4(x[0], x[1], 0xEE);
        const __m512i d = _mm512_shuffle_i32x4(x[2], x[3], 0xEE);
        _mm512_storeu_si512(values, _mm512_shuffle_i32x4(a, b, 0x88));
        _mm512_storeu_si512(values + 16, _mm512_shuffle_i32x4(a, b, 0xDD));
        if (lanes == 8) return;
        _mm512_storeu_si512(values + 32, _mm512_shuffle_i32x4(c, d, 0x88));
        _mm512_storeu_si512(values + 48, _mm512_shuffle_i32x4(c, d, 0xDD));
    }
};

}  // namespace swiftapex::SWIFTAPEX_ISA
