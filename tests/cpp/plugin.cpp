// What plugin_test.cpp loads and unloads: a library with Octavo inside.
#include <octavo/build_info.h>
#include <octavo/rms_norm.h>

#include <cstdint>
#include <vector>

// Starts Octavo's threads with an operator that leaves no thread_local object, since one would keep the
// library loaded until its thread ends.
extern "C" __attribute__((visibility("default"))) float run_on_four_threads() {
    constexpr int64_t kRows = 4096, kDim = 64;
    octavo::set_num_threads(4);
    std::vector<float> x(kRows * kDim, 2.0f), weight(kDim, 1.0f), out(x.size());
    octavo::RmsNormArgs args;
    args.x = {x.data(), octavo::DType::float32, {kRows, kDim}};
    args.weight = {weight.data(), octavo::DType::float32, {kDim}};
    args.out = {out.data(), octavo::DType::float32, {kRows, kDim}};
    octavo::rms_norm(args);
    return out.back();
}
