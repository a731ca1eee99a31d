// Paged decode attention: a thread's pieces, and the merge of split rows.
// Included by every isa/<name>.cpp.
//
// A piece walks its blocks in the outer loop and the kv heads inside, so that
// it reads memory in the order in which it lies there:
// [block][kv_head][K|V][token][head_dim].
#pragma once

#include "kernels_cpu/paged_decode_attention_heads.h"

namespace swiftapex::SWIFTAPEX_ISA {

// A thread's working memory for one piece, in float32; H: q heads of the piece.
struct DecodeScratch {
    float* queries;  // [H, kMaxQueryRows, padded head_dim], as Scores<T> wants them
    float* values;   // [H, padded head_dim], unnormalised, in T's pair order
    float* maxima;   // [H, kWidth]: a tile's lanes begin at its first head
    float* sums;     // [H, kWidth]
    float* scores;   // [kMaxBlockSize * 8], of one tile and block
};

inline DecodeScratch decode_scratch(const DecodeAttentionArgs& args, void* memory) {
    const int64_t row = int64_t(args.q_heads) * padded_head_dim(args.head_dim);
    const int64_t lanes = int64_t(args.q_heads) * kWidth;
    float* queries = static_cast<float*>(memory);
    float* values = queries + row * kMaxQueryRows;
    float* maxima = values + row;
    return {queries, values, maxima, maxima + lanes, maxima + 2 * lanes};
}

// T: dtype of KV, A: of q, k, v and out.
template <class T, class A>
struct DecodePieceRunner {
    const DecodeAttentionArgs& args;
    const DecodePlanView& plan;
    const DecodeScratch scratch;
    const HeadTiles tiles{args.q_heads / args.kv_heads};

    int group() const { return args.q_heads / args.kv_heads; }
    int padded() const { return padded_head_dim(args.head_dim); }
    float base2_scale() const { return args.scale * 1.44269504088896341f; }  // log2(e)

    // The K plane of a block and kv head; its V plane follows.
    T* plane(const DecodePiece& piece, int block, int head) const {
        const int64_t id = args.block_table[piece.row * args.block_table_stride + block];
        const int64_t plane_size = plane_elements<T>(args.block_size, args.head_dim);
        return static_cast<T*>(args.kv) + (id * args.kv_heads + head) * 2 * plane_size;
    }

    float* queries(int64_t h) const {
        return scratch.queries + h * Scores<T>::kQueryRows * padded();
    }

    // Of the piece's query head h: a split row's values stay where the merge finds them.
    float* values(const DecodePiece& piece, int64_t h) const {
        if (piece.slot < 0) return scratch.values + h * padded();
        return partial_values(piece.slot + h / group(), int(h % group()));
    }
    float* partial_values(int64_t slot, int g) const {
        return plan.partial + slot * plan.partial_stride + g * padded();
    }
    // Maximum, and group() further sum, of a slot's q head g.
    float* partial_state(int64_t slot, int g) const { return partial_values(slot, group()) + g; }

    // before: the piece whose queries are in scratch memory, or null.
    void begin(const DecodePiece& piece, const DecodePiece* before) const {
        const bool has_queries = before != nullptr && before->row == piece.row &&
                                 before->head_begin == piece.head_begin &&
                                 before->head_end == piece.head_end;
        const A* q = static_cast<const A*>(args.q) + piece.row * args.q_stride +
                     int64_t(piece.head_begin) * group() * args.head_dim;
        for_tiles(piece, [&](int heads, int64_t h) {
            with_tile_heads(
                heads, StartRunner<T, A>{has_queries ? nullptr : q + h * args.head_dim,
                                         args.head_dim, base2_scale(), queries(h), values(piece, h),
                                         scratch.maxima + h * kWidth, scratch.sums + h * kWidth});
        });
    }

    // Calls body(heads, h) for the tiles of all the piece's heads; h: a tile's first query head,
    // counted from the piece's first one.
    template <class Body>
    void for_tiles(const DecodePiece& piece, Body body) const {
        int64_t h = 0;
        for (int head = piece.head_begin; head < piece.head_end; ++head) {
            for (int i = 0; i < tiles.count; ++i) {
                const int heads = tiles.heads(i);
                body(heads, h);
                h += heads;
            }
        }
    }

    // Just before the block is read, when most of its lines are on their way
    // already.
    void append(const DecodePiece& piece, int head, T* k_plane) const {
        const int64_t position = (piece.token_end - 1) % args.block_size;
        const int64_t source = int64_t(head) * args.head_dim;
        T* v_plane = k_plane + plane_elements<T>(args.block_size, args.head_dim);
        append_row(static_cast<const A*>(args.k) + piece.row * args.k_stride + source, k_plane,
                   position);
        append_row(static_cast<const A*>(args.v) + piece.row * args.v_stride + source, v_plane,
                   position);
    }

