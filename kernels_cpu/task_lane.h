// A native thread that runs tasks whose data have arrived: no Python thread and no GIL lie between
// the one who produces a task's input and the one who consumes its result.
//
// The hand-off. A task has two words of 32 bits in host memory, aligned to 4, that hold 0 or 1 and
// are reset by whoever consumes them, so that a stream can write and await constants:
//
//     arrival  1: the input lies in memory. Set by its producer: a stream after its copy
//              (cuStreamWriteValue32), or the host. Reset by the lane when it takes the task.
//     done     1: the result lies in memory. Set by the lane. Reset by its one consumer: the host
//              in take(), or a stream after cuStreamWaitValue32.
//
// The producer writes its data before the word (release; a stream write is a fence of its own),
// the consumer reads the word before the data (acquire). Each word has one writer at a time: the
// producer sets only what the consumer has reset. Tasks may share words if their hand-offs follow
// each other in the order of submission, and several of those may be queued at once: a stream's
// later hand-offs begin behind its earlier ones, so that an arrival is that of the first task in
// the queue. Their done word is reset by the stream alone; the host calls check(), not take().
//
// A task that failed, or was cancelled by close(), sets its done word too, so that no stream waits
// for ever; the error reaches the host in take() or check(). Tasks that share a word and are
// cancelled together set it once for all of them: a stream that awaits several has to be done
// before close().
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace swiftapex {

// Null: the task's own word; its own arrival word is set from the start.
struct TaskWords {
    uint32_t* arrival = nullptr;
    uint32_t* done = nullptr;
};

// One call in flight. Its owners are the lane, until it has finished, and whoever awaits it. The
// words and the memory that `body` uses must live until finished().
class Task {
  public:
    // Throws std::invalid_argument for a word that is not aligned to 4 bytes.
    Task(std::function<void()> body, int64_t depth, TaskWords words);

    // Whether the done word is 1: take() would succeed.
    bool ready() const { return __atomic_load_n(done_, __ATOMIC_ACQUIRE) == 1; }
    // Whether it ran, failed or was cancelled. Stays true after take().
    bool finished() const { return finished_.load(std::memory_order_acquire); }

    // Returns finished() once it is true, or after `limit`.
    bool wait_for(std::chrono::milliseconds limit);
    // Resets the done word and throws what the body threw. For a task that has finished; throws
    // std::logic_error if it has not, or if its result was taken before.
    void take();
    // The same without resetting the word, which a stream does.
    void check();

    // CLOCK_MONOTONIC in ns; 0 until finished() or if the body did not run.
    int64_t start_ns() const { return finished() ? start_ns_ : 0; }
    int64_t end_ns() const { return finished() ? end_ns_ : 0; }

  private:
    friend class TaskLane;
    bool arrived() const { return __atomic_load_n(arrival_, __ATOMIC_ACQUIRE) == 1; }
    void reset_arrival() { __atomic_store_n(arrival_, 0, __ATOMIC_RELEASE); }
    void run(std::atomic<int64_t>& busy_ns);
    void finish(std::exception_ptr error);
    void hand_out(bool resets_word);

    std::function<void()> body_;
    const int64_t depth_;
    uint32_t own_arrival_ = 1, own_done_ = 0;
    uint32_t* const arrival_;
    uint32_t* const done_;
    int64_t start_ns_ = 0, end_ns_ = 0;  // published by finished_

    std::mutex mutex_;  // of what follows, and of the host's side of the done word
    std::condition_variable finish_;
    std::atomic<bool> finished_{false};
    bool taken_ = false;
    std::exception_ptr error_;
};

enum class TaskOrder {
    kStrictFifo,    // in the order of submission: a task whose data are late holds up all others
    kArrivedFifo,   // of the tasks whose data have arrived, the one submitted first
    kDeepestFirst,  // of the tasks whose data have arrived, the deepest; first submitted of those
};

class TaskLane {
  public:
    // The thread is called `name` (up to 15 characters), and pinned to `cpu` unless that is -1.
    // It spins for `spin_us` when there is nothing to run, then sleeps: without a limit while no
    // task is queued, or between looks at the arrival words, which are 20 to 200 us apart and
    // never more than a sixteenth of the time already waited.
    TaskLane(TaskOrder order, const char* name, int cpu = -1, int spin_us = 50);
    ~TaskLane() { close(); }
    TaskLane(const TaskLane&) = delete;
    TaskLane& operator=(const TaskLane&) = delete;

    // Queues a task; never waits for one to run. Throws std::runtime_error after close().
    void submit(std::shared_ptr<Task> task);

    // Time that tasks took so far, those still running not included.
    int64_t busy_ns() const { return busy_ns_.load(std::memory_order_relaxed); }

    // Lets the running task finish, cancels the others and joins the thread. May be called again.
    void close();

  private:
    void dispatch();
    std::shared_ptr<Task> take_next();
    void sleep(std::unique_lock<std::mutex>& lock, std::chrono::nanoseconds waited);

    const TaskOrder order_;
    const std::chrono::microseconds spin_;
    std::atomic<int64_t> busy_ns_{0};

    std::mutex mutex_;  // of what follows; never held while a task runs
    std::condition_variable wake_;
    std::deque<std::shared_ptr<Task>> queue_;  // in the order of submission
    uint64_t num_submitted_ = 0;
    bool closing_ = false;

    std::mutex close_mutex_;  // one close() at a time
    std::thread thread_;
};

}  // namespace swiftapex
