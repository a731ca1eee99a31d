#define SWIFTAPEX_ISA avx2
#define SWIFTAPEX_SIMD "kernels_cpu/simd/avx2.h"
#include "kernels_cpu/isa/kernels.h"
