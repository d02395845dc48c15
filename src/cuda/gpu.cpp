#include "cuda/gpu.h"

namespace octavo::cuda {
namespace {

constexpr int64_t kKb = 1024, kMb = 1024 * kKb;

struct NamedGpu {
    const char *name, *architecture;
    Gpu gpu;
};

// The numbers of SMs and the sizes of L2 caches come from NVIDIA's white papers of the architectures; for the
// H200 and the B200, on which these say little, from the CUDA runtime. The rates of memory come from data
// sheets, and for the H100 and the H200 from the CUDA runtime. H100, H200 and B200 are the SXM boards. The
// shared memory of a block comes from the table of compute capabilities in the CUDA programming guide.
constexpr NamedGpu kGpus[] = {
    {"a100", "sm_80", {80, 108, 40 * kMb, 163 * kKb, 2039, false}},
    {"a10", "sm_86", {86, 72, 6 * kMb, 99 * kKb, 600, false}},
    {"rtx3090", "sm_86", {86, 82, 6 * kMb, 99 * kKb, 936, false}},
    {"l40s", "sm_89", {89, 142, 96 * kMb, 99 * kKb, 864, false}},
    {"rtx4090", "sm_89", {89, 128, 72 * kMb, 99 * kKb, 1008, false}},
    {"h100", "sm_90", {90, 132, 50 * kMb, 227 * kKb, 3352, true}},
    {"h200", "sm_90", {90, 132, 60 * kMb, 227 * kKb, 4917, true}},
    {"b200", "sm_100", {100, 148, 253 * kMb / 2, 227 * kKb, 8000, false}},
    {"rtx5090", "sm_120", {120, 170, 96 * kMb, 99 * kKb, 1792, false}},
};

}  // namespace

const Gpu* find_gpu(std::string_view name) {
    for (const NamedGpu& named : kGpus) {
        if (name == named.name || name == named.architecture) return &named.gpu;
    }
    return nullptr;
}

std::vector<std::string> gpu_names() {
    std::vector<std::string> names;
    for (const NamedGpu& named : kGpus) {
        if (names.empty() || find_gpu(named.architecture) == &named.gpu)
            names.emplace_back(named.architecture);
        names.emplace_back(named.name);
    }
    return names;
}

}  // namespace octavo::cuda
