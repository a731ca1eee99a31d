// Body of every isa/<name>.cpp, after `SWIFTAPEX_ISA` names the instruction set and its vector
// traits are included. The linker keeps one copy of an inline function that several files define,
// whatever flags it was compiled with: hence all code lies in a namespace of the instruction set,
// in an unnamed one inside that, and no standard library templates are used here.
#include "kernels_cpu/kernel_table.h"

#define SWIFTAPEX_STRING_(x) #x
#define SWIFTAPEX_STRING(x) SWIFTAPEX_STRING_(x)

namespace swiftapex {
namespace SWIFTAPEX_ISA {
namespace {

#include "kernels_cpu/read_stream.h"

}  // namespace

const KernelTable* kernels() {
    static const KernelTable table = {
        SWIFTAPEX_STRING(SWIFTAPEX_ISA), {}, {}, {}, {}, read_stream,
    };
    return &table;
}

}  // namespace SWIFTAPEX_ISA
}  // namespace swiftapex
