#define SWIFTAPEX_ISA amx_bf16
#define SWIFTAPEX_SIMD "kernels_cpu/simd/avx512.h"
#include "kernels_cpu/isa/kernels.h"
