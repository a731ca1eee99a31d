#include "kernels_cuda/green_context.h"

#include <cuda.h>

#include <stdexcept>
#include <string>

namespace swiftapex {
namespace {

// Functions of the driver are looked up at run time: the module then loads on machines without one.
template <class Function>
Function driver(const char* name) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion(name, &function, 13000, cudaEnableDefault, &result);
    if (error != cudaSuccess || function == nullptr) {
        throw std::runtime_error(std::string("the CUDA driver has no ") + name);
    }
    return reinterpret_cast<Function>(function);
}

void check(CUresult result, const char* what) {
    if (result == CUDA_SUCCESS) return;
    throw std::runtime_error(std::string(what) + " failed with CUresult " + std::to_string(result));
}

}  // namespace

GreenContext::GreenContext(int device, int num_sms) {
    if (cudaSetDevice(device) != cudaSuccess || cudaFree(nullptr) != cudaSuccess) {
        throw std::runtime_error("no CUDA device " + std::to_string(device));
    }
    CUdevResource all;
    check(driver<decltype(&cuDeviceGetDevResource)>("cuDeviceGetDevResource")(
              device, &all, CU_DEV_RESOURCE_TYPE_SM),
          "cuDeviceGetDevResource");
    if (num_sms < 1 || static_cast<unsigned>(num_sms) > all.sm.smCount) {
        throw std::invalid_argument("the GPU has " + std::to_string(all.sm.smCount) +
                                    " multiprocessors, " + std::to_string(num_sms) +
                                    " were asked for");
    }
    CUdevResource part, rest;
    unsigned count = 1;
    check(driver<decltype(&cuDevSmResourceSplitByCount)>("cuDevSmResourceSplitByCount")(
              &part, &count, &all, &rest, 0, static_cast<unsigned>(num_sms)),
          "cuDevSmResourceSplitByCount");
    num_sms_ = static_cast<int>(part.sm.smCount);
    CUdevResourceDesc description;
    check(driver<decltype(&cuDevResourceGenerateDesc)>("cuDevResourceGenerateDesc")(&description,
                                                                                    &part, 1),
          "cuDevResourceGenerateDesc");
    CUgreenCtx context;
    check(driver<decltype(&cuGreenCtxCreate)>("cuGreenCtxCreate")(&context, description, device,
                                                                  CU_GREEN_CTX_DEFAULT_STREAM),
          "cuGreenCtxCreate");
    context_ = context;
    CUstream stream;
    check(driver<decltype(&cuGreenCtxStreamCreate)>("cuGreenCtxStreamCreate")(
              &stream, context, CU_STREAM_NON_BLOCKING, 0),
          "cuGreenCtxStreamCreate");
    stream_ = stream;
}

GreenContext::~GreenContext() {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
    if (context_ == nullptr) return;
    try {
        driver<decltype(&cuGreenCtxDestroy)>("cuGreenCtxDestroy")(
            static_cast<CUgreenCtx>(context_));
    } catch (const std::exception&) {
        // The driver is gone already: the process ends.
    }
}

}  // namespace swiftapex
