// Logits of bfloat16 K with AMX tiles: 16 tokens x 16 heads x 32 of head_dim per instruction. Tile
// A is loaded straight from the K plane; tile B holds the query heads, packed once per piece, as
// two bfloat16 terms unless the activations are bfloat16 themselves: then q is exact. For few heads
// the multiply-adds are faster, because tile loads wait for the second-level cache.
#pragma once

#include <immintrin.h>
#include <string.h>

namespace swiftapex::SWIFTAPEX_ISA {

struct alignas(64) ScoreTiles {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int num_rows, int bytes) {
        rows[tile] = uint8_t(num_rows);
        row_bytes[tile] = uint16_t(bytes);
    }
};

template <class A>
constexpr int kQueryTerms = 2;
template <>
constexpr int kQueryTerms<BFloat16> = 1;

template <>
struct Scores<BFloat16> {
    using Fma = FmaScores<BFloat16>;
    template <int Heads>
    static constexpr bool kUseTiles = Heads >= 5;
    template <int Heads>
    using Shape = TileShape<Heads, kUseTiles<Heads>>;
    static constexpr int kQueryRows = 2;  // two terms of 8 heads take less than 2 * 5 rows

    template <int Heads>
    static float remaining_scale(float scale) {
        return kUseTiles<Heads> ? scale : 1.0f;
    }

    // rows: [term][head_dim / 2][kPadded] pairs of bfloat16.
    template <int Heads, class A>
    static void pack_queries(const A* q, int head_dim, float* rows) {
        constexpr int kPadded = Shape<Heads>::kPadded;
        const int pairs = head_dim / 2;
        BFloat16* packed = reinterpret_cast<BFloat16*>(rows);
        memset(packed, 0, size_t(kQueryTerms<A>) * pairs * kPadded * 4);
        for (int h = 0; h < Heads; ++h) {
            for (int d = 0; d < head_dim; d += 8) {
                F32 x = load_partial(q + h * head_dim + d, 8);
                for (int term = 0; term < kQueryTerms<A>; ++term) {
                    BFloat16 part[kWidth];
                    store(part, x);
                    x = sub(x, load(part));
                    BFloat16* out = packed + ((term * pairs + d / 2) * kPadded + h) * 2;
                    for (int i = 0; i < 8; ++i) out[i / 2 * kPadded * 2 + i % 2] = part[i];
                }
            }
        }
    }

    template <int Heads, class A>
    static void read_queries(const A* q, int head_dim, float scale, float* rows) {
        if constexpr (kUseTiles<Heads>) {
            pack_queries<Heads>(q, head_dim, rows);
        } else {
            Fma::read_queries<Heads>(q, head_dim, scale, rows);
        }
    }

    template <int Heads>
    static int steps(int head_dim, int tokens) {
        if constexpr (kUseTiles<Heads>) {
            return (tokens + 31) / 32 * ((head_dim + 31) / 32);
        } else {
            return Fma::steps<Heads>(head_dim, tokens);
        }
    }

    template <int Heads, class A>
    static void score(const BFloat16* k, int head_dim, int tokens, const float* rows,
                      Prefetch ahead, float* scores) {
        if constexpr (kUseTiles<Heads>) {
            score_tiles<Heads, A>(k, head_dim, tokens, rows, ahead, scores);
        } else {
            Fma::score<Heads, A>(k, head_dim, tokens, rows, ahead, scores);
        }
    }

    // Tile state that is in use makes context switches slower.
    static void end() { _tile_release(); }

    // Tiles 0 and 1: C of two times 16 tokens; 2 and 3: A; 4: B. 5 to 7 are A and B of the last
    // step where head_dim is no multiple of 32.
    template <int Heads>
    static void configure(int head_dim) {
        constexpr int kPadded = Shape<Heads>::kPadded;
        const int tail = head_dim % 32;
        ScoreTiles tiles;
        tiles.set(0, 16, kPadded * 4);
        tiles.set(1, 16, kPadded * 4);
        tiles.set(2, 16, 64);
        tiles.set(3, 16, 64);
        tiles.set(4, 16, kPadded * 4);
        if (tail > 0) {
            tiles.set(5, 16, tail * 2);
            tiles.set(6, 16, tail * 2);
            tiles.set(7, tail / 2, kPadded * 4);
        }
        __asm__ volatile("" : : "r"(&tiles) : "memory");  // GCC takes 8 bytes to be read below
        _tile_loadconfig(&tiles);
    }

    template <int Heads, class A>
    static void score_tiles(const BFloat16* k, int head_dim, int tokens, const float* rows,
                            Prefetch ahead, float* scores) {
        constexpr int kPadded = Shape<Heads>::kPadded, kRowBytes = kPadded * 4;
        configure<Heads>(head_dim);
        const int row = head_dim * 2;  // bytes
        for (int token = 0; token < tokens; token += 32) {
            const BFloat16* first = k + int64_t(token) * head_dim;
            const bool two = token + 16 < tokens;
            const BFloat16* second = two ? first + 16 * head_dim : first;
            _tile_zero(0);
            _tile_zero(1);
            for (int d = 0; d < head_dim; d += 32) {
                ahead.step();
                for (int term = 0; term < kQueryTerms<A>; ++term) {
                    const float* b = rows + (term * head_dim + d) / 2 * kPadded;
                    if (head_dim - d >= 32) {
                        if (term == 0) _tile_loadd(2, first + d, row);
                        if (term == 0) _tile_loadd(3, second + d, row);
                        _tile_loadd(4, b, kRowBytes);
                        _tile_dpbf16ps(0, 2, 4);
                        _tile_dpbf16ps(1, 3, 4);
                    } else {
                        if (term == 0) _tile_loadd(5, first + d, row);
                        if (term == 0) _tile_loadd(6, second + d, row);
                        _tile_loadd(7, b, kRowBytes);
                        _tile_dpbf16ps(0, 5, 7);
                        _tile_dpbf16ps(1, 6, 7);
                    }
                }
            }
            _tile_stored(0, scores + token * kPadded, kRowBytes);
            if (two) _tile_stored(1, scores + (token + 16) * kPadded, kRowBytes);
        }
    }
};

}  // namespace swiftapex::SWIFTAPEX_ISA
