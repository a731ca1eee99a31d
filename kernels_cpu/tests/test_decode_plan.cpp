// What the pieces of a decode plan cover, and how short a thread's last ones are.
#include <algorithm>
#include <string>
#include <vector>

#include "kernels_cpu/paged_decode_attention.h"
#include "kernels_cpu/tests/check.h"

namespace swiftapex::tests {
namespace {

int tokens_of(const DecodePiece& piece) { return piece.token_end - piece.token_begin; }

// Every token of every row and kv head lies in one piece; a head's pieces follow each other.
void check_cover(const DecodePlan& plan) {
    const int heads = plan.kv_heads(), rows = plan.rows();
    std::vector<int> covered(size_t(rows * heads), 0), appended(covered);
    for (const DecodePiece& piece : plan.pieces()) {
        const int context = plan.context_lens()[size_t(piece.row)];
        CHECK(piece.token_begin % plan.block_size() == 0);
        CHECK(piece.head_begin < piece.head_end);
        CHECK(tokens_of(piece) > 0 || context == 0);
        CHECK(piece.appends == (piece.token_end == context));
        CHECK((piece.slot < 0) == (tokens_of(piece) == context));
        for (int head = piece.head_begin; head < piece.head_end; ++head) {
            const size_t at = size_t(piece.row * heads + head);
            CHECK(covered[at] == piece.token_begin);
            covered[at] = piece.token_end;
            appended[at] += piece.appends;
        }
    }
    for (int i = 0; i < rows * heads; ++i) {
        CHECK(covered[size_t(i)] == plan.context_lens()[size_t(i / heads)]);
        CHECK(appended[size_t(i)] == 1);
    }
}

void check_threads(DecodePlan& plan) {
    const DecodePlanView view = plan.view();
    CHECK(view.piece_begin[0] == 0);
    CHECK(view.piece_begin[view.num_threads] == int(plan.pieces().size()));
    CHECK(std::is_sorted(view.piece_begin, view.piece_begin + view.num_threads + 1));
}

std::vector<int> tokens_of_thread(DecodePlan& plan, int thread) {
    const DecodePlanView view = plan.view();
    std::vector<int> tokens;
    for (int i = view.piece_begin[thread]; i < view.piece_begin[thread + 1]; ++i) {
        tokens.push_back(tokens_of(view.pieces[i]));
    }
    return tokens;
}

// One row of 4 x 4,100 tokens: eighths of a part, the last of them in halves, to a block's edge.
void check_halves() {
    const std::vector<int32_t> contexts{16384};
    DecodePlan plan(contexts.data(), 1, 1, 32, 4);
    constexpr int kExpected[] = {512, 512, 512, 512, 512, 512, 512, 256, 128, 64, 64};
    for (int thread = 0; thread < 4; ++thread) {
        const std::vector<int> tokens = tokens_of_thread(plan, thread);
        CHECK(tokens.size() == std::size(kExpected));
        for (size_t i = 0; i < tokens.size(); ++i) {
            CHECK(std::abs(tokens[i] - kExpected[i]) <= 32);
        }
    }
}

// Rows and heads in plenty: no thread begins anything long at its end. Cuts move by up to 128
// tokens to the end of a row.
void check_last_pieces() {
    const std::vector<int32_t> contexts(16, 1024);
    for (const int num_threads : {2, 7, 14}) {
        DecodePlan plan(contexts.data(), 16, 8, 32, num_threads);
        for (int thread = 0; thread < num_threads; ++thread) {
            const std::vector<int> tokens = tokens_of_thread(plan, thread);
            CHECK(tokens.size() > 4);
            CHECK(tokens.back() <= 128 + 128 + 32);
        }
    }
}

}  // namespace

void test_decode_plan() {
    const std::vector<int32_t> batches[] = {
        {}, {0}, {1}, {512}, {16384}, {300, 1, 0, 45, 130}, {16, 8192, 700, 33, 2000, 64, 0, 5000}};
    for (const std::vector<int32_t>& contexts : batches) {
        for (const int kv_heads : {1, 3, 8, 32}) {
            for (const int block_size : {16, 32, 128}) {
                for (const int num_threads : {1, 2, 7, 14, 40}) {
                    DecodePlan plan(contexts.data(), int(contexts.size()), kv_heads, block_size,
                                    num_threads);
                    check_cover(plan);
                    check_threads(plan);
                }
            }
        }
    }
    check_halves();
    check_last_pieces();
}

}  // namespace swiftapex::tests
