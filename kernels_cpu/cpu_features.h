#pragma once

namespace swiftapex {

// What this CPU and this kernel let a process use, each implying the ones before it.
struct CpuFeatures {
    bool avx2 = false;         // AVX2, FMA, F16C; the OS saves ymm
    bool avx512 = false;       // F, BW, DQ, VL; the OS saves zmm and masks
    bool avx512_bf16 = false;  // dpbf16ps
    bool amx_bf16 = false;     // tiles; the OS has granted this process the tile state
};

// Asks the CPU (and, for AMX, the OS for permission) once per process.
const CpuFeatures& cpu_features();

}  // namespace swiftapex
