#define SWIFTAPEX_ISA avx512
#define SWIFTAPEX_SIMD "kernels_cpu/simd/avx512.h"
#include "kernels_cpu/isa/kernels.h"
