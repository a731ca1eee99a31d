#include <atomic>
#include <chrono>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "kernels_cpu/task_lane.h"
#include "kernels_cpu/tests/check.h"

namespace swiftapex::tests {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using Tasks = std::vector<std::shared_ptr<Task>>;

void set(uint32_t& word, uint32_t value) { __atomic_store_n(&word, value, __ATOMIC_RELEASE); }
uint32_t get(const uint32_t& word) { return __atomic_load_n(&word, __ATOMIC_ACQUIRE); }

void finish(Task& task) {
    while (!task.wait_for(milliseconds(100))) {
    }
}

void order_of_arrived_tasks(TaskOrder order, const std::vector<int>& expected) {
    TaskLane lane(order, "test");
    uint32_t arrival[4] = {};
    std::vector<int> ran;  // touched by the lane's thread alone until all have finished
    Tasks tasks;
    const int depths[4] = {2, 0, 3, 3};
    std::atomic<bool> all_arrived{false};
    const auto gate = std::make_shared<Task>(
        [&] {
            while (!all_arrived) std::this_thread::yield();
        },
        0, TaskWords{});
    lane.submit(gate);
    for (int i = 0; i < 4; ++i) {
        auto body = [&ran, i] { ran.push_back(i); };
        tasks.push_back(std::make_shared<Task>(body, depths[i], TaskWords{&arrival[i], nullptr}));
        lane.submit(tasks.back());
    }
    for (int i : {1, 2, 3}) set(arrival[i], 1);
    all_arrived = true;
    if (order != TaskOrder::kStrictFifo) {
        for (int i : {1, 2, 3}) finish(*tasks[static_cast<size_t>(i)]);
    } else {
        std::this_thread::sleep_for(milliseconds(5));
        CHECK(!tasks[1]->finished());
    }
    CHECK(!tasks[0]->finished());
    set(arrival[0], 1);
    for (const auto& task : tasks) finish(*task);
    CHECK(ran == expected);
    for (const uint32_t& word : arrival) CHECK(get(word) == 0);
}

// A stream that uses the same two words round after round. It awaits the result as the host does,
// or as a device does: by the word alone.
void stream(TaskLane& lane, int seed, bool as_device) {
    std::mt19937 random(static_cast<unsigned>(seed));
    uint32_t arrival = 0, done = 0;
    int64_t input = 0, output = 0;  // plain memory that the words guard
    for (int round = 0; round < 200; ++round) {
        auto body = [&] { output = 3 * input; };
        auto task = std::make_shared<Task>(body, seed % 5, TaskWords{&arrival, &done});
        const bool submits_first = random() % 2 == 0;
        if (submits_first) lane.submit(task);
        input = round + seed;
        if (random() % 8 == 0) std::this_thread::sleep_for(microseconds(random() % 400));
        set(arrival, 1);
        if (!submits_first) lane.submit(task);
        if (as_device) {
            while (get(done) != 1) std::this_thread::yield();
            set(done, 0);
        } else {
            finish(*task);
            CHECK(task->ready());
            task->take();
        }
        CHECK(output == 3 * input && get(arrival) == 0 && get(done) == 0);
    }
}

void streams(TaskOrder order, int spin_us) {
    TaskLane lane(order, "test", -1, spin_us);
    Threads threads;
    for (int i = 0; i < 4; ++i) threads.start([&lane, i] { stream(lane, i, i % 2 == 0); });
    threads.join();
    CHECK(lane.busy_ns() > 0);
}

// A graph's hand-offs: all are queued before the first one begins, over the same two words and the
// same memory, and a device does them one after the other, twice.
void queued_ahead(TaskOrder order, int spin_us) {
    constexpr int kTasks = 400;
    TaskLane lane(order, "test", -1, spin_us);
    uint32_t arrival = 0, done = 0;
    int64_t input = 0, output = 0;
    Tasks tasks;
    for (int i = 0; i < kTasks; ++i) {
        auto body = [&, i] {
            output = 3 * input + i;
            if (i == 7) throw std::out_of_range("block 9");
        };
        tasks.push_back(std::make_shared<Task>(body, i % 200, TaskWords{&arrival, &done}));
        lane.submit(tasks.back());
    }
    Threads threads;
    threads.start([&] {
        for (int i = 0; i < kTasks; ++i) {
            input = i;
            if (i % 8 == 0) std::this_thread::sleep_for(microseconds(i));
            set(arrival, 1);
            while (get(done) != 1) std::this_thread::yield();
            CHECK(output == 4 * i && get(arrival) == 0);
            set(done, 0);
        }
    });
    for (int i = 0; i < kTasks; ++i) {
        Task& task = *tasks[static_cast<size_t>(i)];
        finish(task);
        if (i == 7) {
            check_throws<std::out_of_range>([&] { task.check(); }, "block 9");
        } else {
            task.check();
        }
    }
    threads.join();
    CHECK(get(arrival) == 0 && get(done) == 0);
}

void errors_and_times() {
    TaskLane lane(TaskOrder::kArrivedFifo, "test");
    const auto failing =
        std::make_shared<Task>([] { throw std::out_of_range("block 9"); }, 0, TaskWords{});
    check_throws<std::logic_error>([&] { failing->take(); }, "has not finished");
    lane.submit(failing);
    finish(*failing);
    check_throws<std::out_of_range>([&] { failing->take(); }, "block 9");
    check_throws<std::logic_error>([&] { failing->take(); }, "taken before");
    CHECK(failing->start_ns() > 0 && failing->end_ns() >= failing->start_ns());
    uint32_t words[2] = {};
    auto* odd = reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(words) + 2);
    check_throws<std::invalid_argument>([&] { Task([] {}, 0, TaskWords{odd, nullptr}); },
                                        "aligned to 4");
}

