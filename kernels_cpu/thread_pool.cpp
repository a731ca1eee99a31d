#include "kernels_cpu/thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <stdexcept>

#include "kernels_cpu/waiting.h"

namespace swiftapex {
namespace {

void futex_wait(std::atomic<uint32_t>& word, uint32_t while_value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, while_value, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

ThreadPool::ThreadPool(int num_threads, const std::vector<int>& cpus, Caller caller, int spin_us)
    : num_threads_(num_threads),
      caller_(caller),
      spin_us_(spin_us),
      parts_(static_cast<size_t>(std::max(num_threads, 0))) {
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
    prepare(scratch_bytes);
    task_ = task;
    context_ = context;
    const uint32_t generation = generation_.fetch_add(1) + 1;
    if (sleeping_.load() > 0) futex_wake_all(generation_);
    if (caller_ == Caller::kWorks) {
        for (size_t i = 0; i < parts_.size(); ++i) {
            if (!claim(parts_[i], generation)) continue;
            task(context, static_cast<int>(i));
            parts_[i].done.store(generation, std::memory_order_relaxed);
        }
    }
    wait_for_parts(generation);
}

void ThreadPool::prepare(size_t scratch_bytes) {
    if (closed_) throw std::runtime_error("the thread pool is closed");
    reserve_scratch(scratch_bytes);
}

bool ThreadPool::claim(Part& part, uint32_t generation) {
    uint32_t previous = generation - 1;
    return part.taken.load(std::memory_order_relaxed) == previous &&
           part.taken.compare_exchange_strong(previous, generation, std::memory_order_acq_rel);
}

void ThreadPool::wait_for_parts(uint32_t generation) {
    size_t i = 0;
    const auto done = [&] {
        while (i < parts_.size() && parts_[i].done.load(std::memory_order_acquire) == generation) {
            ++i;
        }
        return i == parts_.size();
    };
    if (done() || spin(done, spin_us_)) return;
    caller_sleeps_.store(true);
    for (; i < parts_.size(); ++i) {
        std::atomic<uint32_t>& word = parts_[i].done;
        for (uint32_t last = word.load(); last != generation; last = word.load()) {
            futex_wait(word, last);
        }
    }
    caller_sleeps_.store(false);
}

void ThreadPool::work(int thread) {
    Part& part = parts_[static_cast<size_t>(thread)];
    uint32_t seen = 0;
    const auto called = [&] { return generation_.load(std::memory_order_acquire) != seen; };
    while (true) {
        if (!spin(called, spin_us_)) {
            sleeping_.fetch_add(1);
            while (generation_.load() == seen) futex_wait(generation_, seen);
            sleeping_.fetch_sub(1);
        }
        seen = generation_.load(std::memory_order_acquire);
        if (stop_.load(std::memory_order_relaxed)) return;
        if (!claim(part, seen)) continue;
        task_(context_, thread);
        part.done.store(seen);
        if (caller_sleeps_.load()) futex_wake_all(part.done);
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
