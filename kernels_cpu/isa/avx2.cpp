#define SWIFTAPEX_ISA avx2
#include "kernels_cpu/isa/kernels.h"
