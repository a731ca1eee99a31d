#include <chrono>
#include <cstdio>
#include <exception>

#include "kernels_cpu/tests/check.h"

int main() {
    using namespace swiftapex::tests;
    struct Test {
        const char* name;
        void (*run)();
    };
    const Test tests[] = {{"thread_pool", test_thread_pool},
                          {"task_lane", test_task_lane},
                          {"attention_runtime", test_attention_runtime},
                          {"copy_blocks", test_copy_blocks}};
    int failed = 0;
    for (const Test& test : tests) {
        const auto start = std::chrono::steady_clock::now();
        try {
            test.run();
        } catch (const std::exception& e) {
            std::printf("%s: %s\n", test.name, e.what());
            ++failed;
        }
        const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
        std::printf("%s: %.1f s\n", test.name, time.count());
        std::fflush(stdout);
    }
    return failed == 0 ? 0 : 1;
}
