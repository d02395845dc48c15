#include <octavo/linear.h>
#include <octavo/rms_norm.h>
#include <cuda_runtime.h>
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>
using namespace octavo;
#define OK(x) do { cudaError_t e = (x); if (e != cudaSuccess) { printf("%s: %s\n", #x, cudaGetErrorString(e)); exit(1); } } while (0)
static uint16_t bf(float f) { uint32_t u; memcpy(&u, &f, 4); return (u + 0x8000) >> 16; }
static void* random_array(size_t n, float scale) {
    static std::mt19937 g(1);
    std::normal_distribution<float> d(0, scale);
    std::vector<uint16_t> h(std::min<size_t>(n, 1 << 20));
    for (auto& x : h) x = bf(d(g));
    void* p; OK(cudaMalloc(&p, n * 2));
    for (size_t i = 0; i < n; i += h.size()) OK(cudaMemcpy((uint16_t*)p + i, h.data(), std::min(h.size(), n - i) * 2, cudaMemcpyHostToDevice));
    return p;
}
static double graph_us(cudaStream_t s, int count, const std::function<void(int)>& f) {
    for (int i = 0; i < 2; ++i) f(i);
    OK(cudaStreamSynchronize(s));
    cudaGraph_t g; cudaGraphExec_t exec;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < count; ++i) f(i);
    OK(cudaStreamEndCapture(s, &g)); OK(cudaGraphInstantiate(&exec, g, 0));
    cudaEvent_t a, b; OK(cudaEventCreate(&a)); OK(cudaEventCreate(&b));
    std::vector<float> t;
    for (int r = 0; r < 7; ++r) { OK(cudaEventRecord(a, s)); OK(cudaGraphLaunch(exec, s)); OK(cudaEventRecord(b, s)); OK(cudaStreamSynchronize(s)); float ms; OK(cudaEventElapsedTime(&ms, a, b)); t.push_back(ms); }
    OK(cudaGraphExecDestroy(exec)); OK(cudaGraphDestroy(g));
    std::sort(t.begin(), t.end());
    return t[t.size() / 2] * 1e3 / count;
}
int main() {
    cudaStream_t s; OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    cudaDeviceProp prop; OK(cudaGetDeviceProperties(&prop, 0)); printf("%s\n", prop.name);
    const Device gpu{DeviceType::cuda, 0};
    struct Shape { int64_t n, k; };
    for (Shape shape : {Shape{22016, 4096}, {28672, 4096}, {12288, 4096}, {6144, 4096}, {4096, 4096}, {4096, 11008}, {4096, 14336}}) {
        const int copies = std::max<int>(4, int(300e6 / (shape.n * shape.k * 2)));
        std::vector<void*> w; for (int i = 0; i < copies; ++i) w.push_back(random_array(shape.n * shape.k, 0.02f));
        void* x = random_array(128 * shape.k, 1), *g = random_array(shape.k, 1), *y = random_array(128 * shape.k, 1);
        void* out = random_array(128 * shape.n, 1), *res = random_array(128 * shape.n, 1);
        for (int64_t m : {1, 8, 16, 32, 64}) {
            printf("%6ld x %5ld M %2ld:", shape.n, shape.k, m);
            for (bool st : {false, true}) for (int what = 0; what < 6; ++what) {
                // 0 plain, 1 gated, 2 residual, 3 rms_norm before (gated for wide N), 4 inside, 5 gated + norm inside
                auto f = [&](int i) {
                    LinearArgs a;
                    const bool gated = what == 1 || what == 5;
                    a.x = TensorView(x, DType::bfloat16, {m, shape.k}, gpu);
                    a.w = TensorView(w[i % copies], DType::bfloat16, {shape.n, shape.k}, gpu);
                    a.out = TensorView(out, DType::bfloat16, {m, gated ? shape.n / 2 : shape.n}, gpu);
                    if (gated) a.activation = Activation::silu_gate;
                    if (what == 2) a.residual = TensorView(res, DType::bfloat16, {m, shape.n}, gpu);
                    a.static_weight = st; a.stream = s;
#ifdef NORM
                    if (what >= 4) a.norm_weight = TensorView(g, DType::bfloat16, {shape.k}, gpu);
#endif
                    if (what == 3) {
                        RmsNormArgs n; n.x = a.x; n.weight = TensorView(g, DType::bfloat16, {shape.k}, gpu);
                        n.out = TensorView(y, DType::bfloat16, {m, shape.k}, gpu); n.stream = s; rms_norm(n); a.x = n.out;
                    }
                    linear(a);
                };
#ifndef NORM
                if (what >= 4) continue;
#endif
                printf(" %6.1f", graph_us(s, copies * 4, f));
            }
            printf("\n"); fflush(stdout);
        }
        for (void* p : w) OK(cudaFree(p));
        for (void* p : {x, g, y, out, res}) OK(cudaFree(p));
    }
}
