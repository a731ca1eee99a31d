#define SWIFTAPEX_ISA avx512_bf16
#include "kernels_cpu/isa/kernels.h"
