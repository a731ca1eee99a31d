#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>

#include "kernels_cpu/tests/check.h"

namespace {

// After so long a test hangs: the process ends by SIGALRM. ThreadSanitizer takes 40 s for the
// longest one on two idle cores.
constexpr unsigned kLimitSeconds = 600;

// Without names all tests run.
bool named(const char* test, int count, char** names) {
    for (int i = 0; i < count; ++i) {
        if (std::strcmp(names[i], test) == 0) return true;
    }
    return count == 0;
}

}  // namespace

// kernels_cpu_tests [name]...
int main(int argc, char** argv) {
    using namespace swiftapex::tests;
    struct Test {
        const char* name;
        void (*run)();
    };
    const Test tests[] = {{"thread_pool", test_thread_pool},
                          {"task_lane", test_task_lane},
                          {"attention_runtime", test_attention_runtime},
                          {"copy_blocks", test_copy_blocks},
                          {"layer_math", test_layer_math},
                          {"argmax", test_argmax},
                          {"convert", test_convert},
                          {"decode_plan", test_decode_plan},
                          {"decode_attention", test_decode_attention},
                          {"read_stream", test_read_stream}};
    int ran = 0, failed = 0;
    for (const Test& test : tests) {
        if (!named(test.name, argc - 1, argv + 1)) continue;
        ++ran;
        std::printf("%s: ", test.name);
        std::fflush(stdout);
        alarm(kLimitSeconds);
        const auto start = std::chrono::steady_clock::now();
        try {
            test.run();
        } catch (const std::exception& e) {
            std::printf("%s\n    ", e.what());
            ++failed;
        }
        const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
        std::printf("%.1f s\n", time.count());
    }
    if (ran < argc - 1) std::printf("a name is unknown\n");
    return failed == 0 && ran >= argc - 1 ? 0 : 1;
}
