#include <algorithm>
#include <memory>

#include "kernels_cpu/dispatch.h"
#include "kernels_cpu/launch.h"
#include "kernels_cpu/tests/values.h"

namespace swiftapex::tests {
namespace {

void check_rows(ThreadPool& pool, Matrix& x) {
    std::vector<int64_t> index(size_t(x.rows), -1);
    const std::unique_ptr<bool[]> invalid(new bool[size_t(x.rows)]);
    argmax(pool, x.dtype, {x.data(), index.data(), invalid.get(), x.rows, x.columns, x.stride});
    for (int64_t i = 0; i < x.rows; ++i) {
        int64_t first = 0;
        bool nan = false;
        for (int64_t j = 0; j < x.columns; ++j) {
            if (x(i, j) > x(i, first)) first = j;
            nan = nan || std::isnan(x(i, j));
        }
        const bool expected = nan || std::isinf(x(i, first));
        CHECK(invalid[size_t(i)] == expected);
        CHECK(index[size_t(i)] == (expected ? 0 : first));
    }
}

// What sits at the beginning, in the middle and at the end of rows of every length.
void special_rows(ThreadPool& pool, DType dtype, int64_t dim) {
    std::mt19937 random(static_cast<unsigned>(dim));
    Matrix x(dtype, 9, dim, dim + 3);
    for (const int64_t at : {int64_t{0}, dim / 2, dim - 1}) {
        x.fill(random, 1.0);
        for (int64_t j = 0; j < dim; ++j) {
            x.set(0, j, -2.0 - double(random() % 5));  // nothing reads zeros past the end
            x.set(1, j, -kInf);
            x.set(2, j, -kInf);
            x.set(8, j, j == at ? 0.0 : -0.0);
        }
        x.set(2, at, -7.0);
        x.set(3, at, kNaN);
        x.set(4, at, kInf);
        x.set(5, at, -kInf);
        x.set(6, at, 9.0);
        x.set(6, dim - 1, 9.0);
        x.set(7, at, kNaN);
        x.set(7, 0, kInf);
        check_rows(pool, x);
    }
}

}  // namespace

void test_argmax() {
    for (const std::string& isa : available_isas()) {
        set_isa_cap(isa);
        for (const int num_threads : {1, 3}) {
            ThreadPool pool(num_threads, {}, Caller::kWorks, 0);
            for (const DType dtype : kDTypes) {
                for (const int64_t dim : {1, 2, 3, 5, 16, 67, 511, 512, 513, 1000, 2500}) {
                    special_rows(pool, dtype, dim);
                }
            }
        }
    }
    set_isa_cap("");
}

}  // namespace swiftapex::tests