// Every task submitted either ran or was cancelled, and its done word says so in both cases.
void closes_in_flight(int seed) {
    uint32_t never = 0;
    std::atomic<int> submitted{0}, taken{0}, cancelled{0}, ran{0};
    {
        TaskLane lane(TaskOrder::kDeepestFirst, "test");
        Threads threads;
        for (int i = 0; i < 3; ++i) {
            threads.start([&, i] {
                Tasks tasks;
                try {
                    while (true) {
                        TaskWords words{tasks.size() % 3 == 0 ? &never : nullptr, nullptr};
                        auto task = std::make_shared<Task>([&] { ++ran; }, i, words);
                        lane.submit(task);
                        tasks.push_back(task);
                        ++submitted;
                        if (tasks.size() % 16 == 0) std::this_thread::sleep_for(microseconds(50));
                    }
                } catch (const std::runtime_error&) {  // the lane is closed
                }
                for (const auto& task : tasks) {
                    finish(*task);
                    CHECK(task->ready());
                    try {
                        task->take();
                        ++taken;
                    } catch (const std::runtime_error&) {
                        ++cancelled;
                    }
                }
            });
        }
        std::this_thread::sleep_for(microseconds(200 * seed));
        lane.close();
        threads.join();
    }
    CHECK(taken == ran && taken + cancelled == submitted);
}

void result_outlives_lane() {
    std::shared_ptr<Task> ran = std::make_shared<Task>([] {}, 0, TaskWords{}), cancelled;
    uint32_t never = 0;
    cancelled = std::make_shared<Task>([] {}, 0, TaskWords{&never, nullptr});
    {
        TaskLane lane(TaskOrder::kStrictFifo, "test");
        lane.submit(ran);
        lane.submit(cancelled);
        finish(*ran);
    }
    ran->take();
    check_throws<std::runtime_error>([&] { cancelled->take(); }, "closed before");
}

}  // namespace

void test_task_lane() {
    order_of_arrived_tasks(TaskOrder::kArrivedFifo, {1, 2, 3, 0});
    order_of_arrived_tasks(TaskOrder::kDeepestFirst, {2, 3, 1, 0});
    order_of_arrived_tasks(TaskOrder::kStrictFifo, {0, 1, 2, 3});
    for (const TaskOrder order : {TaskOrder::kArrivedFifo, TaskOrder::kDeepestFirst}) {
        for (int spin_us : {0, 50}) {
            streams(order, spin_us);
            queued_ahead(order, spin_us);
        }
    }
    errors_and_times();
    for (int seed = 0; seed < 10; ++seed) closes_in_flight(seed);
    result_outlives_lane();
}

}  // namespace swiftapex::tests
