#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "kernels_cpu/tests/check.h"
#include "kernels_cpu/thread_pool.h"

namespace swiftapex::tests {
namespace {

// Plain memory written by the parts and read by the caller, and the other way round.
void fork_join(ThreadPool& pool, int rounds, bool naps) {
    std::vector<int64_t> parts(static_cast<size_t>(pool.num_threads()));
    for (int round = 0; round < rounds; ++round) {
        int64_t input = round;
        auto task = [&](int part) { parts[static_cast<size_t>(part)] = 2 * input + part; };
        pool.run(task);
        for (int part = 0; part < pool.num_threads(); ++part) {
            CHECK(parts[static_cast<size_t>(part)] == 2 * input + part);
        }
        if (naps && round % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
    }
}

void scratch_grows(ThreadPool& pool) {
    for (size_t bytes : {1, 100, 5000, 64, 100'000}) {
        auto task = [&](int part) { std::memset(pool.scratch(part), part, bytes); };
        pool.run(task, bytes);
    }
}

void callers_take_turns() {
    ThreadPool pool(3, {}, Caller::kWorks, 10);
    int64_t shared = 0;  // only ever touched by part 0 of the one run in progress
    std::vector<std::thread> callers;
    for (int i = 0; i < 3; ++i) {
        callers.emplace_back([&] {
            for (int round = 0; round < 300; ++round) {
                auto task = [&](int part) {
                    if (part == 0) ++shared;
                };
                pool.run(task);
            }
        });
    }
    for (std::thread& caller : callers) caller.join();
    CHECK(shared == 900);
}

void closes_beside_a_run() {
    for (int round = 0; round < 20; ++round) {
        ThreadPool pool(3, {}, Caller::kWorks, round % 2 == 0 ? 0 : 50);
        bool refused = false;
        std::thread caller([&] {
            try {
                auto task = [](int) {};
                while (true) pool.run(task);
            } catch (const std::runtime_error&) {
                refused = true;
            }
        });
        std::this_thread::sleep_for(std::chrono::microseconds(100 * round));
        pool.close();
        pool.close();
        caller.join();
        CHECK(refused);
    }
}

}  // namespace

void test_thread_pool() {
    for (const Caller caller : {Caller::kWorks, Caller::kWaits}) {
        for (int num_threads : {1, 2, 3, 5}) {
            for (int spin_us : {0, 50}) {
                ThreadPool pool(num_threads, {}, caller, spin_us);
                fork_join(pool, 500, spin_us != 0);
                scratch_grows(pool);
            }
        }
    }
    callers_take_turns();
    closes_beside_a_run();
    check_throws<std::invalid_argument>([] { ThreadPool pool(0); }, "at least one thread");
}

}  // namespace swiftapex::tests
