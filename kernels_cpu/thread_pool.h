// A fixed set of native threads for fork-join work of a few microseconds.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace swiftapex {

// Who runs thread index 0: the thread that calls run(), or a thread of the pool's own (a runtime
// that only hands work over and must not be held up by it).
enum class Caller { kWorks, kWaits };

class ThreadPool {
  public:
    using Task = void (*)(void* context, int thread);

    // `cpus[i]` (optional) is the CPU that the pool's own thread with index i is pinned to; a
    // system that refuses leaves it unpinned. The calling thread is never pinned: threads that
    // others start from it would inherit that. Waiting threads spin for `spin_us`, then sleep.
    explicit ThreadPool(int num_threads, const std::vector<int>& cpus = {},
                        Caller caller = Caller::kWorks, int spin_us = 50);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    // Calls task(context, i) once for every i in [0, num_threads()) and returns when all are done.
    // Thread i takes part i; a calling thread that works takes over, once its own part is done,
    // the parts whose threads have not begun: it does not wait for a thread that is still waking
    // up or that another process keeps off its CPU. So parts must not wait for each other. The
    // task must not throw and must not call run(). Calls from several threads take turns. Throws
    // std::runtime_error after close().
    void run(Task task, void* context, size_t scratch_bytes = 0);

    template <class Function>
    void run(Function& function, size_t scratch_bytes = 0) {
        const Task task = [](void* context, int thread) {
            // What the function captured by value: the caller's cache has it, so fetch all at once.
            const char* captured = static_cast<const char*>(context);
            for (size_t i = 0; i < sizeof(Function); i += 64) __builtin_prefetch(captured + i);
            (*static_cast<Function*>(context))(thread);
        };
        run(task, static_cast<void*>(&function), scratch_bytes);
    }

    // Calls function(0) on the calling thread, as a run() of one part.
    template <class Function>
    void run_on_caller(Function& function, size_t scratch_bytes = 0) {
        std::lock_guard<std::mutex> lock(run_mutex_);
        prepare(scratch_bytes);
        function(0);
    }

    // Inside a task: memory of part `thread`, at least run()'s `scratch_bytes`, 64-aligned.
    void* scratch(int thread) const { return scratch_[static_cast<size_t>(thread)]; }

    int num_threads() const { return num_threads_; }
    Caller caller() const { return caller_; }
    int num_pinned() const { return num_pinned_; }

    // Ends and joins the threads; waits for a run() in progress. May be called again.
    void close();

  private:
    // The last generations in which a part was taken and done. Each has a cache line of its own,
    // which its thread alone writes to as a rule: threads that begin or end at once would pass a
    // shared one around.
    struct alignas(64) Part {
        std::atomic<uint32_t> taken{0};
        std::atomic<uint32_t> done{0};
    };

    void work(int thread);
    static bool claim(Part& part, uint32_t generation);
    void start_thread(int thread, int cpu);
    void prepare(size_t scratch_bytes);
    void reserve_scratch(size_t bytes);
    void wait_for_parts(uint32_t generation);

    const int num_threads_;
    const Caller caller_;
    const int spin_us_;
    int num_pinned_ = 0;
    bool closed_ = false;
    std::mutex run_mutex_;  // one run() or close() at a time
    std::vector<std::thread> threads_;
    std::vector<Part> parts_;     // [part]
    std::vector<void*> scratch_;  // [part]
    size_t scratch_bytes_ = 0;

    // The protocol. run() writes task_ and context_ and then raises generation_, all in the cache
    // line that waiting threads look at. parts_[i].taken holds the last generation in which part i
    // was taken; whoever moves it from g - 1 to g owns that part, and as run() of generation g does
    // not return before the part is done, task_ and context_ are valid and stay so. A thread that
    // is too late fails to move the word and touches nothing. The owner ends with done = g.
    //
    // generation_ and done double as futex words. Each side announces its sleep (sleeping_,
    // caller_sleeps_) before its last look at the word, and the other side changes the word
    // before it looks at the announcement; both are sequentially consistent, so that one of the
    // two always sees the other and no wake-up is lost.
    alignas(64) std::atomic<uint32_t> generation_{0};
    Task task_ = nullptr;
    void* context_ = nullptr;
    std::atomic<int> sleeping_{0};
    std::atomic<bool> stop_{false};
    alignas(64) std::atomic<bool> caller_sleeps_{false};
};

}  // namespace swiftapex
