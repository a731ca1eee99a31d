#include "kernels_cpu/dispatch.h"
#include "kernels_cpu/tests/values.h"

namespace swiftapex::tests {
namespace {

void check_row(const Matrix& source, DType target_dtype) {
    Matrix target(target_dtype, 1, source.columns);
    active_kernels().convert[source.dtype][target_dtype](source.at(0, 0), target.data(),
                                                         source.columns);
    for (int64_t i = 0; i < source.columns; ++i) {
        const double expected = rounded(source(0, i), target_dtype), actual = target(0, i);
        CHECK(std::isnan(expected)
                  ? std::isnan(actual)
                  : actual == expected && std::signbit(actual) == std::signbit(expected));
    }
}

// Every value of a 16-bit dtype.
Matrix all_values(DType dtype) {
    Matrix values(dtype, 1, 1 << 16);
    for (int bits = 0; bits < 1 << 16; ++bits) {
        const uint16_t word = uint16_t(bits);
        std::memcpy(const_cast<void*>(values.at(0, bits)), &word, 2);
    }
    return values;
}

// Each value of a 16-bit dtype, the middle to the next one and the float32 beside that.
Matrix hard_to_round(DType dtype) {
    const Matrix values = all_values(dtype);
    Matrix hard(kFloat32, 1, 4 * values.columns);
    for (int64_t i = 0; i < values.columns; ++i) {
        const float x = float(values(0, i)), next = float(values(0, (i + 1) % values.columns));
        const float middle = float((double(x) + double(next)) / 2);
        hard.set(0, 4 * i, double(x));
        hard.set(0, 4 * i + 1, double(middle));
        hard.set(0, 4 * i + 2, double(std::nextafter(middle, 3e38f)));
        hard.set(0, 4 * i + 3, double(std::nextafter(middle, -3e38f)));
    }
    return hard;
}

}  // namespace

void test_convert() {
    const Matrix half = all_values(kFloat16), bfloat16 = all_values(kBFloat16);
    const Matrix half_edges = hard_to_round(kFloat16), bfloat16_edges = hard_to_round(kBFloat16);
    for (const std::string& isa : available_isas()) {
        set_isa_cap(isa);
        for (const DType target : kDTypes) {
            for (const Matrix* values : {&half, &bfloat16, &half_edges, &bfloat16_edges}) {
                check_row(*values, target);
            }
        }
        for (const DType dtype : kDTypes) {
            for (int64_t n = 1; n < 40; ++n) {  // nothing is written past the end
                Matrix few(dtype, 1, n);
                std::mt19937 random(static_cast<unsigned>(n));
                few.fill(random, 1.0);
                for (const DType target : kDTypes) check_row(few, target);
            }
        }
    }
    set_isa_cap("");
}

}  // namespace swiftapex::tests
