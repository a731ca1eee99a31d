#include <pybind11/pybind11.h>

#include <cstdint>

#include "kernels_cuda/silu_mul.h"

namespace py = pybind11;

namespace swiftapex {
namespace {

void bind_silu_mul(py::module_& module) {
    module.def(
        "silu_mul",
        [](int dtype, uintptr_t gate_up, uintptr_t y, int64_t n, int64_t inner,
           int64_t gate_up_stride, int64_t y_stride, uintptr_t stream) {
            silu_mul(dtype, reinterpret_cast<const void*>(gate_up), reinterpret_cast<void*>(y), n,
                     inner, gate_up_stride, y_stride, reinterpret_cast<cudaStream_t>(stream));
        },
        py::call_guard<py::gil_scoped_release>(), py::arg("dtype"), py::arg("gate_up"),
        py::arg("y"), py::arg("n"), py::arg("inner"), py::arg("gate_up_stride"),
        py::arg("y_stride"), py::arg("stream"));
}

}  // namespace
}  // namespace swiftapex

PYBIND11_MODULE(_kernels_cuda, module) {
    module.doc() = "CUDA kernels of swiftapex: device addresses, sizes in elements, a stream.";
    swiftapex::bind_silu_mul(module);
}
