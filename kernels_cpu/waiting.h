// How threads of this module wait for a few microseconds, and where they run.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <chrono>

namespace swiftapex {

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Looks until ready() or until `limit_us` have passed; returns the last ready().
template <class Ready>
bool spin(Ready ready, int limit_us) {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point end = Clock::now() + std::chrono::microseconds(limit_us);
    do {
        for (int i = 0; i < 16; ++i) {  // a clock read costs about as much as a pause
            if (ready()) return true;
            pause();
        }
    } while (Clock::now() < end);
    return ready();
}

// False where there is no such CPU or the system refuses.
inline bool pin(pthread_t thread, int cpu) {
    if (cpu < 0 || cpu >= CPU_SETSIZE) return false;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    return pthread_setaffinity_np(thread, sizeof(set), &set) == 0;
}

}  // namespace swiftapex