    void append_row(const A* x, T* plane, int64_t position) const {
        T* row = plane + position * args.head_dim;
        if constexpr (kScaleElements<T> > 0) {
            const float scale = quantize_row(x, args.head_dim, row);
            const_cast<float*>(plane_scales(plane, args.block_size, args.head_dim))[position] =
                scale;
        } else {
            convert_head(x, args.head_dim, row);
        }
    }

    int block_tokens(const DecodePiece& piece, int block) const {
        const int left = piece.token_end - block * args.block_size;
        return left < args.block_size ? left : args.block_size;
    }

    // K and V planes, the V plane behind the K plane; `k` may be null.
    struct Planes {
        T* k;
        int tokens;
    };
    Planes first_planes(const DecodePiece& piece) const {
        const int block = piece.token_begin / args.block_size;
        return {plane(piece, block, piece.head_begin), block_tokens(piece, block)};
    }

    // next: the first planes of the thread's next piece.
    void attend(const DecodePiece& piece, const Planes& next) const {
        const int64_t plane_size = plane_elements<T>(args.block_size, args.head_dim);
        const int block_end = (piece.token_end + args.block_size - 1) / args.block_size;
        for (int block = piece.token_begin / args.block_size; block < block_end; ++block) {
            const bool last = block + 1 == block_end;
            Planes now{plane(piece, block, piece.head_begin), block_tokens(piece, block)};
            const Planes next_block = last ? next
                                           : Planes{plane(piece, block + 1, piece.head_begin),
                                                    block_tokens(piece, block + 1)};
            for (int head = piece.head_begin; head < piece.head_end; ++head) {
                const Planes after = head + 1 < piece.head_end
                                         ? Planes{now.k + 2 * plane_size, now.tokens}
                                         : next_block;
                if (piece.appends && last) append(piece, head, now.k);
                attend_planes(piece, now, after, head);
                now = after;
            }
        }
    }

    void attend_planes(const DecodePiece& piece, const Planes& now, const Planes& next,
                       int head) const {
        const T* v = now.k + plane_elements<T>(args.block_size, args.head_dim);
        for (int i = 0; i < tiles.count; ++i) {
            const int64_t h = int64_t(head - piece.head_begin) * group() + tiles.begin(i);
            if (!tiles.are_even()) Scores<T>::begin(tiles.heads(i));
            with_tile_heads(
                tiles.heads(i),
                BlockRunner<T, A>{now.k, v, next.k, args.block_size, args.head_dim, now.tokens,
                                  next.tokens, base2_scale(), i, tiles.count, queries(h),
                                  values(piece, h), scratch.maxima + h * kWidth,
                                  scratch.sums + h * kWidth, scratch.scores});
        }
    }

    void finish(const DecodePiece& piece) const {
        A* out = static_cast<A*>(args.out) + piece.row * args.out_stride +
                 int64_t(piece.head_begin) * group() * args.head_dim;
        const bool is_whole = piece.slot < 0;  // else others have parts of the row
        for_tiles(piece, [&](int heads, int64_t h) {
            float* kept =
                is_whole ? nullptr : partial_state(piece.slot + h / group(), int(h % group()));
            with_tile_heads(
                heads, FinishRunner<T, A>{scratch.maxima + h * kWidth, scratch.sums + h * kWidth,
                                          values(piece, h), args.head_dim,
                                          is_whole ? out + h * args.head_dim : nullptr, kept,
                                          is_whole ? nullptr : kept + group()});
        });
    }

    // The thread's own pieces, then what others have not begun. Who computes a piece does not show
    // in its result.
    void run(int thread) const {
        Scores<T>::begin(tiles.heads(0));
        const DecodePiece* before = nullptr;  // the last one that this thread has computed
        for (int owner = thread; owner >= 0;) {
            const int i = take_piece(owner), end = plan.piece_begin[owner + 1];
            const bool is_own = owner == thread;
            if (i < end) before = run_piece(i, is_own && i + 1 < end, before);
            if (i == end || !is_own) owner = furthest_behind(thread);
        }
        Scores<T>::end();
    }

    // The thread other than this one with the most pieces that nobody has taken, of several the
    // nearest; -1: all are taken. Its next piece is about the longest of all: one that is begun
    // late is what all would wait for.
    int furthest_behind(int thread) const {
        int most = 0, owner = -1;
        for (int i = 1; i < plan.num_threads && plan.threads_share; ++i) {
            const int other = (thread + i) % plan.num_threads;
            const int left = num_pieces(other) - num_taken(other);
            if (left <= most) continue;
            most = left;
            owner = other;
        }
        return owner;
    }

    // fetch_next: this thread most likely computes the piece that follows, too. Returns the piece.
    const DecodePiece* run_piece(int i, bool fetch_next, const DecodePiece* before) const {
        const DecodePiece& piece = plan.pieces[i];
        fetch_next = fetch_next && plan.pieces[i + 1].token_end > 0;
        begin(piece, before);
        attend(piece, fetch_next ? first_planes(plan.pieces[i + 1]) : Planes{nullptr, 0});
        finish(piece);
        if (piece.merge >= 0) join(piece);
        return &piece;
    }

