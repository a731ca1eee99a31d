#define SWIFTAPEX_ISA neon
#define SWIFTAPEX_SIMD "kernels_cpu/simd/neon.h"
#include "kernels_cpu/isa/kernels.h"
