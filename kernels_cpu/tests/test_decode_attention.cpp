// Paged decode attention against a softmax in double, in all dtypes and shapes of heads.
#include <algorithm>
#include <numeric>

#include "kernels_cpu/copy_blocks.h"
#include "kernels_cpu/dispatch.h"
#include "kernels_cpu/paged_decode_attention.h"
#include "kernels_cpu/plain_decode_attention.h"
#include "kernels_cpu/tests/values.h"

namespace swiftapex::tests {
namespace {

struct Shape {
    int q_heads, kv_heads, head_dim, block_size;
};

// One layer of a decode batch; blocks lie in random order.
struct Case {
    Case(Shape s, std::vector<int32_t> contexts, DType dtype, DType kv_dtype)
        : shape(s),
          lens(std::move(contexts)),
          rows(int(lens.size())),
          width((*std::max_element(lens.begin(), lens.end()) + s.block_size - 1) / s.block_size),
          heads(s.q_heads + 2 * s.kv_heads),
          qkv(dtype, rows, heads * s.head_dim, heads * s.head_dim + 3),
          out(dtype, rows, s.q_heads * s.head_dim, s.q_heads * s.head_dim + 1),
          kv(kv_dtype, int64_t(rows) * width * s.kv_heads * 2 * s.block_size, s.head_dim),
          table(size_t(rows * width)) {
        std::mt19937 random(static_cast<unsigned>(s.head_dim + s.q_heads));
        qkv.fill(random, 1.0);
        kv.fill(random, 1.0);
        std::iota(table.begin(), table.end(), 0);
        std::shuffle(table.begin(), table.end(), random);
    }

    double scale() const { return 1.0 / std::sqrt(double(shape.head_dim)); }

    // The tiles of an instruction set may take q as two bfloat16 terms, which hold 16 bits.
    double tolerance() const {
        const double rounding = format(out.dtype).tolerance;
        return kv.dtype == kBFloat16 ? std::max(rounding, 2e-5) : rounding;
    }

    using Attention = void (*)(ThreadPool&, DecodePlan&, const DecodeAttentionArgs&);

    void run(ThreadPool& pool, Attention attention) { run(pool, attention, kv.data(), kv.dtype); }

    // As int8; what is stored then comes back as kv.
    void run_int8(ThreadPool& pool) {
        const int64_t blocks = int64_t(rows) * width, planes = shape.kv_heads * 2;
        std::vector<char> stored(size_t(blocks * planes * shape.block_size * (shape.head_dim + 4)));
        std::vector<int64_t> ids(size_t(blocks), 0);
        std::iota(ids.begin(), ids.end(), 0);
        copy_blocks({kv.data(), stored.data(), kv.dtype, kInt8, blocks, blocks, planes,
                     shape.block_size, shape.head_dim, ids, ids});
        run(pool, paged_decode_attention, stored.data(), kInt8);
        copy_blocks({stored.data(), kv.data(), kInt8, kv.dtype, blocks, blocks, planes,
                     shape.block_size, shape.head_dim, ids, ids});
    }

    void run(ThreadPool& pool, Attention attention, void* kv_memory, DType kv_dtype) {
        DecodePlan plan(lens.data(), rows, shape.kv_heads, shape.block_size, pool.num_threads());
        const int64_t k = shape.q_heads * shape.head_dim, v = k + shape.kv_heads * shape.head_dim;
        DecodeAttentionArgs args;
        args.q = qkv.data();
        args.k = qkv.at(0, k);
        args.v = qkv.at(0, v);
        args.out = out.data();
        args.kv = kv_memory;
        args.block_table = table.data();
        args.q_stride = args.k_stride = args.v_stride = qkv.stride;
        args.out_stride = out.stride;
        args.block_table_stride = width;
        args.q_heads = shape.q_heads;
        args.kv_heads = shape.kv_heads;
        args.head_dim = shape.head_dim;
        args.block_size = shape.block_size;
        args.scale = float(scale());
        args.dtype = qkv.dtype;
        args.kv_dtype = kv_dtype;
        attention(pool, plan, args);
    }

    // Row of kv that holds K (0) or V (1) at a position of a request.
    int64_t line(int row, int head, int which, int position) const {
        const int64_t block = table[size_t(row * width + position / shape.block_size)];
        return ((block * shape.kv_heads + head) * 2 + which) * shape.block_size +
               position % shape.block_size;
    }

