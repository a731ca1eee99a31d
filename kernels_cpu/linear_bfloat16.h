// linear_bfloat16: the instruction set's best way to multiply bfloat16.
#pragma once

#include "kernels_cpu/linear.h"

#if defined(__AMX_BF16__)
#include "kernels_cpu/linear_amx.h"
#elif defined(__AVX512BF16__)
#include "kernels_cpu/linear_dpbf16.h"
#else
namespace swiftapex::SWIFTAPEX_ISA {

constexpr auto linear_bfloat16 = linear<FmaDot<BFloat16> >;

}  // namespace swiftapex::SWIFTAPEX_ISA
#endif
