#define SWIFTAPEX_ISA avx512
#include "kernels_cpu/isa/kernels.h"
