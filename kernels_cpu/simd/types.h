// Element types of tensors. Storage only: arithmetic is in float32, converted on load and store.
#pragma once

#include <cstdint>

namespace swiftapex {

struct Half {  // IEEE binary16
    uint16_t bits;
};

struct BFloat16 {  // the upper half of a float32
    uint16_t bits;
};

struct Int8 {  // of KV only: with its row's scale it is one of 255 values
    int8_t bits;
};

}  // namespace swiftapex
