// The values of attention to bfloat16 KV with AMX tiles: two terms of 8 heads x 16 of head_dim x 16
// tokens per instruction. B is loaded straight from the V plane. An instruction multiplies pairs
// along a row of B with pairs of A and adds them up; pairs (w, 0) give the even elements of
// head_dim, (0, w) the odd ones, as they lie apart in a vector pair of bfloat16. w is two bfloat16
// terms, which have rows of their own.
#pragma once

#include "kernels_cpu/paged_decode_attention_amx.h"

namespace swiftapex::SWIFTAPEX_ISA {

// [term, head][16 tokens], for the even elements and for the odd ones.
struct alignas(64) WeightTiles {
    uint32_t even[16 * 16], odd[16 * 16];
};

template <>
struct Values<BFloat16> {
    using Fma = FmaValues<BFloat16>;
    template <int Heads>
    static constexpr bool kUseTiles = Scores<BFloat16>::kUseTiles<Heads>;
    static constexpr int kSteps = 8;  // of a prefetch, per 32 tokens and 32 of head_dim
    // Fewer tokens take multiply-adds less time: tile products take as long for one as for 32.
    static constexpr int kMinTokens = 17;

    template <int Heads>
    static int steps(int head_dim, int tokens) {
        if (kUseTiles<Heads> && tokens >= kMinTokens) {
            return (tokens + 31) / 32 * ((head_dim + 31) / 32) * kSteps;
        }
        return Fma::steps<Heads>(head_dim, tokens);
    }

    template <int Heads>
    static void add(const BFloat16* v, int head_dim, int tokens, float* weights,
                    const float* rescale, Prefetch ahead, float* values, int stride) {
        if constexpr (kUseTiles<Heads>) {
            if (tokens >= kMinTokens) {
                return add_tiles<Heads>(v, head_dim, tokens, weights, rescale, ahead, values,
                                        stride);
            }
        }
        Fma::add<Heads>(v, head_dim, tokens, weights, rescale, ahead, values, stride);
    }

    template <int Heads>
    static void finish(float*, int) {}

    // To eight bits, ties away from zero.
    static __m512i rounded_term(__m512i x) {
        return _mm512_and_si512(_mm512_add_epi32(x, _mm512_set1_epi32(0x8000)),
                                _mm512_set1_epi32(int(0xFFFF0000u)));
    }

    // weights [32 tokens][8 heads], zero from `tokens` on, where they mean nothing -> tiles
    // [even tokens | odd ones].
    static void split_weights(float* weights, int tokens, WeightTiles (&tiles)[2]) {
        for (int t = (tokens + 1) / 2 * 2; t < 32; t += 2) store(weights + t * 8, zero());
        for (int parity = 0; parity < 2; ++parity) {
            __m512i low[4], high[4];
            for (int i = 0; i < 4; ++i) {
                // Heads of tokens 2 * i, + 8, + 16, + 24 (+ parity); a vector holds two tokens.
                const auto token = [&](int t) {
                    return _mm512_castsi256_si512(
                        _mm256_loadu_si256((const __m256i*)(weights + (2 * i + t + parity) * 8)));
                };
                const auto join = [](__m512i a, __m512i b) {
                    return _mm512_inserti64x4(a, _mm512_castsi512_si256(b), 1);
                };
                low[i] = join(token(0), token(8));
                high[i] = join(token(16), token(24));
            }
            transpose_quarters(low);
            transpose_quarters(high);
            for (int h = 0; h < 4; ++h) {
                store_terms(_mm512_shuffle_i32x4(low[h], high[h], 0x88), h, tiles[parity]);
                store_terms(_mm512_shuffle_i32x4(low[h], high[h], 0xDD), h + 4, tiles[parity]);
            }
        }
    }

