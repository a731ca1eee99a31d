#define SWIFTAPEX_ISA scalar
#define SWIFTAPEX_SIMD "kernels_cpu/simd/scalar.h"
#include "kernels_cpu/isa/kernels.h"
