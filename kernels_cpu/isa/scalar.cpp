#define SWIFTAPEX_ISA scalar
#include "kernels_cpu/isa/kernels.h"
