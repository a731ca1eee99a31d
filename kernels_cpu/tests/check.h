// Native tests, for the sanitizers and for other architectures: they run the code without Python
// around it.
#pragma once

#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#define SWIFTAPEX_TEXT_(x) #x
#define SWIFTAPEX_TEXT(x) SWIFTAPEX_TEXT_(x)

// Fails the test; for the test's own thread and for those of Threads.
#define CHECK(condition)                                                                     \
    do {                                                                                     \
        if (!(condition)) {                                                                  \
            throw std::runtime_error(__FILE__ ":" SWIFTAPEX_TEXT(__LINE__) ": " #condition); \
        }                                                                                    \
    } while (false)

namespace swiftapex::tests {

template <class Exception, class Function>
void check_throws(Function function, const std::string& part) {
    try {
        function();
    } catch (const Exception& e) {
        if (std::string(e.what()).find(part) != std::string::npos) return;
        throw std::runtime_error("expected '" + part + "', got '" + e.what() + "'");
    }
    throw std::runtime_error("expected an exception: " + part);
}

// Threads whose failure is the test's.
class Threads {
  public:
    template <class Function>
    void start(Function function) {
        threads_.emplace_back([this, function = std::move(function)] {
            try {
                function();
            } catch (...) {
                std::lock_guard<std::mutex> lock(mutex_);
                error_ = std::current_exception();
            }
        });
    }
    void join() {
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
        if (error_) std::rethrow_exception(error_);
    }

  private:
    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::exception_ptr error_;
};

void test_thread_pool();
void test_task_lane();
void test_attention_runtime();
void test_copy_blocks();
void test_layer_math();
void test_argmax();
void test_convert();
void test_decode_plan();
void test_decode_attention();
void test_read_stream();

}  // namespace swiftapex::tests
