// The read that bandwidths are measured by: every word once, whichever thread takes it.
#include <numeric>
#include <vector>

#include "kernels_cpu/dispatch.h"
#include "kernels_cpu/launch.h"
#include "kernels_cpu/tests/check.h"

namespace swiftapex::tests {
namespace {

// Sums of all words from `begin` on, for lengths around the sizes of a step and of a chunk.
void check_sums(ThreadPool& pool, const std::vector<uint64_t>& words) {
    const uint64_t n = words.size();
    for (const uint64_t count : {uint64_t{0}, uint64_t{1}, uint64_t{63}, uint64_t{64}, uint64_t{65},
                                 uint64_t{1000}, n / 2 + 1, n}) {
        const uint64_t begin = n - count;
        const uint64_t expected = count == 0 ? 0 : (begin + n - 1) * count / 2;
        CHECK(read_stream(pool, words.data() + begin, int64_t(8 * count)) == expected);
    }
}

}  // namespace

void test_read_stream() {
    std::vector<uint64_t> words(300'037);  // several chunks for each thread, and an odd rest
    std::iota(words.begin(), words.end(), uint64_t{0});
    for (const std::string& isa : available_isas()) {
        set_isa_cap(isa);
        for (const int num_threads : {1, 2, 5}) {
            for (const Caller caller : {Caller::kWorks, Caller::kWaits}) {
                ThreadPool pool(num_threads, {}, caller, 10);
                for (int round = 0; round < 5; ++round) check_sums(pool, words);
            }
        }
    }
    set_isa_cap("");
}

}  // namespace swiftapex::tests