    int num_pieces(int thread) const {
        return plan.piece_begin[thread + 1] - plan.piece_begin[thread];
    }
    // Of a thread's pieces in the calls before this one. A call ends with all taken, so that the
    // counter needs no reset (and may wrap around).
    uint32_t taken_before(int thread) const { return plan.calls * uint32_t(num_pieces(thread)); }
    uint32_t* taken_word(int thread) const { return plan.taken + thread * kCounterStep; }

    // Of a thread's pieces in this call.
    int num_taken(int thread) const {
        return int(__atomic_load_n(taken_word(thread), __ATOMIC_RELAXED) - taken_before(thread));
    }

    // The next piece of a thread that is not taken; piece_begin[thread + 1] if all are.
    int take_piece(int thread) const {
        const uint32_t count = uint32_t(num_pieces(thread)), before = taken_before(thread);
        uint32_t* word = taken_word(thread);
        uint32_t taken = __atomic_load_n(word, __ATOMIC_RELAXED);
        while (taken - before < count &&
               !__atomic_compare_exchange_n(word, &taken, taken + 1, true, __ATOMIC_RELAXED,
                                            __ATOMIC_RELAXED)) {
        }
        return plan.piece_begin[thread] + int(taken - before);
    }

    // Results are merged in pairs of neighbours, and these in pairs again. The thread that finishes
    // the second of two merges them into the first one's slot and goes on; so the last thread has
    // the logarithm of the pieces to do, and it does not show in the result who it was.
    void join(const DecodePiece& piece) const {
        const DecodeMerge& merge = plan.merges[piece.merge];
        const int64_t heads = merge.head_end - merge.head_begin;
        int64_t left = (piece.slot - merge.slot) / heads;
        for (int64_t step = 1; step < merge.num_pieces; step *= 2) {
            left = left / (2 * step) * (2 * step);
            if (left + step >= merge.num_pieces) continue;
            const int64_t to = merge.slot + left * heads, from = to + step * heads;
            // Orders the other thread's result before the reading of it.
            if (__atomic_xor_fetch(plan.waiting + from * kCounterStep, 1, __ATOMIC_ACQ_REL)) return;
            for (int64_t head = 0; head < heads; ++head) merge_slots(to + head, from + head);
        }
        for (int head = merge.head_begin; head < merge.head_end; ++head) write_merged(merge, head);
    }

    // Adds `from` to `to`: 2^(maximum - highest) weighs each one's sums and values.
    void merge_slots(int64_t to, int64_t from) const {
        for (int g = 0; g < group(); ++g) {
            float *a = partial_state(to, g), *b = partial_state(from, g);
            const float highest = *a > *b ? *a : *b;
            const F32 a_weight = exp2(set1(*a - highest)), b_weight = exp2(set1(*b - highest));
            float* sum = a + group();
            float lanes[kWidth];
            store(lanes, fma(set1(b[group()]), b_weight, mul(set1(*sum), a_weight)));
            *a = highest;
            *sum = lanes[0];
            float *x = partial_values(to, g), *y = partial_values(from, g);
            for (int d = 0; d < padded(); d += kWidth) {
                store(x + d, fma(load(y + d), b_weight, mul(load(x + d), a_weight)));
            }
        }
    }

    void write_merged(const DecodeMerge& merge, int head) const {
        const int64_t slot = merge.slot + head - merge.head_begin;
        A* out = static_cast<A*>(args.out) + merge.row * args.out_stride +
                 int64_t(head) * group() * args.head_dim;
        for (int g = 0; g < group(); ++g) {
            write_head<T>(partial_values(slot, g), args.head_dim,
                          1.0f / partial_state(slot, g)[group()], out + g * args.head_dim);
        }
    }
};

// Calls body(runner) with the runner for the activations' dtype.
template <class T, class Body>
inline void with_decode_runner(const DecodeAttentionArgs& args, const DecodePlanView& plan,
                               void* scratch, Body body) {
    const DecodeScratch memory = decode_scratch(args, scratch);
    switch (args.dtype) {
        case kFloat32:
            return body(DecodePieceRunner<T, float>{args, plan, memory});
        case kFloat16:
            return body(DecodePieceRunner<T, Half>{args, plan, memory});
        case kBFloat16:
            return body(DecodePieceRunner<T, BFloat16>{args, plan, memory});
        case kInt8:
            return;  // of KV only
    }
}

template <class T>
void decode_pieces(const DecodeAttentionArgs& args, const DecodePlanView& plan, void* scratch,
                   int thread) {
    with_decode_runner<T>(args, plan, scratch,
                          [thread](const auto& runner) { runner.run(thread); });
}

}  // namespace swiftapex::SWIFTAPEX_ISA
