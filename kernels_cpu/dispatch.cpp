#include "kernels_cpu/dispatch.h"

#include <atomic>
#include <stdexcept>

#include "kernels_cpu/cpu_features.h"

namespace swiftapex {

// Each is defined in isa/<name>.cpp.
namespace scalar {
const KernelTable* kernels();
}
namespace avx2 {
const KernelTable* kernels();
}
namespace avx512 {
const KernelTable* kernels();
}
namespace avx512_bf16 {
const KernelTable* kernels();
}
namespace amx_bf16 {
const KernelTable* kernels();
}
namespace neon {
const KernelTable* kernels();
}

namespace {

// Worst first, so that the last one is the best.
std::vector<const KernelTable*> runnable_tables() {
    [[maybe_unused]] const CpuFeatures& cpu = cpu_features();
    std::vector<const KernelTable*> tables{scalar::kernels()};
#ifdef SWIFTAPEX_HAVE_AVX2
    if (cpu.avx2) tables.push_back(avx2::kernels());
#endif
#ifdef SWIFTAPEX_HAVE_AVX512
    if (cpu.avx512) tables.push_back(avx512::kernels());
#endif
#ifdef SWIFTAPEX_HAVE_AVX512_BF16
    if (cpu.avx512_bf16) tables.push_back(avx512_bf16::kernels());
#endif
#ifdef SWIFTAPEX_HAVE_AMX_BF16
    if (cpu.amx_bf16) tables.push_back(amx_bf16::kernels());
#endif
#ifdef SWIFTAPEX_HAVE_NEON
    tables.push_back(neon::kernels());  // part of every aarch64
#endif
    return tables;
}

const std::vector<const KernelTable*>& tables() {
    static const std::vector<const KernelTable*> all = runnable_tables();
    return all;
}

std::atomic<const KernelTable*> capped{nullptr};  // null: no cap

}  // namespace

const KernelTable& active_kernels() {
    const KernelTable* table = capped.load(std::memory_order_acquire);
    return table != nullptr ? *table : *tables().back();
}

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const KernelTable* table : tables()) names.emplace_back(table->isa);
    return names;
}

void set_isa_cap(const std::string& isa) {
    if (isa.empty()) {
        capped.store(nullptr, std::memory_order_release);
        return;
    }
    std::string names;
    for (const KernelTable* table : tables()) {
        if (isa == table->isa) {
            capped.store(table, std::memory_order_release);
            return;
        }
        names += std::string(names.empty() ? "" : ", ") + table->isa;
    }
    throw std::invalid_argument("instruction set '" + isa +
                                "' is not available here; available: " + names);
}

}  // namespace swiftapex