    static void store_terms(__m512i x, int head, WeightTiles& tiles) {
        const __m512i first = rounded_term(x);
        const F32 rest = sub(_mm512_castsi512_ps(x), _mm512_castsi512_ps(first));
        const __m512i second = rounded_term(_mm512_castps_si512(rest));
        _mm512_store_si512(tiles.odd + head * 16, first);
        _mm512_store_si512(tiles.even + head * 16, _mm512_srli_epi32(first, 16));
        _mm512_store_si512(tiles.odd + (head + 8) * 16, second);
        _mm512_store_si512(tiles.even + (head + 8) * 16, _mm512_srli_epi32(second, 16));
    }

    // While the products of 32 of head_dim are under way, those of the 32 before are added up.
    template <int Heads>
    static void add_tiles(const BFloat16* v, int head_dim, int tokens, float* weights,
                          const float* rescale, Prefetch ahead, float* values, int stride) {
        static constexpr float kOnes[8] = {1, 1, 1, 1, 1, 1, 1, 1};
        WeightTiles tiles[2];
        alignas(64) BFloat16 copies[2][16 * 32];
        Products products[2];
        for (int token = 0; token < tokens; token += 32) {
            const int left = tokens - token < 32 ? tokens - token : 32;
            const float* factors = token == 0 ? rescale : kOnes;
            split_weights(weights + token * 8, left, tiles);
            load_weights(tiles);
            for (int d = 0; d < head_dim; d += 32) {
                Products& now = products[d / 32 % 2];
                const BFloat16* from = v + int64_t(token) * head_dim + d;
                if (left == 32 && head_dim - d >= 32) {
                    multiply(from, from + head_dim, head_dim * 4, ahead, now);
                } else {
                    const int64_t two_rows = int64_t(head_dim) * 2;
                    copy_tile(from, two_rows, (left + 1) / 2, head_dim - d, copies[0]);
                    copy_tile(from + head_dim, two_rows, left / 2, head_dim - d, copies[1]);
                    tile_fence();
                    multiply(copies[0], copies[1], 64, ahead, now);
                }
                if (d > 0) {
                    add_products<Heads>(products[(d / 32 + 1) % 2], factors, values + d - 32,
                                        stride);
                }
            }
            const int last = (head_dim - 1) / 32;
            add_products<Heads>(products[last % 2], factors, values + last * 32, stride);
        }
    }

    static void load_weights(const WeightTiles (&tiles)[2]) {
        tile_fence();
        _tile_loadd(4, tiles[0].even, 64);
        _tile_loadd(5, tiles[0].odd, 64);
        _tile_loadd(6, tiles[1].even, 64);
        _tile_loadd(7, tiles[1].odd, 64);
    }

    // [even | odd elements][term, head][16].
    struct alignas(64) Products {
        float even[16 * 16], odd[16 * 16];
    };

    // 32 of head_dim. even, odd: V of such tokens, v_stride bytes between them.
    static void multiply(const BFloat16* even, const BFloat16* odd, int64_t v_stride,
                         Prefetch& ahead, Products& products) {
        _tile_loadd(2, even, v_stride);
        ahead.step();
        _tile_loadd(3, odd, v_stride);
        ahead.step();
        _tile_zero(0);
        _tile_dpbf16ps(0, 4, 2);
        ahead.step();
        _tile_zero(1);
        _tile_dpbf16ps(1, 5, 2);
        ahead.step();
        _tile_dpbf16ps(0, 6, 3);
        ahead.step();
        _tile_dpbf16ps(1, 7, 3);
        ahead.step();
        _tile_stored(0, products.even, 64);
        ahead.step();
        _tile_stored(1, products.odd, 64);
        ahead.step();
        tile_fence();
    }

    // values: 32 of head_dim; factors: of what they are so far.
    template <int Heads>
    static void add_products(const Products& products, const float* factors, float* values,
                             int stride) {
        const auto sum = [](const float* x, int head) {
            return _mm512_add_ps(load(x + head * 16), load(x + (head + 8) * 16));
        };
        for (int h = 0; h < Heads; ++h) {
            const F32 factor = set1(factors[h]);
            float* x = values + h * stride;
            store(x, fma(load(x), factor, sum(products.even, h)));
            store(x + kWidth, fma(load(x + kWidth), factor, sum(products.odd, h)));
        }
    }
};

}  // namespace swiftapex::SWIFTAPEX_ISA
