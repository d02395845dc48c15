#include <octavo/build_info.h>
#include <octavo/version.h>

#include "cpu/isa.h"
#include "cuda/backend.h"

namespace octavo {
namespace {

std::vector<std::string> cpu_features() {
    std::vector<std::string> features;
#if defined(__x86_64__)
    __builtin_cpu_init();
// A macro, since __builtin_cpu_supports takes nothing but a literal.
#define OCTAVO_CPU_FEATURE(name) \
    if (__builtin_cpu_supports(name)) features.emplace_back(name)
    OCTAVO_CPU_FEATURE("sse4.2");
    OCTAVO_CPU_FEATURE("avx");
    OCTAVO_CPU_FEATURE("avx2");
    OCTAVO_CPU_FEATURE("fma");
    OCTAVO_CPU_FEATURE("f16c");
    OCTAVO_CPU_FEATURE("avx512f");
    OCTAVO_CPU_FEATURE("avx512bw");
    OCTAVO_CPU_FEATURE("avx512dq");
    OCTAVO_CPU_FEATURE("avx512vl");
    OCTAVO_CPU_FEATURE("avx512vnni");
    OCTAVO_CPU_FEATURE("avx512bf16");
#undef OCTAVO_CPU_FEATURE
#elif defined(__aarch64__)
    features.emplace_back("neon");  // part of the architecture
#endif
    return features;
}

std::string why_cpu_only() {
    std::string why;
    if (cuda::cuda_version().empty()) cuda::gpu_info(&why);
    return why;
}

}  // namespace

const BuildInfo& build_info() {
    static const BuildInfo info{OCTAVO_VERSION,        cuda::cuda_version(), why_cpu_only(),
                                cuda::architectures(), cuda::instances(),    OCTAVO_COMPILER};
    return info;
}

CpuInfo cpu_info() { return {cpu::isa_name(), cpu_features(), get_num_threads()}; }

std::vector<GpuInfo> gpu_info(std::string* why_none) { return cuda::gpu_info(why_none); }

}  // namespace octavo
