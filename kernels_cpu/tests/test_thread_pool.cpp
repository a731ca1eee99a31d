#include <algorithm>
#include <chrono>
#include <cstring>
#include <ctime>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "kernels_cpu/tests/check.h"
#include "kernels_cpu/thread_pool.h"

namespace swiftapex::tests {
namespace {

using std::chrono::microseconds;

double cpu_seconds() {
    timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

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
        if (naps && round % 64 == 0) std::this_thread::sleep_for(microseconds(300));
    }
}

// Pauses about as long as the pool's threads spin, so that they fall asleep just when they are
// called, and parts of which some last longer, so that the caller falls asleep just when they end.
void fork_join_with_pauses(ThreadPool& pool, int rounds, int spin_us) {
    std::mt19937 random(static_cast<unsigned>(pool.num_threads() + spin_us));
    const auto pause = [&](int one_in) {
        const bool is_long = random() % static_cast<unsigned>(one_in) == 0;
        return is_long ? int(random() % static_cast<unsigned>(2 * spin_us + 60)) : 0;
    };
    std::vector<int> counts(static_cast<size_t>(pool.num_threads())), pauses(counts);
    for (int round = 1; round <= rounds; ++round) {
        for (int& us : pauses) us = pause(8);
        auto task = [&](int part) {
            const size_t i = static_cast<size_t>(part);
            if (pauses[i] > 0) std::this_thread::sleep_for(microseconds(pauses[i]));
            ++counts[i];
        };
        pool.run(task);
        CHECK(std::count(counts.begin(), counts.end(), round) == pool.num_threads());
        if (const int us = pause(2); us > 0) std::this_thread::sleep_for(microseconds(us));
    }
}

// More threads than CPUs, and all of the pool's on the same one, where each keeps others off it.
void stress() {
    for (const Caller caller : {Caller::kWorks, Caller::kWaits}) {
        for (int num_threads = 1; num_threads <= 8; ++num_threads) {
            for (int spin_us : {0, 20}) {
                const std::vector<int> cpus(num_threads % 2 == 0 ? 8 : 0, 0);
                ThreadPool pool(num_threads, cpus, caller, spin_us);
                fork_join_with_pauses(pool, 500, spin_us);
            }
        }
    }
}

// Neither threads without work nor a caller that waits use a CPU.
void sleeps_when_idle() {
    for (const Caller caller : {Caller::kWorks, Caller::kWaits}) {
        ThreadPool pool(8, {}, caller, 50);
        auto task = [](int part) {
            if (part == 7) std::this_thread::sleep_for(microseconds(200'000));
        };
        const double before = cpu_seconds();
        pool.run(task);
        std::this_thread::sleep_for(microseconds(200'000));
        CHECK(cpu_seconds() - before < 0.1);
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
        std::this_thread::sleep_for(microseconds(100 * round));
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
    stress();
    sleeps_when_idle();
    callers_take_turns();
    closes_beside_a_run();
    check_throws<std::invalid_argument>([] { ThreadPool pool(0); }, "at least one thread");
}

}  // namespace swiftapex::tests
