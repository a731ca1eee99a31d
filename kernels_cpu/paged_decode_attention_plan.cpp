#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "kernels_cpu/paged_decode_attention.h"

namespace swiftapex {
namespace {

// Rows are not cut into shorter pieces to occupy threads, and the last pieces of a thread have
// about so many tokens.
constexpr int kMinPieceTokens = 64;

// Rows are divided by kv heads, which needs no merge: so that there is one for every thread, and
// further, in ranges of two heads where their number allows, until a thread has about so many
// pieces, as those that it has not begun can be taken over by threads that are done. A row of more
// tokens counts as several: the longer the runs in which its blocks are read, the better.
constexpr int kThreadPieces = 8;
constexpr int kWholePieceTokens = 4096;

// With fewer pieces per thread, looking for those of other threads takes longer than it saves. So
// few rows give that many: in ranges of one head, and by cuts of each thread's part, into pieces of
// about so many tokens.
constexpr int kSharedPieces = 2;
constexpr int kSharedPieceTokens = 256;

// Reading q, writing the output and starting to read at a new place: about as long as this many
// tokens take.
constexpr int kRowCost = 16;

constexpr size_t kLine = 16;  // float32 of a cache line

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
    if (num_threads == 1) return 1;
    const int64_t whole = num_possible_pieces(context_lens, rows, kWholePieceTokens);
    const auto ranges_for = [&](int64_t pieces) {
        return std::min<int64_t>((pieces + whole - 1) / whole, kv_heads);
    };
    const int64_t shared = ranges_for(int64_t(num_threads) * kThreadPieces);
    int64_t ranges = std::max(ranges_for(num_threads), std::min<int64_t>(shared, kv_heads / 2));
    const int64_t least = int64_t(num_threads) * kSharedPieces;
    if (ranges * whole + num_threads - 1 < least) ranges = ranges_for(least);
    while (kv_heads % ranges != 0) ++ranges;
    return int(ranges);
}

// Equal cuts of a thread's part of `tokens`, where there would be so few pieces.
int num_equal_cuts(int64_t pieces, int num_threads, double tokens) {
    if (num_threads == 1 || pieces >= int64_t(num_threads) * kSharedPieces) return 1;
    const int wanted = std::clamp(int(tokens) / kSharedPieceTokens, kSharedPieces, kThreadPieces);
    return std::clamp(int(tokens) / kMinPieceTokens, 1, wanted);
}

// Where a thread's part of `tokens` is cut, counted from its beginning; the last cut is its end.
// The last of the equal lengths is halved, its second half again, and so on: threads that are done
// take over what others have not begun, and the less that is, the closer together all end.
std::vector<double> cuts_of_part(int num_equal, int num_threads, double tokens) {
    std::vector<double> cuts;
    for (int i = 1; i < num_equal; ++i) cuts.push_back(tokens * i / num_equal);
    double rest = tokens / num_equal / 2;
    for (; num_threads > 1 && rest >= kMinPieceTokens; rest /= 2) cuts.push_back(tokens - rest);
    cuts.push_back(tokens);
    return cuts;
}

}  // namespace

// All work lies on one line: kv head ranges, in each the rows, in each its tokens. It is cut into
// equal parts, one per thread, and these into pieces; a cut falls on a block's edge, or on a row's
// if that is near.
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
    const int heads = kv_heads / ranges;
    part_tokens_ = double(tokens) * ranges / double(parts);
    const int num_equal =
        num_equal_cuts(int64_t(ranges) * rows + parts - 1, num_threads, part_tokens_);
    part_cuts_ = cuts_of_part(num_equal, num_threads, part_tokens_);
    near_ = std::max(block_size / 2.0, std::min(128.0, part_tokens_ / num_equal / 32));

    piece_begin_.push_back(0);
    for (int begin = 0; begin < kv_heads; begin += heads) {
        for (int row = 0; row < rows; ++row) add_row(row, context_lens[row], begin, begin + heads);
    }
    piece_begin_.resize(size_t(num_threads) + 1, int32_t(pieces_.size()));
    piece_begin_.back() = int32_t(pieces_.size());
    taken_.resize(size_t(num_threads) * kCounterStep);
    join_split_rows();
}

void DecodePlan::add_row(int row, int context, int head_begin, int head_end) {
    const double row_end = position_ + context + kRowCost;
    const int cuts = int(part_cuts_.size());
    int begin = 0;
    const auto add_piece = [&](int end) {
        pieces_.push_back({row, head_begin, head_end, begin, end, end == context, -1, -1});
        begin = end;
    };
    // The cut after the last part is the end of the line, which rounding must not bring forward.
    while (num_cuts_ + 1 < num_threads_ * cuts) {
        const double part = part_tokens_ * (num_cuts_ / cuts);
        const double cut = part + part_cuts_[size_t(num_cuts_ % cuts)];
        if (cut >= row_end) break;
        const double token = cut - position_ - kRowCost;
        if (context - token < near_) {
            if (begin < context) add_piece(context);
        } else if (token > near_) {
            const int edge = int(std::lround(token / block_size_)) * block_size_;
            if (edge > begin) add_piece(std::min(edge, context));
        }
        if (++num_cuts_ % cuts == 0) piece_begin_.push_back(int32_t(pieces_.size()));
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
            for (size_t i = first; i < end; ++i, num_slots_ += heads) {
                pieces_[i].slot = num_slots_;
                pieces_[i].merge = int32_t(merges_.size()) - 1;
            }
        }
        first = end;
    }
    waiting_.resize(size_t(num_slots_) * kCounterStep);
}

void DecodePlan::reserve(int q_heads, int head_dim) {
    const size_t group = size_t(q_heads / kv_heads_);
    const size_t states = (2 * group + kLine - 1) / kLine * kLine;
    partial_stride_ = int64_t(group * size_t(padded_head_dim(head_dim)) + states);
    const size_t needed = size_t(num_slots_ * partial_stride_) + kLine;
    if (needed > partial_.size()) partial_.resize(needed);
}

DecodePlanView DecodePlan::view() {
    const size_t misaligned = reinterpret_cast<uintptr_t>(partial_.data()) / sizeof(float);
    return {pieces_.data(),
            piece_begin_.data(),
            num_threads_,
            num_threads_ > 1 && int64_t(pieces_.size()) >= int64_t(num_threads_) * kSharedPieces,
            taken_.data(),
            calls_,
            merges_.data(),
            waiting_.data(),
            partial_.data() + (kLine - misaligned % kLine) % kLine,
            partial_stride_};
}

}  // namespace swiftapex
