#include "kernels_cpu/bindings.h"

#include <pybind11/stl.h>

#include <memory>

#include "kernels_cpu/dispatch.h"
#include "kernels_cpu/launch.h"

namespace py = pybind11;

namespace swiftapex {
namespace {

void bind_thread_pool(py::module_& module) {
    py::class_<ThreadPool>(module, "ThreadPool",
                           "Native threads for fork-join kernels; see kernels_cpu/thread_pool.h.")
        .def(py::init(
                 [](int num_threads, const std::vector<int>& cpus, bool caller_works, int spin_us) {
                     const Caller caller = caller_works ? Caller::kWorks : Caller::kWaits;
                     return std::make_unique<ThreadPool>(num_threads, cpus, caller, spin_us);
                 }),
             py::arg("num_threads"), py::arg("cpus") = std::vector<int>{},
             py::arg("caller_works") = true, py::arg("spin_us") = 50)
        .def_property_readonly("num_threads", &ThreadPool::num_threads)
        .def_property_readonly("num_pinned", &ThreadPool::num_pinned)
        .def("close", &ThreadPool::close, ReleaseGil(), "Ends and joins the threads.");
}

void bind_dispatch(py::module_& module) {
    module.def(
        "isa", [] { return std::string(active_kernels().isa); },
        "Name of the instruction set whose kernels run now.");
    module.def("available_isas", &available_isas, "Names, worst first.");
    module.def("set_isa_cap", &set_isa_cap, py::arg("isa"),
               "Process-wide upper limit of the instruction set; an empty name lifts it.");
}

void bind_kernels(py::module_& module) {
    module.def(
        "read_stream",
        [](ThreadPool& pool, uintptr_t data, int64_t bytes) {
            return read_stream(pool, pointer<const void>(data), bytes);
        },
        ReleaseGil(), py::arg("pool"), py::arg("data"), py::arg("bytes"),
        "Wrapping sum of the buffer's 64-bit words, read once with all threads.");
}

}  // namespace
}  // namespace swiftapex

PYBIND11_MODULE(_kernels_cpu, module) {
    module.doc() = "CPU kernels of swiftapex: raw addresses, sizes in elements, no torch.";
    swiftapex::bind_thread_pool(module);
    swiftapex::bind_dispatch(module);
    swiftapex::bind_kernels(module);
}
