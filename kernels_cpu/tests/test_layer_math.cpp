// linear, rms_norm, rope and silu_mul against double, in odd sizes and strided rows.
#include <numeric>

#include "kernels_cpu/dispatch.h"
#include "kernels_cpu/launch.h"
#include "kernels_cpu/tests/values.h"

namespace swiftapex::tests {
namespace {

struct Sizes {
    int64_t n, in, out;
};

void linear_of(ThreadPool& pool, DType dtype, Sizes s, bool has_bias, bool has_residual) {
    std::mt19937 random(static_cast<unsigned>(s.n * s.in + s.out));
    Matrix x(dtype, s.n, s.in, s.in + 3), w(dtype, s.out, s.in, s.in + 1), bias(dtype, 1, s.out);
    Matrix residual(dtype, s.n, s.out, s.out + 2), y(dtype, s.n, s.out, s.out + 5);
    x.fill(random, 1.0);
    w.fill(random, 1.0 / std::sqrt(double(s.in)));
    bias.fill(random, 1.0);
    residual.fill(random, 1.0);
    linear(pool, dtype,
           {x.data(), w.data(), has_bias ? bias.data() : nullptr,
            has_residual ? residual.data() : nullptr, y.data(), s.n, s.in, s.out, x.stride,
            w.stride, residual.stride, y.stride});
    std::vector<std::vector<double>> inputs;
    for (int64_t i = 0; i < s.n; ++i) inputs.push_back(x.row(i, 0, s.in));
    for (int64_t j = 0; j < s.out; ++j) {
        const std::vector<double> weights = w.row(j, 0, s.in);
        for (int64_t i = 0; i < s.n; ++i) {
            const std::vector<double>& input = inputs[size_t(i)];
            double sum = std::inner_product(input.begin(), input.end(), weights.begin(),
                                            has_bias ? bias(0, j) : 0.0);
            if (has_residual) sum = rounded(sum, dtype) + residual(i, j);
            CHECK(near(y(i, j), sum, dtype));
        }
    }
    CHECK(y.gaps_are_untouched());
}

// Heads [first, first + heads) of `all` heads, as q and k lie in the rows of qkv; in place or not.
void rms_norm_of(ThreadPool& pool, DType dtype, int64_t heads, int64_t dim, bool in_place) {
    std::mt19937 random(static_cast<unsigned>(dim + heads));
    const int64_t n = 5, first = 2, all = heads + 3;
    Matrix x(dtype, n, all * dim, all * dim + 4), weight(dtype, 1, dim);
    x.fill(random, 3.0);
    weight.fill(random, 1.0);
    const Matrix before = x;
    Matrix apart(dtype, n, all * dim, all * dim + 1);
    Matrix& y = in_place ? x : apart;
    const size_t offset = size_t(first * dim) * format(dtype).bytes;
    rms_norm(pool, dtype,
             {static_cast<char*>(x.data()) + offset, weight.data(),
              static_cast<char*>(y.data()) + offset, n, heads, dim, x.stride, dim, y.stride, dim,
              1e-5f});
    double squares = 0.0;  // of one head, summed up
    for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j < all * dim; ++j) {
            const int64_t head = j / dim * dim;
            if (head < first * dim || head >= (first + heads) * dim) {
                CHECK(in_place ? y(i, j) == before(i, j) : std::isnan(y(i, j)));
                continue;
            }
            if (j == head) {
                const std::vector<double> values = before.row(i, head, dim);
                squares = std::inner_product(values.begin(), values.end(), values.begin(), 0.0);
            }
            const double normed = before(i, j) / std::sqrt(squares / double(dim) + 1e-5);
            CHECK(near(y(i, j), rounded(normed, dtype) * weight(0, j - head), dtype));
        }
    }
    CHECK(y.gaps_are_untouched());
}

void rope_of(ThreadPool& pool, DType dtype, int64_t n, int64_t dim) {
    std::mt19937 random(static_cast<unsigned>(dim + n));
    const int64_t heads = 3, half = dim / 2;
    Matrix x(dtype, n, heads * dim, heads * dim + 8), rotation(kFloat32, n, dim);
    x.fill(random, 1.0);
    for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j < half; ++j) {
            const double angle = double(random() % 1000) / 10;
            rotation.set(i, j, std::cos(angle));
            rotation.set(i, half + j, std::sin(angle));
        }
    }
    const Matrix before = x;
    rope(pool, dtype,
         {x.data(), static_cast<const float*>(rotation.data()), n, heads, dim, x.stride, dim, dim});
    for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j < heads * dim; ++j) {
            const int64_t k = j % half;
            const bool second = j % dim >= half;
            const double a = before(i, second ? j - half : j), b = before(i, second ? j : j + half);
            const double cosine = rotation(i, k), sine = rotation(i, half + k);
            CHECK(near(x(i, j), second ? b * cosine + a * sine : a * cosine - b * sine, dtype));
        }
    }
    CHECK(x.gaps_are_untouched());
}

void silu_mul_of(ThreadPool& pool, DType dtype, int64_t n, int64_t inner) {
    std::mt19937 random(static_cast<unsigned>(n + inner));
    Matrix gate_up(dtype, n, 2 * inner, 2 * inner + 3), y(dtype, n, inner, inner + 2);
    gate_up.fill(random, 4.0);
    gate_up.set(0, 0, -60000.0);
    gate_up.set(n - 1, inner - 1, 60000.0);
    gate_up.set(n - 1, 2 * inner - 1, 0.5);
    silu_mul(pool, dtype, {gate_up.data(), y.data(), n, inner, gate_up.stride, y.stride});
    for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j < inner; ++j) {
            const double gate = gate_up(i, j), silu = gate / (1.0 + std::exp(-gate));
            CHECK(near(y(i, j), rounded(silu, dtype) * gate_up(i, inner + j), dtype));
        }
    }
    CHECK(y.gaps_are_untouched());
}

void all_of(ThreadPool& pool, DType dtype) {
    constexpr Sizes sizes[] = {{1, 64, 96}, {1, 65, 7},    {2, 31, 33},  {3, 96, 50},
                               {5, 33, 16}, {17, 100, 71}, {33, 72, 20}, {18, 2100, 5}};
    for (const Sizes& s : sizes) {
        for (int options = 0; options < 4; ++options) {
            linear_of(pool, dtype, s, (options & 1) != 0, (options & 2) != 0);
        }
    }
    for (const int64_t dim : {1, 24, 64, 577}) {
        for (const bool in_place : {false, true}) {
            rms_norm_of(pool, dtype, 1, dim, in_place);
            rms_norm_of(pool, dtype, 3, dim, in_place);
        }
    }
    for (const int64_t dim : {2, 24, 64, 80}) {
        rope_of(pool, dtype, 1, dim);
        rope_of(pool, dtype, 70, dim);  // 70 * 3 * 80 elements are shared between threads
    }
    silu_mul_of(pool, dtype, 1, 1);
    silu_mul_of(pool, dtype, 3, 77);
    silu_mul_of(pool, dtype, 20, 1000);
}

}  // namespace

void test_layer_math() {
    const std::vector<std::string> isas = available_isas();
#if defined(__aarch64__)
    CHECK(isas == (std::vector<std::string>{"scalar", "neon"}));
#endif
    for (const std::string& isa : isas) {
        set_isa_cap(isa);
        CHECK(active_kernels().isa == isa);
        for (const int num_threads : {1, 3}) {
            ThreadPool pool(num_threads, {}, Caller::kWorks, 0);
            for (const DType dtype : kDTypes) all_of(pool, dtype);
        }
    }
    set_isa_cap("");
}

}  // namespace swiftapex::tests
