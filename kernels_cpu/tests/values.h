// Tensors of any dtype for the native tests. They are written and read as double, by arithmetic
// that shares nothing with the kernels' conversions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels_cpu/kernel_table.h"
#include "kernels_cpu/tests/check.h"

namespace swiftapex::tests {

constexpr DType kDTypes[] = {kFloat32, kFloat16, kBFloat16};
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

struct Format {
    size_t bytes;
    int digits;      // of the significand, in bits
    int lowest;      // exponent of the smallest subnormal number
    double largest;  // finite number
    // Rounding of results and of what is rounded in between, relative to 1 + |result|.
    double tolerance;
};

inline const Format& format(DType dtype) {
    static constexpr Format formats[] = {{4, 24, -149, 0x1.fffffep127, 4e-6},
                                         {2, 11, -24, 65504.0, 1.5e-3},
                                         {2, 8, -133, 0x1.fep127, 1.2e-2}};
    return formats[dtype];
}

// To nearest, ties to even.
inline double rounded(double x, DType dtype) {
    if (x == 0.0 || !std::isfinite(x)) return x;
    const Format& f = format(dtype);
    int exponent;
    std::frexp(x, &exponent);
    const int last = exponent - f.digits > f.lowest ? exponent - f.digits : f.lowest;
    const double y = std::ldexp(std::nearbyint(std::ldexp(x, -last)), last);
    return std::fabs(y) > f.largest ? std::copysign(kInf, y) : y;
}

inline double decoded_bits(uint16_t bits, DType dtype) {
    const int digits = format(dtype).digits - 1;  // those that are stored
    const int ones = (1 << (15 - digits)) - 1;    // the exponent of infinity
    const int significand = bits & ((1 << digits) - 1), exponent = (bits >> digits) & ones;
    const int lowest = format(dtype).lowest;
    double x = std::ldexp(significand, lowest);
    if (exponent == ones) {
        x = significand == 0 ? kInf : kNaN;
    } else if (exponent > 0) {
        x = std::ldexp(significand + (1 << digits), lowest + exponent - 1);
    }
    return (bits & 0x8000) != 0 ? -x : x;
}

// The references read every element many times, under emulation too.
inline const std::vector<double> kDecoded = [] {
    std::vector<double> all;
    for (const DType dtype : {kFloat16, kBFloat16}) {
        for (int i = 0; i < 1 << 16; ++i) all.push_back(decoded_bits(uint16_t(i), dtype));
    }
    return all;
}();

inline double decoded(const void* p, DType dtype) {
    if (dtype == kFloat32) {
        float x;
        std::memcpy(&x, p, 4);
        return double(x);
    }
    uint16_t bits;
    std::memcpy(&bits, p, 2);
    return kDecoded[size_t(bits) + (dtype == kBFloat16 ? 1 << 16 : 0)];
}

inline void encode(double value, DType dtype, void* p) {
    const double x = rounded(value, dtype);
    if (dtype == kFloat32) {
        const float y = float(x);
        std::memcpy(p, &y, 4);
        return;
    }
    const Format& f = format(dtype);
    const int digits = f.digits - 1;
    const int infinite = ((1 << (15 - digits)) - 1) << digits;
    int bits = infinite | 1;  // NaN
    if (std::isinf(x)) {
        bits = infinite;
    } else if (!std::isnan(x)) {
        // Bits count the numbers from zero on: 2^digits of them in each binade.
        int exponent;
        std::frexp(x, &exponent);
        const int above = exponent - 1 - f.lowest - digits;
        const int binade = x != 0.0 && above > 0 ? above : 0;
        bits = int(std::ldexp(std::fabs(x), -(f.lowest + binade))) + (binade << digits);
    }
    const uint16_t signed_bits = uint16_t(bits | (std::signbit(x) ? 0x8000 : 0));
    std::memcpy(p, &signed_bits, 2);
}

// `rows` rows of `columns` elements, `stride` apart; NaN lies between them and nothing behind them,
// so that a sanitizer sees what reaches further.
class Matrix {
  public:
    Matrix(DType dtype, int64_t rows, int64_t columns, int64_t stride = 0)
        : dtype(dtype), rows(rows), columns(columns), stride(stride != 0 ? stride : columns) {
        bytes_.resize(size_t((rows - 1) * this->stride + columns) * format(dtype).bytes);
        encode(kNaN, dtype, bytes_.data());
        repeat(bytes_, format(dtype).bytes);
    }

    // So many are drawn, and then repeated: under a sanitizer, drawing them all would take longer
    // than what is tested. As the number is prime, that many rows are unlike each other.
    void fill(std::mt19937& random, double scale) {
        constexpr int64_t kDrawn = 2039;
        std::normal_distribution<double> normal(0.0, scale);
        const size_t bytes = format(dtype).bytes, row = size_t(columns) * bytes;
        std::vector<unsigned char> values(size_t(rows) * row);
        const int64_t drawn = std::min(rows * columns, kDrawn);
        for (int64_t i = 0; i < drawn; ++i) {
            encode(normal(random), dtype, values.data() + size_t(i) * bytes);
        }
        repeat(values, size_t(drawn) * bytes);
        for (int64_t i = 0; i < rows; ++i) {
            std::memcpy(const_cast<void*>(at(i, 0)), values.data() + size_t(i) * row, row);
        }
    }
    double operator()(int64_t row, int64_t column) const { return decoded(at(row, column), dtype); }
    void set(int64_t row, int64_t column, double x) {
        encode(x, dtype, const_cast<void*>(at(row, column)));
    }
    std::vector<double> row(int64_t row, int64_t begin, int64_t count) const {
        std::vector<double> values(size_t(count), 0.0);
        for (int64_t i = 0; i < count; ++i) values[size_t(i)] = (*this)(row, begin + i);
        return values;
    }
    const void* at(int64_t row, int64_t column) const {
        return bytes_.data() + size_t(row * stride + column) * format(dtype).bytes;
    }
    void* data() { return bytes_.data(); }

    // Whether all that lies between the rows is as it was.
    bool gaps_are_untouched() const {
        for (int64_t i = 0; i + 1 < rows; ++i) {
            for (int64_t j = columns; j < stride; ++j) {
                if (!std::isnan((*this)(i, j))) return false;
            }
        }
        return true;
    }

    const DType dtype;
    const int64_t rows, columns, stride;  // in elements

  private:
    // All bytes become copies of the first `period`.
    static void repeat(std::vector<unsigned char>& bytes, size_t period) {
        for (size_t done = period; done < bytes.size(); done *= 2) {
            std::memcpy(bytes.data() + done, bytes.data(), std::min(done, bytes.size() - done));
        }
    }

    std::vector<unsigned char> bytes_;
};

inline bool near(double actual, double expected, double tolerance) {
    return std::fabs(actual - expected) <= tolerance * (1.0 + std::fabs(expected));
}
inline bool near(double actual, double expected, DType dtype) {
    return near(actual, expected, format(dtype).tolerance);
}

}  // namespace swiftapex::tests
