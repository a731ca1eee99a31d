#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>
#include <stdexcept>
#include <vector>

#include "kernels_cpu/attention_runtime.h"
#include "kernels_cpu/dispatch.h"
#include "kernels_cpu/simd/types.h"
#include "kernels_cpu/tests/check.h"

namespace swiftapex::tests {
namespace {

constexpr int kQHeads = 4, kKvHeads = 2, kHeadDim = 40, kBlockSize = 16;
constexpr int kHeads = kQHeads + 2 * kKvHeads;

// One layer of a decode batch whose rows' blocks lie one behind the other; memory is exactly as
// large as it must be, so that a sanitizer sees what lies beyond.
struct Batch {
    Batch(int seed, std::vector<int32_t> contexts, int num_threads)
        : lens(std::move(contexts)),
          rows(int(lens.size())),
          width((*std::max_element(lens.begin(), lens.end()) + kBlockSize - 1) / kBlockSize),
          plan(lens.data(), rows, kKvHeads, kBlockSize, num_threads) {
        std::mt19937 random(static_cast<unsigned>(seed));
        std::normal_distribution<float> normal;
        qkv.resize(size_t(rows * kHeads * kHeadDim));
        out.resize(size_t(rows * kQHeads * kHeadDim));
        kv.resize(size_t(rows * width * kKvHeads * 2 * kBlockSize * kHeadDim));
        for (float& x : qkv) x = normal(random);
        for (float& x : kv) x = normal(random);
        for (int block = 0; block < rows * width; ++block) table.push_back(block);
    }

    DecodeAttentionArgs args() {
        DecodeAttentionArgs args;
        args.q = qkv.data();
        args.k = qkv.data() + kQHeads * kHeadDim;
        args.v = qkv.data() + (kQHeads + kKvHeads) * kHeadDim;
        args.out = out.data();
        args.kv = kv.data();
        args.block_table = table.data();
        args.q_stride = args.k_stride = args.v_stride = kHeads * kHeadDim;
        args.out_stride = kQHeads * kHeadDim;
        args.block_table_stride = width;
        args.q_heads = kQHeads;
        args.kv_heads = kKvHeads;
        args.head_dim = kHeadDim;
        args.block_size = kBlockSize;
        args.scale = 0.2f;
        args.dtype = args.kv_dtype = kFloat32;
        return args;
    }

    // of K (0) or V (1) at a position of a row, after the append
    const float* stored(int row, int head, int which, int position) const {
        const int block = row * width + position / kBlockSize;
        const int line = ((block * kKvHeads + head) * 2 + which) * kBlockSize;
        return kv.data() + (line + position % kBlockSize) * kHeadDim;
    }

    double error(int row, int q_head) const {
        const int head = q_head / (kQHeads / kKvHeads);
        const float* q = qkv.data() + (row * kHeads + q_head) * kHeadDim;
        std::vector<double> sum(kHeadDim);
        double total = 0, worst = 0;
        for (int position = 0; position < lens[size_t(row)]; ++position) {
            const float *k = stored(row, head, 0, position), *v = stored(row, head, 1, position);
            double logit = 0;
            for (int i = 0; i < kHeadDim; ++i) logit += double(q[i]) * double(k[i]);
            const double weight = std::exp(0.2 * logit);
            total += weight;
            for (int i = 0; i < kHeadDim; ++i) sum[size_t(i)] += weight * double(v[i]);
        }
        for (int i = 0; i < kHeadDim; ++i) {
            const float got = out[size_t((row * kQHeads + q_head) * kHeadDim + i)];
            worst = std::max(worst, std::fabs(sum[size_t(i)] / total - double(got)));
        }
        return worst;
    }

    void check() const {
        for (int row = 0; row < rows; ++row) {
            for (int q_head = 0; q_head < kQHeads; ++q_head) CHECK(error(row, q_head) < 1e-4);
        }
    }

