#define SWIFTAPEX_ISA neon
#include "kernels_cpu/isa/kernels.h"
