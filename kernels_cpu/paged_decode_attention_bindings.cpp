#include <pybind11/pybind11.h>

#include <memory>

#include "kernels_cpu/bindings.h"
#include "kernels_cpu/paged_decode_attention.h"
#include "kernels_cpu/plain_decode_attention.h"

namespace py = pybind11;

namespace swiftapex {

DecodeAttentionArgs decode_attention_args(const DecodePlan& plan, int dtype, int kv_dtype,
                                          uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t out,
                                          uintptr_t kv, uintptr_t block_table, int64_t q_stride,
                                          int64_t k_stride, int64_t v_stride, int64_t out_stride,
                                          int64_t block_table_stride, int q_heads, int head_dim,
                                          float scale) {
    DecodeAttentionArgs args;
    args.q = pointer<const void>(q);
    args.k = pointer<const void>(k);
    args.v = pointer<const void>(v);
    args.out = pointer<void>(out);
    args.kv = pointer<void>(kv);
    args.block_table = pointer<const int32_t>(block_table);
    args.q_stride = q_stride;
    args.k_stride = k_stride;
    args.v_stride = v_stride;
    args.out_stride = out_stride;
    args.block_table_stride = block_table_stride;
    args.q_heads = q_heads;
    args.kv_heads = plan.kv_heads();
    args.head_dim = head_dim;
    args.block_size = plan.block_size();
    args.scale = scale;
    args.dtype = dtype_of(dtype);
    args.kv_dtype = kv_dtype_of(kv_dtype);
    return args;
}

namespace {

template <void (*attention)(ThreadPool&, DecodePlan&, const DecodeAttentionArgs&)>
void bind_call(py::module_& module, const char* name, const char* doc) {
    module.def(
        name,
        [](ThreadPool& pool, DecodePlan& plan, int dtype, int kv_dtype, uintptr_t q, uintptr_t k,
           uintptr_t v, uintptr_t out, uintptr_t kv, uintptr_t block_table, int64_t q_stride,
           int64_t k_stride, int64_t v_stride, int64_t out_stride, int64_t block_table_stride,
           int q_heads, int head_dim, float scale) {
            attention(pool, plan,
                      decode_attention_args(plan, dtype, kv_dtype, q, k, v, out, kv, block_table,
                                            q_stride, k_stride, v_stride, out_stride,
                                            block_table_stride, q_heads, head_dim, scale));
        },
        ReleaseGil(), py::arg("pool"), py::arg("plan"), py::arg("dtype"), py::arg("kv_dtype"),
        py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"), py::arg("kv"),
        py::arg("block_table"), py::arg("q_stride"), py::arg("k_stride"), py::arg("v_stride"),
        py::arg("out_stride"), py::arg("block_table_stride"), py::arg("q_heads"),
        py::arg("head_dim"), py::arg("scale"), doc);
}

}  // namespace

void bind_paged_decode_attention(py::module_& module) {
    py::class_<DecodePlan>(module, "DecodePlan",
                           "Equal shares of a decode batch for each thread; serves every layer.")
        .def(py::init([](uintptr_t context_lens, int rows, int kv_heads, int block_size,
                         int num_threads) {
                 return std::make_unique<DecodePlan>(pointer<const int32_t>(context_lens), rows,
                                                     kv_heads, block_size, num_threads);
             }),
             ReleaseGil(), py::arg("context_lens"), py::arg("rows"), py::arg("kv_heads"),
             py::arg("block_size"), py::arg("num_threads"))
        .def_property_readonly("num_pieces",
                               [](const DecodePlan& plan) { return plan.pieces().size(); });

    bind_call<paged_decode_attention>(module, "paged_decode_attention",
                                      "Appends k, v [rows, kv_heads, head_dim] and writes out "
                                      "[rows, q_heads, head_dim]. Strides are between rows, in "
                                      "elements; heads of a row are contiguous.");
    bind_call<plain_decode_attention>(module, "plain_decode_attention",
                                      "The same by plain loops, for comparisons; no int8 KV.");
}

}  // namespace swiftapex
