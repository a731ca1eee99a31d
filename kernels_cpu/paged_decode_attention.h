// Paged decode attention on the CPU: appends one token per row to its blocks and attends to the
// row's whole context. Memory is read once: the query heads of a group share every K and V.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels_cpu/paged_decode_attention_types.h"
#include "kernels_cpu/thread_pool.h"

namespace swiftapex {

// Who attends to what: equal numbers of bytes for each thread. It depends on the contexts but not
// on the layer, so one plan serves all layers of a pass, one call at a time.
class DecodePlan {
  public:
    // context_lens [rows]: tokens of each row including its new one; 0: an empty row, whose output
    // is zero and to which nothing is appended.
    DecodePlan(const int32_t* context_lens, int rows, int kv_heads, int block_size,
               int num_threads);

    // Makes room for the partial results of split rows; call it before view().
    void reserve(int q_heads, int head_dim);
    DecodePlanView view();
    void end_call() { ++calls_; }  // after one that had a view

    int rows() const { return rows_; }
    int kv_heads() const { return kv_heads_; }
    int block_size() const { return block_size_; }
    int num_threads() const { return num_threads_; }
    int max_blocks() const { return max_blocks_; }  // of one row
    const std::vector<int32_t>& context_lens() const { return context_lens_; }
    const std::vector<DecodePiece>& pieces() const { return pieces_; }

  private:
    void add_row(int row, int context, int head_begin, int head_end);
    void join_split_rows();

    std::vector<int32_t> context_lens_;
    int rows_, kv_heads_, block_size_, num_threads_;
    int max_blocks_ = 0;
    std::vector<DecodePiece> pieces_;
    std::vector<int32_t> piece_begin_;
    std::vector<DecodeMerge> merges_;
    std::vector<uint32_t> taken_, waiting_;  // see DecodePlanView
    uint32_t calls_ = 0;
    int64_t num_slots_ = 0;  // kv heads of all unfinished pieces
    std::vector<float> partial_;
    int64_t partial_stride_ = 0;
    double part_tokens_ = 0;         // of the line, for each thread
    std::vector<double> part_cuts_;  // of each part; the last one is its end
    double near_ = 0;                // tokens: a cut nearer to a row's end or begin moves there
    int num_cuts_ = 0;               // so far
    double position_ = 0;            // on the line, while it is cut
};

// Throws std::invalid_argument where they do not fit each other, or the kernels.
void check_decode_attention(const ThreadPool& pool, const DecodePlan& plan,
                            const DecodeAttentionArgs& args);

// Throws as check_decode_attention() does. The
// result is the same, bit by bit, for the same plan.
void paged_decode_attention(ThreadPool& pool, DecodePlan& plan, const DecodeAttentionArgs& args);

}  // namespace swiftapex
