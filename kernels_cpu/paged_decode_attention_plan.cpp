#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "kernels_cpu/paged_decode_attention.h"

namespace swiftapex {
namespace {

constexpr int kMinPieceTokens = 128;  // rows are not cut into shorter pieces to occupy threads

// Rows are divided by kv heads, which needs no merge: so that there is one for every thread, and
// further, in ranges of two heads where their number allows, until a thread has about so many
// pieces, as those that it has not begun can be taken over by threads that are done. A row of more
// tokens counts as several: the longer the runs in which its blocks are read, the better.
constexpr int kThreadPieces = 8;
constexpr int kWholePieceTokens = 4096;

// With fewer pieces per thread, looking for those of other threads takes longer than it saves.
constexpr int kSharedPieces = 2;

// Reading q, writing the output and starting to read at a new place: about as long as this many
// tokens take.
constexpr int kRowCost = 16;

// A merge of so many kv heads of pieces, a few microseconds, is no longer than a fork-join.
constexpr int kSmallMerge = 16;

constexpr size_t kAlignment = 16;  // of values, in float32: a cache line

// How many pieces of at least `tokens` the rows can give, whole rows counting as one.
int64_t num_possible_pieces(const int32_t* context_lens, int rows, int tokens) {
    int64_t pieces = 0;
    for (int row = 0; row < rows; ++row) {
        if (context_lens[row] > 0) pieces += std::max(1, context_lens[row] / tokens);
    }
    return std::max<int64_t>(pieces, 1);
}

// Equal ranges of kv heads by which each row is divided.
int num_head_ranges(const int32_t* context_lens, int rows, int kv_heads, int num_threads) {
    const int64_t whole = num_possible_pieces(context_lens, rows, kWholePieceTokens);
    const auto ranges_for = [&](int64_t pieces) { return (pieces + whole - 1) / whole; };
    const int64_t shared = num_threads == 1 ? 1 : ranges_for(int64_t(num_threads) * kThreadPieces);
    const int64_t wanted =
        std::max(ranges_for(num_threads), std::min<int64_t>(shared, kv_heads / 2));
    int ranges = int(std::min<int64_t>(wanted, kv_heads));
    while (kv_heads % ranges != 0) ++ranges;
    return ranges;
}

}  // namespace

// All work lies on one line: kv head ranges, in each the rows, in each its tokens. It is cut into
// equal lengths, one per thread; a cut falls on a block's edge, or on a row's if that is near.
DecodePlan::DecodePlan(const int32_t* context_lens, int rows, int kv_heads, int block_size,
                       int num_threads)
    : rows_(rows), kv_heads_(kv_heads), block_size_(block_size), num_threads_(num_threads) {
    if (rows < 0 || kv_heads < 1 || num_threads < 1 || block_size < 1) {
        throw std::invalid_argument("decode plan: sizes must be positive");
    }
    context_lens_.assign(context_lens, context_lens + rows);
    int64_t tokens = 0;
    for (int row = 0; row < rows; ++row) {
        if (context_lens[row] < 0) throw std::invalid_argument("decode plan: negative context");
        tokens += context_lens[row] + kRowCost;
        max_blocks_ = std::max(max_blocks_, (context_lens[row] + block_size - 1) / block_size);
    }
    const int ranges = num_head_ranges(context_lens, rows, kv_heads, num_threads);
    const int64_t possible = ranges * num_possible_pieces(context_lens, rows, kMinPieceTokens);
    const int64_t parts = std::min<int64_t>(num_threads, possible);
    part_weight_ = double(tokens) * kv_heads / double(parts);

    piece_begin_.push_back(0);
    const int heads = kv_heads / ranges;
    for (int begin = 0; begin < kv_heads; begin += heads) {
        for (int row = 0; row < rows; ++row) add_row(row, context_lens[row], begin, begin + heads);
    }
    piece_begin_.resize(size_t(num_threads) + 1, int32_t(pieces_.size()));
    piece_begin_.back() = int32_t(pieces_.size());
    taken_.resize(size_t(num_threads) * kPieceCounterStep);
    join_split_rows();
}

void DecodePlan::add_row(int row, int context, int head_begin, int head_end) {
    const int heads = head_end - head_begin;
    const double row_end = position_ + double(context + kRowCost) * heads;
    const double part_tokens = part_weight_ / heads;
    const double near = std::max(block_size_ / 2.0, std::min(128.0, part_tokens / 32));
    int begin = 0;
    const auto add_piece = [&](int end) {
        pieces_.push_back({row, head_begin, head_end, begin, end, end == context, -1, -1});
        begin = end;
    };
    // The cut after the last part is the end of the line, which rounding must not bring forward.
    while (int(piece_begin_.size()) < num_threads_ &&
           part_weight_ * double(piece_begin_.size()) < row_end) {
        const double cut = part_weight_ * double(piece_begin_.size()) - position_;
        const double token = cut / heads - kRowCost;
        if (context - token < near) {
            if (begin < context) add_piece(context);
        } else if (token > near) {
            const int edge = int(std::lround(token / block_size_)) * block_size_;
            if (edge > begin) add_piece(std::min(edge, context));
        }
        piece_begin_.push_back(int32_t(pieces_.size()));
    }
    if (begin < context || context == 0) add_piece(context);
    position_ = row_end;
}

void DecodePlan::join_split_rows() {
    for (size_t first = 0; first < pieces_.size();) {
        const DecodePiece& piece = pieces_[first];
        size_t end = first + 1;
        while (end < pieces_.size() && pieces_[end].row == piece.row &&
               pieces_[end].head_begin == piece.head_begin) {
            ++end;
        }
        const int count = int(end - first), heads = piece.head_end - piece.head_begin;
        if (count > 1) {
            merges_.push_back({piece.row, piece.head_begin, piece.head_end, count, num_slots_});
            num_merge_heads_ += heads;
            for (size_t i = first; i < end; ++i, num_slots_ += heads) {
                pieces_[i].slot = num_slots_;
                pieces_[i].merge = int32_t(merges_.size()) - 1;
            }
        }
        first = end;
    }
    if (!merges_are_small()) return;
    for (const DecodeMerge& merge : merges_) pieces_left_.push_back(merge.num_pieces);
}

bool DecodePlan::merges_are_small() const {
    return std::all_of(merges_.begin(), merges_.end(), [](const DecodeMerge& merge) {
        return merge.num_pieces * (merge.head_end - merge.head_begin) <= kSmallMerge;
    });
}

void DecodePlan::reserve(int q_heads, int head_dim) {
    const size_t rows = size_t(num_slots_) * size_t(q_heads / kv_heads_);
    if (rows > maxima_.size()) {
        maxima_.resize(rows);
        sums_.resize(rows);
    }
    const size_t values = rows * size_t(padded_head_dim(head_dim)) + kAlignment;
    values_.resize(std::max(values_.size(), values));
}

DecodePlanView DecodePlan::view() {
    const size_t misaligned = reinterpret_cast<uintptr_t>(values_.data()) / sizeof(float);
    return {pieces_.data(),
            piece_begin_.data(),
            num_threads_,
            num_threads_ > 1 && int64_t(pieces_.size()) >= int64_t(num_threads_) * kSharedPieces,
            taken_.data(),
            calls_,
            merges_.data(),
            int32_t(merges_.size()),
            num_merge_heads_,
            pieces_left_.empty() ? nullptr : pieces_left_.data(),
            values_.data() + (kAlignment - misaligned % kAlignment) % kAlignment,
            maxima_.data(),
            sums_.data()};
}

}  // namespace swiftapex