    // The new token's k and v have been appended, and nothing else has changed.
    void check_append(const Matrix& before) const {
        Matrix expected = before;
        for (int row = 0; row < rows; ++row) {
            for (int head = 0; head < 2 * shape.kv_heads && lens[size_t(row)] > 0; ++head) {
                const int64_t to =
                    line(row, head % shape.kv_heads, head / shape.kv_heads, lens[size_t(row)] - 1);
                for (int i = 0; i < shape.head_dim; ++i) {
                    expected.set(to, i, qkv(row, (shape.q_heads + head) * shape.head_dim + i));
                }
            }
        }
        const size_t bytes = size_t(kv.rows * kv.columns) * format(kv.dtype).bytes;
        CHECK(std::memcmp(expected.data(), kv.at(0, 0), bytes) == 0);
    }

    using Vectors = std::vector<std::vector<double>>;

    // The query heads of one kv head, whose K and V are decoded once.
    void check_group(int row, int head) const {
        Vectors k, v;
        for (int position = 0; position < lens[size_t(row)]; ++position) {
            k.push_back(kv.row(line(row, head, 0, position), 0, shape.head_dim));
            v.push_back(kv.row(line(row, head, 1, position), 0, shape.head_dim));
        }
        const int group = shape.q_heads / shape.kv_heads;
        for (int q_head = head * group; q_head < (head + 1) * group; ++q_head) {
            const int64_t begin = q_head * shape.head_dim;
            const std::vector<double> q = qkv.row(row, begin, shape.head_dim);
            const std::vector<double> expected = attended(q, k, v);
            for (int i = 0; i < shape.head_dim; ++i) {
                CHECK(near(out(row, begin + i), expected[size_t(i)], tolerance()));
            }
        }
    }

    std::vector<double> attended(const std::vector<double>& q, const Vectors& k,
                                 const Vectors& v) const {
        std::vector<double> sum(q.size(), 0.0);
        double total = 0.0;
        for (size_t position = 0; position < k.size(); ++position) {
            const double* at = v[position].data();
            const double logit = std::inner_product(q.begin(), q.end(), k[position].begin(), 0.0);
            const double weight = std::exp(scale() * logit);
            total += weight;
            for (double& x : sum) x += weight * *at++;
        }
        for (double& x : sum) x = total > 0.0 ? x / total : 0.0;
        return sum;
    }

    void check() const {
        for (int row = 0; row < rows; ++row) {
            for (int head = 0; head < shape.kv_heads; ++head) check_group(row, head);
        }
        CHECK(out.gaps_are_untouched());
    }

    Shape shape;
    std::vector<int32_t> lens;
    int rows, width, heads;
    Matrix qkv, out, kv;
    std::vector<int32_t> table;
};

void every_dtype(ThreadPool& pool, Shape shape, const std::vector<int32_t>& contexts) {
    for (const DType dtype : kDTypes) {
        for (const DType kv_dtype : kDTypes) {
            for (const auto attention : {paged_decode_attention, plain_decode_attention}) {
                Case batch(shape, contexts, dtype, kv_dtype);
                const Matrix before = batch.kv;
                batch.run(pool, attention);
                batch.check_append(before);
                batch.check();
            }
        }
        Case batch(shape, contexts, dtype, kFloat32);
        batch.run_int8(pool);
        batch.check();
    }
}

}  // namespace

void test_decode_attention() {
    constexpr Shape shapes[] = {{1, 1, 8, 16},   {2, 2, 24, 16},  {4, 2, 40, 32}, {3, 1, 64, 16},
                                {8, 2, 72, 16},  {5, 1, 80, 16},  {6, 1, 16, 48}, {7, 1, 128, 16},
                                {16, 2, 64, 16}, {12, 1, 96, 128}};
    for (const std::string& isa : available_isas()) {
        set_isa_cap(isa);
        for (const int num_threads : {1, 3}) {
            ThreadPool pool(num_threads, {}, Caller::kWorks, 0);
            for (const Shape& shape : shapes) every_dtype(pool, shape, {1, 16, 0, 17, 45});
            // Long enough for its pieces to be merged where there are several threads.
            every_dtype(pool, {4, 1, 64, 16}, {1100});
        }
    }
    set_isa_cap("");
}

}  // namespace swiftapex::tests
