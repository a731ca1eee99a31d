#include "kernels_cpu/bindings.h"

#include <pybind11/stl.h>

#include <memory>
#include <string>

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

using Address = uintptr_t;  // of a tensor's first element; 0: none
using Count = int64_t;      // sizes and strides, in elements

void bind_linear(py::module_& module) {
    module.def(
        "linear",
        [](ThreadPool& pool, int dtype, Address x, Address weight, Address bias, Address residual,
           Address y, Count n, Count in, Count out, Count x_stride, Count weight_stride,
           Count residual_stride, Count y_stride) {
            const LinearArgs args{pointer<const void>(x),
                                  pointer<const void>(weight),
                                  pointer<const void>(bias),
                                  pointer<const void>(residual),
                                  pointer<void>(y),
                                  n,
                                  in,
                                  out,
                                  x_stride,
                                  weight_stride,
                                  residual_stride,
                                  y_stride};
            linear(pool, dtype_of(dtype), args);
        },
        ReleaseGil(), "y[n, out] = x[n, in] * weight[out, in]^T + bias + residual.");
}

void bind_sequences(py::module_& module) {
    module.def(
        "norm_linear",
        [](ThreadPool& pool, int dtype, Address x, Address norm_weight, float eps, Address weight,
           Address bias, Address y, Address rotation, Count n, Count in, Count out, Count rotated,
           Count head_dim, Count x_stride, Count weight_stride) {
            const NormLinearArgs args{pointer<const void>(x),
                                      pointer<const void>(norm_weight),
                                      eps,
                                      pointer<const void>(weight),
                                      pointer<const void>(bias),
                                      pointer<void>(y),
                                      pointer<const float>(rotation),
                                      n,
                                      in,
                                      out,
                                      rotated,
                                      head_dim,
                                      x_stride,
                                      weight_stride};
            norm_linear(pool, dtype_of(dtype), args);
        },
        ReleaseGil(),
        "y[n, out] = rms_norm(x[n, in]) * weight[out, in]^T + bias; the first heads are rotated.");
    module.def(
        "proj_ffn",
        [](ThreadPool& pool, int dtype, Address o, Address proj, Address proj_bias, Address x,
           Address norm_weight, float eps, Address gate_up, Address gate_up_bias, Address down,
           Address down_bias, Address y, Count n, Count width, Count hidden, Count inner,
           Count o_stride, Count proj_stride, Count x_stride, Count gate_up_stride,
           Count down_stride) {
            const ProjFfnArgs args{pointer<const void>(o),
                                   pointer<const void>(proj),
                                   pointer<const void>(proj_bias),
                                   pointer<const void>(x),
                                   pointer<const void>(norm_weight),
                                   eps,
                                   pointer<const void>(gate_up),
                                   pointer<const void>(gate_up_bias),
                                   pointer<const void>(down),
                                   pointer<const void>(down_bias),
                                   pointer<void>(y),
                                   n,
                                   width,
                                   hidden,
                                   inner,
                                   o_stride,
                                   proj_stride,
                                   x_stride,
                                   gate_up_stride,
                                   down_stride};
            proj_ffn(pool, dtype_of(dtype), args);
        },
        ReleaseGil(),
        "y[n, hidden] = h + down * silu_mul(gate_up * rms_norm(h)), h = x + proj * o.");
}

void bind_elementwise(py::module_& module) {
    module.def(
        "rms_norm",
        [](ThreadPool& pool, int dtype, Address x, Address weight, Address y, Count n, Count heads,
           Count dim, Count x_stride_n, Count x_stride_head, Count y_stride_n, Count y_stride_head,
           float eps) {
            const RmsNormArgs args{pointer<const void>(x),
                                   pointer<const void>(weight),
                                   pointer<void>(y),
                                   n,
                                   heads,
                                   dim,
                                   x_stride_n,
                                   x_stride_head,
                                   y_stride_n,
                                   y_stride_head,
                                   eps};
            rms_norm(pool, dtype_of(dtype), args);
        },
        ReleaseGil(), "y = x / sqrt(mean(x^2) + eps) * weight over rows of [n, heads, dim].");
    module.def(
        "rope",
        [](ThreadPool& pool, int dtype, Address x, Address rotation, Count n, Count heads,
           Count dim, Count x_stride_n, Count x_stride_head, Count rotation_stride) {
            const RopeArgs args{pointer<void>(x),
                                pointer<const float>(rotation),
                                n,
                                heads,
                                dim,
                                x_stride_n,
                                x_stride_head,
                                rotation_stride};
            rope(pool, dtype_of(dtype), args);
        },
        ReleaseGil(), "Rotates pairs (i, i + dim / 2) of x [n, heads, dim] in place.");
    module.def(
        "silu_mul",
        [](ThreadPool& pool, int dtype, Address gate_up, Address y, Count n, Count inner,
           Count gate_up_stride, Count y_stride) {
            const SiluMulArgs args{
                pointer<const void>(gate_up), pointer<void>(y), n, inner, gate_up_stride, y_stride};
            silu_mul(pool, dtype_of(dtype), args);
        },
        ReleaseGil(), "y[n, inner] = silu(gate_up[:, :inner]) * gate_up[:, inner:].");
    module.def(
        "argmax",
        [](ThreadPool& pool, int dtype, Address x, Address index, Address invalid, Count n,
           Count dim, Count x_stride) {
            const ArgmaxArgs args{pointer<const void>(x),
                                  pointer<int64_t>(index),
                                  pointer<bool>(invalid),
                                  n,
                                  dim,
                                  x_stride};
            argmax(pool, dtype_of(dtype), args);
        },
        ReleaseGil(), "First index [n] of the largest of each row of x [n, dim]; invalid [n].");
    module.def(
        "read_stream",
        [](ThreadPool& pool, Address data, Count bytes) {
            return read_stream(pool, pointer<const void>(data), bytes);
        },
        ReleaseGil(), "Wrapping sum of the buffer's 64-bit words, read once with all threads.");
}

}  // namespace
}  // namespace swiftapex

PYBIND11_MODULE(_kernels_cpu, module) {
    module.doc() = "CPU kernels of swiftapex: raw addresses, sizes in elements, no torch.";
    swiftapex::bind_thread_pool(module);
    swiftapex::bind_dispatch(module);
    swiftapex::bind_linear(module);
    swiftapex::bind_sequences(module);
    swiftapex::bind_elementwise(module);
    swiftapex::bind_paged_decode_attention(module);
    swiftapex::bind_lanes(module);
}
