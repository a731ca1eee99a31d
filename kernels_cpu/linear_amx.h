// linear for bfloat16 with AMX tiles: 16 outputs x 16 rows of x x 32 of k per instruction. Tile A
// is loaded straight from w's rows; tile B comes from packed x; C [16 outputs][16 rows of x].
#pragma once

#include "kernels_cpu/linear.h"

namespace swiftapex::SWIFTAPEX_ISA {

constexpr int kTile = 16;           // rows and float32 columns of a tile
constexpr int64_t kTileDepth = 32;  // of k: 64 bytes of bfloat16

struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// 16 x 16 words: rows[i] word j <-> rows[j] word i.
inline void transpose(__m512i (&rows)[16]) {
    __m512i pairs[16], quads[16];
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    // quads[4 * g + c], 128-bit part q: word 4 * q + c of rows 4 * g to 4 * g + 3.
    for (int i = 0; i < 16; i += 4) {
        quads[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        quads[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        quads[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        quads[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    for (int c = 0; c < 4; ++c) {
        const __m512i low01 = _mm512_shuffle_i32x4(quads[c], quads[c + 4], 0x44);
        const __m512i high01 = _mm512_shuffle_i32x4(quads[c], quads[c + 4], 0xEE);
        const __m512i low23 = _mm512_shuffle_i32x4(quads[c + 8], quads[c + 12], 0x44);
        const __m512i high23 = _mm512_shuffle_i32x4(quads[c + 8], quads[c + 12], 0xEE);
        rows[c] = _mm512_shuffle_i32x4(low01, low23, 0x88);
        rows[c + 4] = _mm512_shuffle_i32x4(low01, low23, 0xDD);
        rows[c + 8] = _mm512_shuffle_i32x4(high01, high23, 0x88);
        rows[c + 12] = _mm512_shuffle_i32x4(high01, high23, 0xDD);
    }
}

inline __mmask32 first_halfwords(int64_t count) {
    return count >= 32 ? ~__mmask32(0) : (__mmask32(1) << count) - 1;
}

// x [n, in] -> packed [n / 16][in / 32][k / 2: 16][row: 16][2], zero past the ends. Pairs along k
// move as 32-bit words.
inline void pack_tiles(const LinearArgs& args, uint32_t* packed) {
    for (int64_t first = 0; first < args.n; first += kTile) {
        const BFloat16* x = static_cast<const BFloat16*>(args.x) + first * args.x_stride;
        for (int64_t k = 0; k < args.in; k += kTileDepth, packed += kTile * kTile) {
            const __mmask32 lanes = first_halfwords(args.in - k);
            __m512i words[kTile];
            for (int r = 0; r < kTile; ++r) {
                words[r] = first + r < args.n
                               ? _mm512_maskz_loadu_epi16(lanes, x + r * args.x_stride + k)
                               : _mm512_setzero_si512();
            }
            transpose(words);
            for (int r = 0; r < kTile; ++r) _mm512_storeu_si512(packed + r * kTile, words[r]);
        }
    }
}

// C tiles 0..3 = A (4, 5: 32 outputs) x B (6, 7: 32 rows of x), summed over k. With one tile of
// outputs or of x the others are left out. `tails` holds the last, partial step of w's rows.
template <int kOutTiles, int kXTiles>
inline void tile_sums(const BFloat16* w, int64_t w_stride, const BFloat16* tails, const uint32_t* x,
                      int64_t steps, int64_t whole_steps, int64_t ahead, float* sums) {
    _tile_zero(0);
    if (kXTiles > 1) _tile_zero(1);
    if (kOutTiles > 1) _tile_zero(2);
    if (kOutTiles > 1 && kXTiles > 1) _tile_zero(3);
    for (int64_t step = 0; step < steps; ++step) {
        const bool whole = step < whole_steps;
        const BFloat16* a = whole ? w + step * kTileDepth : tails;
        const int64_t a_stride = whole ? w_stride : kTileDepth;
        const uint32_t* b = x + step * kTile * kTile;
        if (ahead != 0) {
            for (int r = 0; r < kOutTiles * kTile; ++r) prefetch(a + r * a_stride + ahead);
        }
        _tile_loadd(4, a, a_stride * 2);
        _tile_loadd(6, b, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (kXTiles > 1) {
            _tile_loadd(7, b + steps * kTile * kTile, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (kOutTiles > 1) {
            _tile_loadd(5, a + kTile * a_stride, a_stride * 2);
            _tile_dpbf16ps(2, 5, 6);
            if (kXTiles > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    constexpr int64_t kC = kTile * kTile;
    _tile_stored(0, sums, 64);
    if (kXTiles > 1) _tile_stored(1, sums + kC, 64);
    if (kOutTiles > 1) _tile_stored(2, sums + 2 * kC, 64);
    if (kOutTiles > 1 && kXTiles > 1) _tile_stored(3, sums + 3 * kC, 64);
}

// C tiles [out tile][x tile][16 outputs][16 rows of x] -> sums [n][kChunk]. The first `skip`
// outputs are left out.
inline void unpack_tiles(const float* tiles, int out_tiles, int64_t n, int skip, float* sums) {
    const __mmask16 kept = __mmask16(0xFFFFu << skip);
    for (int o = 0; o < out_tiles; ++o) {
        for (int64_t first = 0; first < n && first < 2 * kTile; first += kTile) {
            const float* c = tiles + (2 * o + first / kTile) * kTile * kTile;
            __m512i words[kTile];
            for (int r = 0; r < kTile; ++r) words[r] = _mm512_loadu_si512(c + r * kTile);
            transpose(words);
            float* row = sums + first * kChunk + o * kTile;
            for (int r = 0; r < kTile && first + r < n; ++r, row += kChunk) {
                _mm512_mask_compressstoreu_epi32(row, kept, words[r]);
            }
        }
    }
}

// Rows of w without a whole step of k at their end: their last elements, padded with zeros.
inline void copy_tails(const BFloat16* w, int64_t w_stride, int64_t in, int rows, BFloat16* tails) {
    const int64_t whole = in / kTileDepth * kTileDepth;
    const __mmask32 mask = first_halfwords(in - whole);
    for (int r = 0; r < rows; ++r) {
        const __m512i tail = _mm512_maskz_loadu_epi16(mask, w + r * w_stride + whole);
        _mm512_store_si512(tails + r * kTileDepth, tail);
    }
}

// sums [n][kChunk] = w rows [0, 16 * kOutTiles) x all rows of x.
template <int kOutTiles>
inline void out_block(const LinearArgs& args, const BFloat16* w, const uint32_t* x, int skip,
                      float* sums) {
    alignas(64) BFloat16 tails[kOutTiles * kTile * kTileDepth];
    alignas(64) float tiles[4 * kTile * kTile];
    const int64_t whole = args.in / kTileDepth, steps = (args.in + kTileDepth - 1) / kTileDepth;
    if (whole < steps) copy_tails(w, args.weight_stride, args.in, kOutTiles * kTile, tails);
    int64_t ahead = kOutTiles * kTile * args.weight_stride;  // the next block of rows
    for (int64_t row = 0; row < args.n; row += 2 * kTile) {
        const uint32_t* b = x + row * steps * kTile;
        const int64_t left = args.n - row;
        if (left > kTile) {
            tile_sums<kOutTiles, 2>(w, args.weight_stride, tails, b, steps, whole, ahead, tiles);
        } else {
            tile_sums<kOutTiles, 1>(w, args.weight_stride, tails, b, steps, whole, ahead, tiles);
        }
        unpack_tiles(tiles, kOutTiles, left, skip, sums + row * kChunk);
        ahead = 0;
    }
}

inline void linear_tiles(const LinearArgs& args, void* scratch, int thread, int num_threads) {
    const Range rows = share(args.out, kTile, thread, num_threads);
    if (rows.begin == rows.end) return;
    const TileConfig config;
    __asm__ volatile("" : : "r"(&config) : "memory");  // GCC takes 8 bytes to be read below
    _tile_loadconfig(&config);
    const int64_t words = round_up(args.n, kTile) * round_up(args.in, kTileDepth) / 2;
    uint32_t* x = static_cast<uint32_t*>(scratch);
    float* sums = reinterpret_cast<float*>(x + words);
    pack_tiles(args, x);
    for (int64_t first = rows.begin; first < rows.end; first += kChunk) {
        const int64_t count = rows.end - first < kChunk ? rows.end - first : kChunk;
        const BFloat16* w = static_cast<const BFloat16*>(args.weight) + first * args.weight_stride;
        int64_t r = 0;
        for (; r + 2 * kTile <= count; r += 2 * kTile) {
            out_block<2>(args, w + r * args.weight_stride, x, 0, sums + r);
        }
        for (; r < count; r += kTile) {
            // The last block of w may be short: it starts earlier and drops the outputs before r.
            const int skip = count - r < kTile ? int(kTile - (count - r)) : 0;
            out_block<1>(args, w + (r - skip) * args.weight_stride, x, skip, sums + r);
        }
        finish<BFloat16>(args, sums, first, count);
    }
    _tile_release();
}

// Few rows leave the memory as the bottleneck however they are computed: there the exact products
// of the float32 kernel cost nothing.
inline void linear_bfloat16(const LinearArgs& args, void* scratch, int thread, int num_threads) {
    if (args.n <= 2 || args.out < kTile) {
        linear<FmaDot<BFloat16>>(args, scratch, thread, num_threads);
    } else {
        linear_tiles(args, scratch, thread, num_threads);
    }
}

}  // namespace swiftapex::SWIFTAPEX_ISA
