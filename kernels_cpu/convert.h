#pragma once

#include "kernels_cpu/share.h"

namespace swiftapex::SWIFTAPEX_ISA {

// Rounds to nearest, ties to even. On the calling thread only.
template <class Source, class Target>
inline void convert(const void* source, void* target, int64_t count) {
    const Source* x = static_cast<const Source*>(source);
    Target* y = static_cast<Target*>(target);
    for_vectors(count,
                [&](int64_t i, int lanes) { store_lanes(y + i, lanes, load_lanes(x + i, lanes)); });
}

}  // namespace swiftapex::SWIFTAPEX_ISA
