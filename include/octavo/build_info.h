// What this build of the library holds.
#pragma once

#include <string>
#include <vector>

namespace octavo {

struct BuildInfo {
    std::string version;                     // "0.2.0"
    std::string cuda_version;                // "13.0"; empty without CUDA
    std::string why_cpu_only;                // and how to get CUDA; empty with CUDA
    std::vector<std::string> architectures;  // "sm_80", "sm_90a", "compute_80"
    std::vector<std::string> instances;      // compiled: "sm80_attention<float16, head_dim 64, 1 stage>"
    std::string compiler;                    // "GNU 12.2.0"
};

struct CpuInfo {
    std::string isa;                    // in use: "baseline", "avx2", "avx512", "avx512_bf16"
    std::vector<std::string> features;  // seen: "avx2", "fma", "f16c", "avx512f", ...
    int num_threads;
};

struct GpuInfo {
    int index;
    std::string name;
    int compute_major, compute_minor;
    int num_sms;
    long long memory_bytes;
};

const BuildInfo& build_info();
CpuInfo cpu_info();

// The GPUs that the driver shows. Empty without CUDA or a usable driver; `why_none` then says why.
std::vector<GpuInfo> gpu_info(std::string* why_none = nullptr);

// Threads that the CPU operators use, from 1 to 65536. Default: OCTAVO_NUM_THREADS, else the cores this
// process may run on.
void set_num_threads(int num_threads);
int get_num_threads();

}  // namespace octavo
