#include <chrono>
#include <numeric>
#include <stdexcept>

#include "kernels_cpu/copy_blocks.h"
#include "kernels_cpu/dispatch.h"
#include "kernels_cpu/tests/check.h"

namespace swiftapex::tests {
namespace {

constexpr int kElements = 37;  // of a block: no multiple of any vector

void take(Task& task) {
    while (!task.wait_for(std::chrono::milliseconds(100))) {
    }
    task.take();
}

template <class Source, class Target>
CopyBlocksArgs args_of(const std::vector<Source>& source, DType source_dtype,
                       std::vector<Target>& target, DType target_dtype,
                       std::vector<int64_t> source_ids, std::vector<int64_t> target_ids) {
    return {source.data(),
            target.data(),
            source_dtype,
            target_dtype,
            int64_t(source.size()) / kElements,
            int64_t(target.size()) / kElements,
            1,
            1,
            kElements,
            std::move(source_ids),
            std::move(target_ids)};
}

// Small integers are exact in every dtype.
void there_and_back(CopyLane& lane, DType dtype) {
    std::vector<float> first(3 * kElements), last(2 * kElements, -1.0f);
    std::iota(first.begin(), first.end(), 0.0f);
    std::vector<uint16_t> between(4 * kElements);
    const auto there = lane.submit(args_of(first, kFloat32, between, dtype, {0, 2}, {3, 1}), {});
    const auto back = lane.submit(args_of(between, dtype, last, kFloat32, {1, 3}, {0, 1}), {});
    take(*back);
    take(*there);
    for (int64_t i = 0; i < kElements; ++i) {
        CHECK(last[size_t(i)] == float(2 * kElements + i));
        CHECK(last[size_t(kElements + i)] == float(i));
    }
    CHECK(between[0] == 0 && between[size_t(2 * kElements)] == 0);
}

// Each copy reads what the one before it wrote; the first one's data come last.
void keeps_the_order(CopyLane& lane) {
    std::vector<float> blocks(50 * kElements);
    uint32_t arrival = 0;
    std::vector<std::shared_ptr<Task>> tasks;
    for (int64_t i = 0; i + 1 < 50; ++i) {
        TaskWords words{i == 0 ? &arrival : nullptr, nullptr};
        tasks.push_back(
            lane.submit(args_of(blocks, kFloat32, blocks, kFloat32, {i}, {i + 1}), words));
    }
    std::fill(blocks.begin(), blocks.begin() + kElements, 7.0f);
    __atomic_store_n(&arrival, 1, __ATOMIC_RELEASE);
    for (const auto& task : tasks) take(*task);
    for (float x : blocks) CHECK(x == 7.0f);
}

void refuses_unknown_blocks(CopyLane& lane) {
    std::vector<float> source(2 * kElements, 1.0f), target(2 * kElements);
    for (int64_t id : {int64_t{-1}, int64_t{2}}) {
        const auto task =
            lane.submit(args_of(source, kFloat32, target, kFloat32, {0, id}, {0, 1}), {});
        check_throws<std::out_of_range>([&] { take(*task); }, "source block");
    }
    const auto task = lane.submit(args_of(source, kFloat32, target, kFloat32, {0}, {0, 1}), {});
    check_throws<std::invalid_argument>([&] { take(*task); }, "as many");
    CHECK(target == std::vector<float>(2 * kElements));
}

}  // namespace

void test_copy_blocks() {
    CopyLane lane(20);
    for (const std::string& isa : available_isas()) {
        set_isa_cap(isa);
        there_and_back(lane, kFloat16);
        there_and_back(lane, kBFloat16);
    }
    set_isa_cap("");
    keeps_the_order(lane);
    refuses_unknown_blocks(lane);
    Threads threads;
    for (int i = 0; i < 3; ++i) {
        threads.start([&lane] {
            for (int round = 0; round < 50; ++round) there_and_back(lane, kFloat16);
        });
    }
    threads.join();
}

}  // namespace swiftapex::tests
