#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels_cpu/attention_runtime.h"
#include "kernels_cpu/bindings.h"
#include "kernels_cpu/copy_blocks.h"
#include "kernels_cpu/plain_decode_attention.h"

namespace py = pybind11;

namespace swiftapex {
namespace {

// Python objects that own the memory of tasks in flight: a task may outlive its ticket. Used only
// by a thread that holds the GIL.
class Held {
  public:
    void add(std::shared_ptr<Task> task, py::object owners) {
        drop_finished();
        held_.emplace_back(std::move(task), std::move(owners));
    }
    void drop_finished() {
        std::vector<Entry> finished, others;  // owners may run Python code when they are dropped
        for (Entry& entry : held_) {
            (entry.first->finished() ? finished : others).push_back(std::move(entry));
        }
        held_ = std::move(others);
    }

  private:
    using Entry = std::pair<std::shared_ptr<Task>, py::object>;
    std::vector<Entry> held_;
};

// AttentionRuntime or CopyLane, and what its tasks use.
template <class Lane>
struct Holder {
    template <class... Args>
    explicit Holder(Args&&... args) : lane(std::forward<Args>(args)...) {}
    ~Holder() { close(); }

    // `submit()` returns the task; the owners, an argument of the caller, live until it is held.
    template <class Submit>
    std::shared_ptr<Task> hold(py::object owners, Submit submit) {
        std::shared_ptr<Task> task;
        {
            py::gil_scoped_release release;
            task = submit();
        }
        held.add(task, std::move(owners));
        return task;
    }
    void close() {
        {
            py::gil_scoped_release release;
            lane.close();
        }
        held.drop_finished();
    }

    Lane lane;
    Held held;
};

// Looks for signals in between, so that Ctrl-C ends a wait for data that never arrive.
void wait_until_finished(Task& task) {
    bool finished = task.finished();
    while (!finished) {
        {
            py::gil_scoped_release release;
            finished = task.wait_for(std::chrono::milliseconds(100));
        }
        if (!finished && PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
}

void wait(Task& task) {
    wait_until_finished(task);
    task.take();
}

void check(Task& task) {
    wait_until_finished(task);
    task.check();
}

std::pair<double, double> span(const Task& task) {
    if (task.end_ns() == 0) throw std::runtime_error("the task has not run");
    return {1e-9 * double(task.start_ns()), 1e-9 * double(task.end_ns())};
}

TaskWords words_at(uintptr_t arrival, uintptr_t done) {
    return {pointer<uint32_t>(arrival), pointer<uint32_t>(done)};
}

TaskOrder order_of(const std::string& name) {
    if (name == "fifo") return TaskOrder::kArrivedFifo;
    if (name == "deepest_first") return TaskOrder::kDeepestFirst;
    throw std::invalid_argument("order is 'fifo' or 'deepest_first', not '" + name + "'");
}

AttentionRuntime::Attention attention_of(const std::string& kernel) {
    if (kernel == "tuned") return paged_decode_attention;
    if (kernel == "plain") return plain_decode_attention;
    throw std::invalid_argument("kernel is 'tuned' or 'plain', not '" + kernel + "'");
}

void bind_task(py::module_& module) {
    py::class_<Task, std::shared_ptr<Task>>(
        module, "Task", "A call in flight; see kernels_cpu/task_lane.h for its two words.")
        .def("ready", &Task::ready, "Whether the done word is 1.")
        .def("wait", &wait, "Blocks, without the GIL, and resets the done word. Once only.")
        .def("check", &check, "In place of wait, where a stream resets the done word.")
        .def("span", &span, "Start and end in seconds of time.perf_counter().");
}

using RuntimeHolder = Holder<AttentionRuntime>;

void bind_attention_runtime(py::module_& module) {
    py::class_<RuntimeHolder>(module, "AttentionRuntime",
                              "Threads of their own for decode attention; words are addresses, 0: "
                              "the task's own.")
        .def(py::init([](int num_threads, const std::vector<int>& cpus, const std::string& order,
                         int spin_us, const std::string& kernel) {
                 return std::make_unique<RuntimeHolder>(num_threads, cpus, order_of(order), spin_us,
                                                        attention_of(kernel));
             }),
             py::arg("num_threads"), py::arg("cpus") = std::vector<int>{},
             py::arg("order") = "fifo", py::arg("spin_us") = 50, py::arg("kernel") = "tuned")
        .def_property_readonly("num_threads",
                               [](const RuntimeHolder& self) { return self.lane.num_threads(); })
        .def_property_readonly("busy_ns",
                               [](const RuntimeHolder& self) { return self.lane.busy_ns(); })
        .def_property_readonly("attended",
                               [](const RuntimeHolder& self) {
                                   const Attended sum = self.lane.attended();
                                   return py::make_tuple(sum.tasks, sum.rows, sum.tokens);
                               })
        .def("close", &RuntimeHolder::close,
             "Finishes the running task, cancels the others, joins the threads.")
        .def(
            "submit",
            [](RuntimeHolder& self, py::object owners, uintptr_t arrival, uintptr_t done,
               int64_t layer, DecodePlan& plan, int dtype, int kv_dtype, uintptr_t q, uintptr_t k,
               uintptr_t v, uintptr_t out, uintptr_t kv, uintptr_t block_table, int64_t q_stride,
               int64_t k_stride, int64_t v_stride, int64_t out_stride, int64_t block_table_stride,
               int q_heads, int head_dim, float scale) {
                const DecodeAttentionArgs args = decode_attention_args(
                    plan, dtype, kv_dtype, q, k, v, out, kv, block_table, q_stride, k_stride,
                    v_stride, out_stride, block_table_stride, q_heads, head_dim, scale);
                return self.hold(std::move(owners), [&] {
                    return self.lane.submit(layer, plan, args, words_at(arrival, done));
                });
            },
            "Queues a call of the kernel; `owners` (the plan among them) are kept until it is "
            "done.");
}

using CopyHolder = Holder<CopyLane>;

void bind_copy_lane(py::module_& module) {
    py::class_<CopyHolder>(module, "CopyLane", "A thread that copies KV blocks, in order.")
        .def(py::init([](int spin_us) { return std::make_unique<CopyHolder>(spin_us); }),
             py::arg("spin_us") = 50)
        .def_property_readonly("busy_ns",
                               [](const CopyHolder& self) { return self.lane.busy_ns(); })
        .def("close", &CopyHolder::close,
             "Finishes the running task, cancels the others, joins the thread.")
        .def(
            "submit",
            [](CopyHolder& self, py::object owners, uintptr_t arrival, uintptr_t done,
               uintptr_t source, uintptr_t target, int source_dtype, int target_dtype,
               int64_t source_num_blocks, int64_t target_num_blocks, int64_t planes, int block_size,
               int head_dim, std::vector<int64_t> source_ids, std::vector<int64_t> target_ids) {
                CopyBlocksArgs args{pointer<const void>(source),
                                    pointer<void>(target),
                                    kv_dtype_of(source_dtype),
                                    kv_dtype_of(target_dtype),
                                    source_num_blocks,
                                    target_num_blocks,
                                    planes,
                                    block_size,
                                    head_dim,
                                    std::move(source_ids),
                                    std::move(target_ids)};
                return self.hold(std::move(owners), [&] {
                    return self.lane.submit(std::move(args), words_at(arrival, done));
                });
            },
            "Queues copy_blocks(); `owners` are kept until it is done.");
}

}  // namespace

void bind_lanes(py::module_& module) {
    bind_task(module);
    bind_attention_runtime(module);
    bind_copy_lane(module);
}

}  // namespace swiftapex
