#include "kernels_cpu/thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <stdexcept>

namespace swiftapex {
namespace {

void futex_wait(std::atomic<uint32_t>& word, uint32_t while_value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, while_value, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Looks until ready() or until `limit_us` have passed; returns the last ready().
template <class Ready>
bool spin(Ready ready, int limit_us) {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point end = Clock::now() + std::chrono::microseconds(limit_us);
    do {
        for (int i = 0; i < 16; ++i) {  // a clock read costs about as much as a pause
            if (ready()) return true;
            pause();
        }
    } while (Clock::now() < end);
    return ready();
}

bool pin(pthread_t thread, int cpu) {
    if (cpu < 0 || cpu >= CPU_SETSIZE) return false;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    return pthread_setaffinity_np(thread, sizeof(set), &set) == 0;
}

}  // namespace

ThreadPool::ThreadPool(int num_threads, const std::vector<int>& cpus, Caller caller, int spin_us)
    : num_threads_(num_threads), caller_(caller), spin_us_(spin_us) {
    if (num_threads < 1) throw std::invalid_argument("a thread pool needs at least one thread");
    scratch_.assign(static_cast<size_t>(num_threads), nullptr);
    const int first = caller == Caller::kWorks ? 1 : 0;
    try {
        for (int thread = first; thread < num_threads; ++thread) {
            const size_t i = static_cast<size_t>(thread);
            start_thread(thread, i < cpus.size() ? cpus[i] : -1);
        }
    } catch (...) {  // the system has no more threads: end those that run already
        close();
        throw;
    }
}

ThreadPool::~ThreadPool() {
    close();
    for (void* memory : scratch_) std::free(memory);
}

void ThreadPool::start_thread(int thread, int cpu) {
    threads_.emplace_back([this, thread] { work(thread); });
    const pthread_t handle = threads_.back().native_handle();
    char name[16];
    std::snprintf(name, sizeof(name), "swiftapex-%d", thread % 10000);
    pthread_setname_np(handle, name);
    if (pin(handle, cpu)) ++num_pinned_;
}

void ThreadPool::run(Task task, void* context, size_t scratch_bytes) {
    std::lock_guard<std::mutex> lock(run_mutex_);
    if (closed_) throw std::runtime_error("the thread pool is closed");
    reserve_scratch(scratch_bytes);
    if (!threads_.empty()) {
        task_ = task;
        context_ = context;
        pending_.store(static_cast<uint32_t>(threads_.size()), std::memory_order_relaxed);
        generation_.fetch_add(1);
        if (sleeping_.load() > 0) futex_wake_all(generation_);
    }
    if (caller_ == Caller::kWorks) task(context, 0);
    wait_for_workers();
}

void ThreadPool::wait_for_workers() {
    const auto done = [this] { return pending_.load(std::memory_order_acquire) == 0; };
    if (done() || spin(done, spin_us_)) return;
    caller_sleeps_.store(true);
    for (uint32_t left = pending_.load(); left != 0; left = pending_.load()) {
        futex_wait(pending_, left);
    }
    caller_sleeps_.store(false);
}

void ThreadPool::work(int thread) {
    uint32_t seen = 0;
    const auto called = [&] { return generation_.load(std::memory_order_acquire) != seen; };
    while (true) {
        if (!spin(called, spin_us_)) {
            sleeping_.fetch_add(1);
            while (generation_.load() == seen) futex_wait(generation_, seen);
            sleeping_.fetch_sub(1);
        }
        ++seen;  // run() waits for every worker: at most one generation ahead
        if (stop_.load(std::memory_order_relaxed)) return;
        task_(context_, thread);
        if (pending_.fetch_sub(1) == 1 && caller_sleeps_.load()) futex_wake_all(pending_);
    }
}

void ThreadPool::reserve_scratch(size_t bytes) {
    if (bytes <= scratch_bytes_) return;
    constexpr size_t kAlign = 64;
    const size_t size = (std::max(bytes, 2 * scratch_bytes_) + kAlign - 1) / kAlign * kAlign;
    scratch_bytes_ = 0;
    for (void*& memory : scratch_) {
        std::free(memory);
        memory = nullptr;
        if (posix_memalign(&memory, kAlign, size) != 0) throw std::bad_alloc();
    }
    scratch_bytes_ = size;
}

void ThreadPool::close() {
    std::lock_guard<std::mutex> lock(run_mutex_);
    if (closed_) return;
    closed_ = true;
    stop_.store(true);
    generation_.fetch_add(1);
    futex_wake_all(generation_);
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
}

}  // namespace swiftapex
