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
        float* first =
            piece.slot < 0 ? scratch.values : plan.values + piece.slot * group() * padded();
        return first + h * padded();
    }

    void begin(const DecodePiece& piece) const {
        const A* q = static_cast<const A*>(args.q) + piece.row * args.q_stride +
                     int64_t(piece.head_begin) * group() * args.head_dim;
        for_tiles(piece, [&](int heads, int64_t h) {
            with_tile_heads(
                heads, StartRunner<T, A>{q + h * args.head_dim, args.head_dim, base2_scale(),
                                         queries(h), values(piece, h), scratch.maxima + h * kWidth,
                                         scratch.sums + h * kWidth});
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
        const int64_t kept = piece.slot * group();
        for_tiles(piece, [&](int heads, int64_t h) {
            with_tile_heads(
                heads, FinishRunner<T, A>{scratch.maxima + h * kWidth, scratch.sums + h * kWidth,
                                          values(piece, h), args.head_dim,
                                          is_whole ? out + h * args.head_dim : nullptr,
                                          is_whole ? nullptr : plan.maxima + kept + h,
                                          is_whole ? nullptr : plan.sums + kept + h});
        });
    }

    void run(int thread) const {
        Scores<T>::begin(tiles.heads(0));
        run_pieces_of(thread);
        for (int i = 1; i < plan.num_threads && plan.threads_share; ++i) {
            run_pieces_of((thread + i) % plan.num_threads);
        }
        Scores<T>::end();
    }

    // Those that nobody has taken yet. Who computes a piece does not show in its result.
    void run_pieces_of(int thread) const {
        const int end = plan.piece_begin[thread + 1];
        for (int i = take_piece(thread); i < end; i = take_piece(thread)) {
            const DecodePiece& piece = plan.pieces[i];
            const bool more = i + 1 < end && plan.pieces[i + 1].token_end > 0;
            begin(piece);
            attend(piece, more ? first_planes(plan.pieces[i + 1]) : Planes{nullptr, 0});
            finish(piece);
            if (piece.merge >= 0 && plan.pieces_left != nullptr) finish_merge(piece.merge);
        }
    }

    // The next piece of a thread that is not taken; piece_begin[thread + 1] if all are. A call
    // ends with all taken, so that the counter needs no reset (and may wrap around).
    int take_piece(int thread) const {
        const uint32_t count = uint32_t(plan.piece_begin[thread + 1] - plan.piece_begin[thread]);
        const uint32_t before = plan.calls * count;
        uint32_t* word = plan.taken + thread * kPieceCounterStep;
        uint32_t taken = __atomic_load_n(word, __ATOMIC_RELAXED);
        while (taken - before < count &&
               !__atomic_compare_exchange_n(word, &taken, taken + 1, true, __ATOMIC_RELAXED,
                                            __ATOMIC_RELAXED)) {
        }
        return plan.piece_begin[thread] + int(taken - before);
    }

    // The counter orders the pieces' results before the reading of them. It does not matter who
    // merges: the order of the pieces is that of their slots.
    void finish_merge(int index) const {
        const DecodeMerge& merge = plan.merges[index];
        int32_t& left = plan.pieces_left[index];
        if (__atomic_sub_fetch(&left, 1, __ATOMIC_ACQ_REL) > 0) return;
        __atomic_store_n(&left, merge.num_pieces, __ATOMIC_RELAXED);
        const int heads = (merge.head_end - merge.head_begin) * group();
        for (int h = 0; h < heads; ++h) merge_head(merge, h);
    }

    // One query head of a split row: 2^(maximum - highest) weighs each piece's sum and values. The
    // weights take the place of the maxima.
    void merge_head(const DecodeMerge& merge, int h) const {
        const int64_t step = int64_t(merge.head_end - merge.head_begin) * group();
        const int64_t first = merge.slot * group() + h;
        float highest = -kInfinity;
        for (int i = 0; i < merge.num_pieces; ++i) {
            const float maximum = plan.maxima[first + i * step];
            if (maximum > highest) highest = maximum;
        }
        float total = 0.0f;
        for (int i = 0; i < merge.num_pieces; ++i) {
            const int64_t slot = first + i * step;
            float lanes[kWidth];
            store(lanes, exp2(set1(plan.maxima[slot] - highest)));
            plan.maxima[slot] = lanes[0];
            total += lanes[0] * plan.sums[slot];
        }
        for (int d = 0; d < padded(); d += kPair) merge_pair(merge, first, step, d);
        const int64_t q_head = int64_t(merge.head_begin) * group() + h;
        write_head<T>(
            scratch.values, args.head_dim, 1.0f / total,
            static_cast<A*>(args.out) + merge.row * args.out_stride + q_head * args.head_dim);
    }

    // One vector pair of a head's values, by the weights of the slots first, first + step, ...
    void merge_pair(const DecodeMerge& merge, int64_t first, int64_t step, int d) const {
        F32 a = zero(), b = zero();
        for (int i = 0; i < merge.num_pieces; ++i) {
            const int64_t slot = first + i * step;
            const F32 weight = set1(plan.maxima[slot]);
            const float* values = plan.values + slot * padded() + d;
            a = fma(weight, load(values), a);
            b = fma(weight, load(values + kWidth), b);
        }
        store(scratch.values + d, a);
        store(scratch.values + d + kWidth, b);
    }

    // The kv heads of all merges lie on one line, of which each thread takes an
    // equal length.
    void merge(int thread, int num_threads) const {
        int64_t begin = plan.num_merge_heads * thread / num_threads;
        int64_t end = plan.num_merge_heads * (thread + 1) / num_threads;
        for (int i = 0; i < plan.num_merges && end > 0; ++i) {
            const DecodeMerge& merge = plan.merges[i];
            const int64_t heads = merge.head_end - merge.head_begin;
            const int64_t last = end < heads ? end : heads;
            for (int64_t h = begin > 0 ? begin : 0; h < last; ++h) {
                for (int g = 0; g < group(); ++g) merge_head(merge, int(h) * group() + g);
            }
            begin -= heads;
            end -= heads;
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

template <class T>
void decode_merge(const DecodeAttentionArgs& args, const DecodePlanView& plan, void* scratch,
                  int thread, int num_threads) {
    with_decode_runner<T>(args, plan, scratch, [thread, num_threads](const auto& runner) {
        runner.merge(thread, num_threads);
    });
}

}  // namespace swiftapex::SWIFTAPEX_ISA
