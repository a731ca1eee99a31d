#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>

#include "kernels_cuda/argmax.h"
#include "kernels_cuda/copy_blocks.h"
#include "kernels_cuda/copy_rows.h"
#include "kernels_cuda/decode_attention.h"
#include "kernels_cuda/embedding.h"
#include "kernels_cuda/green_context.h"
#include "kernels_cuda/read_stream.h"
#include "kernels_cuda/rms_norm.h"
#include "kernels_cuda/rope_append.h"
#include "kernels_cuda/silu_mul.h"
#include "kernels_cuda/transfer_blocks.h"
#include "kernels_cuda/words.h"

namespace py = pybind11;

namespace swiftapex {
namespace {

using Address = uintptr_t;  // of a tensor's first element; 0: none
using Count = int64_t;      // sizes and strides, in elements unless named otherwise
using ReleaseGil = py::call_guard<py::gil_scoped_release>;
using py::arg;

template <class T>
T* pointer(Address address) {
    return reinterpret_cast<T*>(address);
}

cudaStream_t stream_of(Address stream) { return reinterpret_cast<cudaStream_t>(stream); }

void bind_layer_math(py::module_& module) {
    module.def(
        "embedding",
        [](int dtype, Address token_ids, Address table, Address y, Count n, Count dim,
           Address stream) {
            embedding(dtype, pointer<const int64_t>(token_ids), pointer<const void>(table),
                      pointer<void>(y), n, dim, stream_of(stream));
        },
        ReleaseGil(), arg("dtype"), arg("token_ids"), arg("table"), arg("y"), arg("n"), arg("dim"),
        arg("stream"));
    module.def(
        "rms_norm",
        [](int dtype, Address x, Address weight, Address y, Count n, Count heads, Count dim,
           Count x_stride, Count x_head_stride, Count y_stride, Count y_head_stride, float eps,
           Address stream) {
            rms_norm(dtype, pointer<const void>(x), pointer<const void>(weight), pointer<void>(y),
                     n, heads, dim, x_stride, x_head_stride, y_stride, y_head_stride, eps,
                     stream_of(stream));
        },
        ReleaseGil(), arg("dtype"), arg("x"), arg("weight"), arg("y"), arg("n"), arg("heads"),
        arg("dim"), arg("x_stride"), arg("x_head_stride"), arg("y_stride"), arg("y_head_stride"),
        arg("eps"), arg("stream"));
    module.def(
        "add_rms_norm",
        [](int dtype, Address x, Address residual, Address weight, Address sum, Address y, Count n,
           Count dim, Count x_stride, Count residual_stride, Count sum_stride, Count y_stride,
           float eps, Address stream) {
            add_rms_norm(dtype, pointer<const void>(x), pointer<const void>(residual),
                         pointer<const void>(weight), pointer<void>(sum), pointer<void>(y), n, dim,
                         x_stride, residual_stride, sum_stride, y_stride, eps, stream_of(stream));
        },
        ReleaseGil(), arg("dtype"), arg("x"), arg("residual"), arg("weight"), arg("sum"), arg("y"),
        arg("n"), arg("dim"), arg("x_stride"), arg("residual_stride"), arg("sum_stride"),
        arg("y_stride"), arg("eps"), arg("stream"));
    module.def(
        "silu_mul",
        [](int dtype, Address gate_up, Address y, Count n, Count inner, Count gate_up_stride,
           Count y_stride, Address stream) {
            silu_mul(dtype, pointer<const void>(gate_up), pointer<void>(y), n, inner,
                     gate_up_stride, y_stride, stream_of(stream));
        },
        ReleaseGil(), arg("dtype"), arg("gate_up"), arg("y"), arg("n"), arg("inner"),
        arg("gate_up_stride"), arg("y_stride"), arg("stream"));
    module.def(
        "argmax",
        [](int dtype, Address x, Address indices, Address invalid, Count n, Count dim, Count stride,
           Address stream) {
            argmax(dtype, pointer<const void>(x), pointer<int64_t>(indices), pointer<bool>(invalid),
                   n, dim, stride, stream_of(stream));
        },
        ReleaseGil(), arg("dtype"), arg("x"), arg("indices"), arg("invalid"), arg("n"), arg("dim"),
        arg("stride"), arg("stream"));
}

void bind_attention(py::module_& module) {
    module.def(
        "rope_append",
        [](int dtype, int kv_dtype, Address qkv, Address rotation, Address slots, Address kv,
           Count n, Count q_heads, Count kv_heads, Count head_dim, Count qkv_stride,
           Count block_size, Address stream) {
            rope_append(dtype, kv_dtype, pointer<void>(qkv), pointer<const float>(rotation),
                        pointer<const int64_t>(slots), pointer<void>(kv), n, q_heads, kv_heads,
                        head_dim, qkv_stride, block_size, stream_of(stream));
        },
        ReleaseGil(), arg("dtype"), arg("kv_dtype"), arg("qkv"), arg("rotation"), arg("slots"),
        arg("kv"), arg("n"), arg("q_heads"), arg("kv_heads"), arg("head_dim"), arg("qkv_stride"),
        arg("block_size"), arg("stream"));
    module.def(
        "decode_attention",
        [](int dtype, int kv_dtype, Address q, Address kv, Address block_table,
           Address context_lens, Address out, Address workspace, Count n, Count q_heads,
           Count kv_heads, Count head_dim, Count block_size, Count table_stride, Count q_stride,
           Count out_stride, float scale, Count num_ctas, Address plan, bool is_planned,
           Address stream) {
            decode_attention(dtype, kv_dtype, pointer<const void>(q), pointer<const void>(kv),
                             pointer<const int32_t>(block_table),
                             pointer<const int32_t>(context_lens), pointer<void>(out),
                             pointer<void>(workspace), n, q_heads, kv_heads, head_dim, block_size,
                             table_stride, q_stride, out_stride, scale, num_ctas,
                             pointer<void>(plan), is_planned, stream_of(stream));
        },
        ReleaseGil(), arg("dtype"), arg("kv_dtype"), arg("q"), arg("kv"), arg("block_table"),
        arg("context_lens"), arg("out"), arg("workspace"), arg("n"), arg("q_heads"),
        arg("kv_heads"), arg("head_dim"), arg("block_size"), arg("table_stride"), arg("q_stride"),
        arg("out_stride"), arg("scale"), arg("num_ctas"), arg("plan"), arg("is_planned"),
        arg("stream"));
    module.def("decode_attention_plan_bytes", &decode_attention_plan_bytes, arg("num_ctas"));
    module.def("set_capability_cap", &set_capability_cap, arg("capability"),
               "decode_attention uses no kernel for newer GPUs than this; 0: no cap.");
    module.def("decode_attention_workspace", &decode_attention_workspace, arg("n"), arg("q_heads"),
               arg("kv_heads"), arg("head_dim"), arg("num_ctas"), "In bytes.");
    module.def(
        "read_stream",
        [](Address data, Count bytes, Address out, Count num_ctas, Address stream) {
            read_stream(pointer<const void>(data), bytes, pointer<float>(out), num_ctas,
                        stream_of(stream));
        },
        ReleaseGil(), arg("data"), arg("bytes"), arg("out"), arg("num_ctas"), arg("stream"));
}

void bind_transfers(py::module_& module) {
    module.def(
        "gather_rows",
        [](Address src, Address dst, Count n, Count row_bytes, Count src_stride_bytes,
           Count dst_stride_bytes, Address arrival, Address counter, Address stream) {
            gather_rows(pointer<const void>(src), pointer<void>(dst), n, row_bytes,
                        src_stride_bytes, dst_stride_bytes, pointer<int32_t>(arrival),
                        pointer<int32_t>(counter), stream_of(stream));
        },
        ReleaseGil(), arg("src"), arg("dst"), arg("n"), arg("row_bytes"), arg("src_stride_bytes"),
        arg("dst_stride_bytes"), arg("arrival"), arg("counter"), arg("stream"));
    module.def(
        "scatter_rows",
        [](Address src, Address dst, Count n, Count row_bytes, Count src_stride_bytes,
           Count dst_stride_bytes, Address done, Address counter, Address stream) {
            scatter_rows(pointer<const void>(src), pointer<void>(dst), n, row_bytes,
                         src_stride_bytes, dst_stride_bytes, pointer<int32_t>(done),
                         pointer<int32_t>(counter), stream_of(stream));
        },
        ReleaseGil(), arg("src"), arg("dst"), arg("n"), arg("row_bytes"), arg("src_stride_bytes"),
        arg("dst_stride_bytes"), arg("done"), arg("counter"), arg("stream"));
    module.def(
        "copy_blocks",
        [](int src_dtype, int dst_dtype, Address src, Address dst, Address src_ids, Address dst_ids,
           Count num_pairs, Count block_elements, Count max_ctas, Address done, Address counter,
           Address stream) {
            copy_blocks(src_dtype, dst_dtype, pointer<const void>(src), pointer<void>(dst),
                        pointer<const int64_t>(src_ids), pointer<const int64_t>(dst_ids), num_pairs,
                        block_elements, max_ctas, pointer<int32_t>(done), pointer<int32_t>(counter),
                        stream_of(stream));
        },
        ReleaseGil(), arg("src_dtype"), arg("dst_dtype"), arg("src"), arg("dst"), arg("src_ids"),
        arg("dst_ids"), arg("num_pairs"), arg("block_elements"), arg("max_ctas"), arg("done"),
        arg("counter"), arg("stream"));
    module.def(
        "transfer_blocks",
        [](Address src, Address dst, const std::vector<int64_t>& src_ids,
           const std::vector<int64_t>& dst_ids, Count block_bytes, Address stream) {
            transfer_blocks(pointer<const void>(src), pointer<void>(dst), src_ids, dst_ids,
                            block_bytes, stream_of(stream));
        },
        ReleaseGil(), arg("src"), arg("dst"), arg("src_ids"), arg("dst_ids"), arg("block_bytes"),
        arg("stream"));
}

void bind_words(py::module_& module) {
    const auto bind = [&](const char* name, auto call) {
        module.def(
            name,
            [call](Address word, uint32_t value, Address stream) {
                call(pointer<uint32_t>(word), value, stream_of(stream));
            },
            ReleaseGil(), arg("word"), arg("value"), arg("stream"));
    };
    bind("wait_word", &wait_word);
    bind("write_word", &write_word);
    bind("wait_word_kernel", &wait_word_kernel);
    bind("write_word_kernel", &write_word_kernel);
}

void bind_green_context(py::module_& module) {
    py::class_<GreenContext>(module, "GreenContext",
                             "A stream on some of the multiprocessors; see green_context.h.")
        .def(py::init<int, int>(), arg("device"), arg("num_sms"))
        .def_property_readonly("num_sms", &GreenContext::num_sms)
        .def_property_readonly("stream", [](const GreenContext& self) {
            return reinterpret_cast<uintptr_t>(self.stream());
        });
}

}  // namespace
}  // namespace swiftapex

PYBIND11_MODULE(_kernels_cuda, module) {
    module.doc() = "CUDA kernels of swiftapex: device addresses, sizes in elements, a stream.";
    swiftapex::bind_layer_math(module);
    swiftapex::bind_attention(module);
    swiftapex::bind_transfers(module);
    swiftapex::bind_words(module);
    swiftapex::bind_green_context(module);
}
