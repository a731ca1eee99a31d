#define SWIFTAPEX_ISA avx512_bf16
#define SWIFTAPEX_SIMD "kernels_cpu/simd/avx512.h"
#include "kernels_cpu/isa/kernels.h"
