#include "kernels_cpu/task_lane.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "kernels_cpu/waiting.h"

namespace swiftapex {
namespace {

using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC, as Python's time.perf_counter
using std::chrono::microseconds;

constexpr int kWaiterSpinUs = 50;  // about what falling asleep and being woken costs

int64_t now_ns() { return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count(); }

uint32_t* aligned(uint32_t* word) {
    if (reinterpret_cast<uintptr_t>(word) % 4 != 0) {
        throw std::invalid_argument("a task's word must be aligned to 4 bytes");
    }
    return word;
}

}  // namespace

Task::Task(std::function<void()> body, int64_t depth, TaskWords words)
    : body_(std::move(body)),
      depth_(depth),
      arrival_(words.arrival != nullptr ? aligned(words.arrival) : &own_arrival_),
      done_(words.done != nullptr ? aligned(words.done) : &own_done_) {}

void Task::run(std::atomic<int64_t>& busy_ns) {
    std::exception_ptr error;
    start_ns_ = now_ns();
    try {
        body_();
    } catch (...) {
        error = std::current_exception();
    }
    end_ns_ = now_ns();
    busy_ns.fetch_add(end_ns_ - start_ns_, std::memory_order_relaxed);
    finish(std::move(error));
}

// Both flags change under the mutex: a host that saw finished() must not reset the done word
// before it is set.
void Task::finish(std::exception_ptr error) {
    body_ = nullptr;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        error_ = std::move(error);
        __atomic_store_n(done_, 1, __ATOMIC_RELEASE);
        finished_.store(true, std::memory_order_release);
    }
    finish_.notify_all();
}

bool Task::wait_for(std::chrono::milliseconds limit) {
    if (spin([this] { return finished(); }, kWaiterSpinUs)) return true;
    std::unique_lock<std::mutex> lock(mutex_);
    return finish_.wait_for(lock, limit, [this] { return finished(); });
}

void Task::take() { hand_out(true); }

void Task::check() { hand_out(false); }

void Task::hand_out(bool resets_word) {
    std::exception_ptr error;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!finished()) throw std::logic_error("the task has not finished");
        if (taken_) throw std::logic_error("the task's result was taken before");
        taken_ = true;
        if (resets_word) __atomic_store_n(done_, 0, __ATOMIC_RELEASE);
        error = std::move(error_);
    }
    if (error) std::rethrow_exception(std::move(error));
}

TaskLane::TaskLane(TaskOrder order, const char* name, int cpu, int spin_us)
    : order_(order), spin_(spin_us) {
    thread_ = std::thread([this] { dispatch(); });
    pthread_setname_np(thread_.native_handle(), name);
    pin(thread_.native_handle(), cpu);
}

void TaskLane::submit(std::shared_ptr<Task> task) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (closing_) throw std::runtime_error("the lane is closed");
        queue_.push_back(std::move(task));
        ++num_submitted_;
    }
    wake_.notify_one();
}

void TaskLane::dispatch() {
    prctl(PR_SET_TIMERSLACK, 1000UL);  // ns; sleeps of 20 us would take 70 with the usual 50 us
    Clock::time_point idle_since = Clock::now();
    uint64_t num_seen = 0;
    while (true) {
        std::shared_ptr<Task> task;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            if (closing_) return;
            if (num_seen != num_submitted_) idle_since = Clock::now();
            num_seen = num_submitted_;
            task = take_next();
            const auto waited = Clock::now() - idle_since;
            if (task == nullptr && waited > spin_) sleep(lock, waited);
        }
        if (task != nullptr) {
            task->run(busy_ns_);
            idle_since = Clock::now();
        } else {
            for (int i = 0; i < 16; ++i) pause();
        }
    }
}

// The next task to run, its arrival word reset; null if there is none yet. `mutex_` is held.
std::shared_ptr<Task> TaskLane::take_next() {
    auto best = queue_.end();
    for (auto it = queue_.begin(); it != queue_.end(); ++it) {
        if ((*it)->arrived() && (best == queue_.end() || (*it)->depth_ > (*best)->depth_))
            best = it;
        if (order_ == TaskOrder::kStrictFifo) break;
        if (order_ == TaskOrder::kArrivedFifo && best != queue_.end()) break;
    }
    if (best == queue_.end()) return nullptr;
    // A word that was set during the search is that of the first task which has it.
    best = std::find_if(queue_.begin(), best, [&best](const std::shared_ptr<Task>& task) {
        return task->arrival_ == (*best)->arrival_;
    });
    std::shared_ptr<Task> task = std::move(*best);
    queue_.erase(best);
    task->reset_arrival();
    return task;
}

// Until a task is submitted or, if some are queued, for a part of the time already waited.
void TaskLane::sleep(std::unique_lock<std::mutex>& lock, std::chrono::nanoseconds waited) {
    const auto woken = [this, num_seen = num_submitted_] {
        return closing_ || num_submitted_ != num_seen;
    };
    if (queue_.empty()) {
        wake_.wait(lock, woken);
    } else {
        const auto part = std::chrono::duration_cast<microseconds>(waited / 16);
        wake_.wait_for(lock, std::clamp(part, microseconds(20), microseconds(200)), woken);
    }
}

void TaskLane::close() {
    std::lock_guard<std::mutex> close_lock(close_mutex_);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
    }
    wake_.notify_one();
    if (thread_.joinable()) thread_.join();
    for (const std::shared_ptr<Task>& task : queue_) {  // no one else uses it any more
        task->finish(std::make_exception_ptr(
            std::runtime_error("the lane was closed before the task began")));
    }
    queue_.clear();
}

}  // namespace swiftapex
