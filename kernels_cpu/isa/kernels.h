// Body of every isa/<name>.cpp, after it has defined SWIFTAPEX_ISA, the instruction set's name, and
// SWIFTAPEX_SIMD, the file of its vector traits. The linker keeps one copy of an inline function
// that several files define, whatever flags it was compiled with: hence all code that these files
// include lies in the instruction set's own namespace, and uses no standard library templates.
#pragma once

#include "kernels_cpu/argmax.h"
#include "kernels_cpu/convert.h"
#include "kernels_cpu/elementwise.h"
#include "kernels_cpu/kernel_table.h"
#include "kernels_cpu/linear.h"
#include "kernels_cpu/linear_bfloat16.h"
#include "kernels_cpu/paged_decode_attention_kernel.h"
#include "kernels_cpu/plain_decode_attention_kernel.h"
#include "kernels_cpu/quantize.h"
#include "kernels_cpu/read_stream.h"

#define SWIFTAPEX_STRING_(x) #x
#define SWIFTAPEX_STRING(x) SWIFTAPEX_STRING_(x)

namespace swiftapex::SWIFTAPEX_ISA {

const KernelTable* kernels() {
    static const KernelTable table = {
        SWIFTAPEX_STRING(SWIFTAPEX_ISA),
        {linear<FmaDot<float>>, linear<FmaDot<Half>>, linear_bfloat16},
        {rms_norm<float>, rms_norm<Half>, rms_norm<BFloat16>},
        {rope<float>, rope<Half>, rope<BFloat16>},
        {silu_mul<float>, silu_mul<Half>, silu_mul<BFloat16>},
        {argmax<float>, argmax<Half>, argmax<BFloat16>},
        read_stream,
        {decode_pieces<float>, decode_pieces<Half>, decode_pieces<BFloat16>, decode_pieces<Int8>},
        {plain_append<float>, plain_append<Half>, plain_append<BFloat16>},
        {plain_attend<float>, plain_attend<Half>, plain_attend<BFloat16>},
        {{convert<float, float>, convert<float, Half>, convert<float, BFloat16>},
         {convert<Half, float>, convert<Half, Half>, convert<Half, BFloat16>},
         {convert<BFloat16, float>, convert<BFloat16, Half>, convert<BFloat16, BFloat16>}},
        {quantize<float>, quantize<Half>, quantize<BFloat16>},
        {dequantize<float>, dequantize<Half>, dequantize<BFloat16>},
    };
    return &table;
}

}  // namespace swiftapex::SWIFTAPEX_ISA
