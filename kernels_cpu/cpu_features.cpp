#include "kernels_cpu/cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#endif

namespace swiftapex {
namespace {

#if defined(__x86_64__)

struct Registers {
    uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
    Registers r;
    __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
    return r;
}

bool bit(uint32_t word, int index) { return (word >> index) & 1u; }

// XCR0: the register states that the OS saves on a context switch.
uint64_t saved_states() {
    uint32_t low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t{high} << 32) | low;
}

// Linux hands out the 8 KiB tile state on request only; the permission is the process's.
bool request_tile_state() {
    constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

CpuFeatures detect() {
    CpuFeatures features;
    const Registers leaf1 = cpuid(1, 0), leaf7 = cpuid(7, 0), leaf7_1 = cpuid(7, 1);
    if (!bit(leaf1.ecx, 27)) return features;  // OSXSAVE
    const uint64_t states = saved_states();
    constexpr uint64_t kYmm = 0x6, kZmm = 0xE6, kTiles = 0x60000;

    const bool fma = bit(leaf1.ecx, 12), f16c = bit(leaf1.ecx, 29);
    features.avx2 = bit(leaf7.ebx, 5) && fma && f16c && (states & kYmm) == kYmm;

    const bool f = bit(leaf7.ebx, 16), dq = bit(leaf7.ebx, 17);
    const bool bw = bit(leaf7.ebx, 30), vl = bit(leaf7.ebx, 31);
    features.avx512 = features.avx2 && f && dq && bw && vl && (states & kZmm) == kZmm;
    features.avx512_bf16 = features.avx512 && bit(leaf7_1.eax, 5);

    // Processors with bfloat16 tiles have those of whole numbers too.
    const bool amx = bit(leaf7.edx, 22) && bit(leaf7.edx, 24) && bit(leaf7.edx, 25);
    features.amx_bf16 =
        features.avx512_bf16 && amx && (states & kTiles) == kTiles && request_tile_state();
    return features;
}

#else

CpuFeatures detect() { return {}; }

#endif

}  // namespace

const CpuFeatures& cpu_features() {
    static const CpuFeatures features = detect();
    return features;
}

}  // namespace swiftapex
