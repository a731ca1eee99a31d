#define SWIFTAPEX_ISA amx_bf16
#include "kernels_cpu/isa/kernels.h"