    std::vector<int32_t> lens;
    int rows, width;
    DecodePlan plan;
    std::vector<float> qkv, out, kv;
    std::vector<int32_t> table;
};

void take(Task& task) {
    while (!task.wait_for(std::chrono::milliseconds(100))) {
    }
    task.take();
}

std::vector<int32_t> some_contexts(std::mt19937& random) {
    std::vector<int32_t> contexts(1 + random() % 5);
    for (int32_t& context : contexts) context = int32_t(1 + random() % 700);
    return contexts;
}

// Batches whose q, k and v are written after they were submitted.
void submitter(AttentionRuntime& runtime, int seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    for (int round = 0; round < 6; ++round) {
        Batch batch(int(random() % 1000), some_contexts(random), runtime.num_threads());
        std::vector<float> late(batch.qkv.size());
        late.swap(batch.qkv);
        uint32_t arrival = 0, done = 0;
        const auto task =
            runtime.submit(round, batch.plan, batch.args(), TaskWords{&arrival, &done});
        std::copy(late.begin(), late.end(), batch.qkv.begin());
        __atomic_store_n(&arrival, 1, __ATOMIC_RELEASE);
        take(*task);
        batch.check();
    }
}

void submitters(TaskOrder order, int num_threads) {
    AttentionRuntime runtime(num_threads, {}, order, 50);
    Threads threads;
    for (int i = 0; i < 3; ++i) threads.start([&runtime, i] { submitter(runtime, i); });
    threads.join();
    runtime.close();
    CHECK(runtime.busy_ns() > 0);
}

// Every instruction set reads and writes inside of what it was given, whatever the dtypes.
void every_kernel() {
    AttentionRuntime runtime(2, {}, TaskOrder::kArrivedFifo, 0);
    for (const std::string& isa : available_isas()) {
        set_isa_cap(isa);
        Batch batch(1, {1, 16, 17, 530, 33}, 2);
        take(*runtime.submit(0, batch.plan, batch.args(), {}));
        batch.check();
        for (const DType dtype : {kFloat16, kBFloat16}) {
            for (const DType kv_dtype : {kFloat32, kFloat16, kBFloat16}) {
                std::vector<BFloat16> qkv(batch.qkv.size()), out(batch.out.size());
                std::vector<BFloat16> kv(batch.kv.size());
                DecodeAttentionArgs args = batch.args();
                args.q = qkv.data();
                args.k = qkv.data() + kQHeads * kHeadDim;
                args.v = qkv.data() + (kQHeads + kKvHeads) * kHeadDim;
                args.out = out.data();
                if (kv_dtype != kFloat32) args.kv = kv.data();
                args.dtype = dtype;
                args.kv_dtype = kv_dtype;
                take(*runtime.submit(0, batch.plan, args, {}));
            }
        }
    }
    set_isa_cap("");
}

void closes_in_flight() {
    for (int round = 0; round < 5; ++round) {
        std::vector<std::shared_ptr<Task>> tasks;
        Batch batch(round, {2000, 2000, 900}, 2);
        int ran = 0;
        {
            AttentionRuntime runtime(2, {}, TaskOrder::kDeepestFirst, 50);
            for (int layer = 0; layer < 6; ++layer) {
                tasks.push_back(runtime.submit(layer, batch.plan, batch.args(), {}));
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(2 * round));
        }
        for (const auto& task : tasks) {
            CHECK(task->finished());
            ran += task->start_ns() != 0;
        }
        if (ran > 0) batch.check();
    }
}

void reports_bad_arguments() {
    AttentionRuntime runtime(1, {}, TaskOrder::kArrivedFifo, 0);
    Batch batch(1, {20}, 1);
    DecodeAttentionArgs args = batch.args();
    args.q_heads = 3;
    const auto task = runtime.submit(0, batch.plan, args, {});
    check_throws<std::invalid_argument>([&] { take(*task); }, "multiple of kv_heads");
    runtime.close();
    check_throws<std::runtime_error>([&] { runtime.submit(0, batch.plan, batch.args(), {}); },
                                     "closed");
}

}  // namespace

void test_attention_runtime() {
    for (int num_threads : {1, 2, 3}) {
        submitters(TaskOrder::kArrivedFifo, num_threads);
        submitters(TaskOrder::kDeepestFirst, num_threads);
    }
    every_kernel();
    closes_in_flight();
    reports_bad_arguments();
}

}  // namespace swiftapex::tests
