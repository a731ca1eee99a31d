#pragma once

#include <string>
#include <vector>

#include "kernels_cpu/kernel_table.h"

namespace swiftapex {

// The best kernels that this CPU runs, no better than the cap.
const KernelTable& active_kernels();

// Names of the instruction sets that are compiled in and run here, worst first.
std::vector<std::string> available_isas();

// Keeps active_kernels() at or below the named instruction set (process-wide; tests use it to
// reach every code path). Empty: no cap. Throws std::invalid_argument for a name that is not in
// available_isas().
void set_isa_cap(const std::string& isa);

}  // namespace swiftapex
