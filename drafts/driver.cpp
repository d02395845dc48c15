#include <cuda_runtime.h>
#include <dlfcn.h>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>
#define CK(x) do { cudaError_t e_ = (x); if (e_ != cudaSuccess) { printf("%s: %s\n", #x, cudaGetErrorString(e_)); exit(1);} } while (0)
typedef void (*F)(void*, void*, void*, void*, void*, void*, void*, void*, void*, int, int, int, int, int, int, void*);
static uint64_t state = 88172645463325252ull;
static uint32_t rnd() { state ^= state << 13; state ^= state >> 7; state ^= state << 17; return uint32_t(state >> 32); }
static uint16_t bf(float x) { uint32_t b; memcpy(&b, &x, 4); return uint16_t((b + 0x8000) >> 16); }
static const size_t CH = 1000003;
static uint16_t* chunk() { static uint16_t* d = nullptr; if (!d) { std::vector<uint16_t> h(CH); for (auto& x : h) { float u = (rnd() + 0.5f) / 4294967296.0f, v = rnd() / 4294967296.0f; x = bf(sqrtf(-2 * logf(u)) * cosf(6.2831853f * v)); } CK(cudaMalloc(&d, CH * 2)); CK(cudaMemcpy(d, h.data(), CH * 2, cudaMemcpyHostToDevice)); } return d; }
static uint16_t* filled(size_t n) { uint16_t* d; CK(cudaMalloc(&d, n * 2)); size_t at = 0; while (at < n) { size_t off = rnd() % (CH - 1000), m = std::min(n - at, CH - off); CK(cudaMemcpy(d + at, chunk() + off, m * 2, cudaMemcpyDeviceToDevice)); at += m; } return d; }
// driver ROUNDS MS a.so,b.so,... case...
int main(int argc, char** argv) {
    int rounds = atoi(argv[1]); double target = atof(argv[2]);
    std::vector<std::string> names; std::vector<F> fs;
    for (char* t = strtok(argv[3], ","); t; t = strtok(nullptr, ",")) { names.push_back(t); void* h = dlopen(t, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND); if (!h) { puts(dlerror()); return 1; } fs.push_back((F)dlsym(h, "backward_once")); }
    for (int a = 4; a < argc; ++a) {
        int b, s, hq, hkv, d, causal; sscanf(argv[a], "%d:%d:%d:%d:%d:%d", &b, &s, &hq, &hkv, &d, &causal);
        size_t nq = size_t(b) * s * hq * d, nk = size_t(b) * s * hkv * d, nl = size_t(b) * s * hq;
        void *q[2], *k[2], *v[2], *out[2], *dout[2], *dq, *dk, *dv; float* lse;
        for (int i = 0; i < 2; ++i) q[i] = filled(nq), k[i] = filled(nk), v[i] = filled(nk), out[i] = filled(nq), dout[i] = filled(nq);
        CK(cudaMalloc(&dq, nq * 2)); CK(cudaMalloc(&dk, nk * 2)); CK(cudaMalloc(&dv, nk * 2)); CK(cudaMalloc(&lse, nl * 4));
        std::vector<float> hl(nl);
        for (size_t i = 0; i < nl; ++i) { int t = (i / hq) % s; hl[i] = logf(causal ? t + 1 : s) + 0.5f; }
        CK(cudaMemcpy(lse, hl.data(), nl * 4, cudaMemcpyHostToDevice));
        cudaEvent_t e0, e1; CK(cudaEventCreate(&e0)); CK(cudaEventCreate(&e1));
        auto run = [&](size_t w, int n) { CK(cudaEventRecord(e0, 0)); for (int i = 0; i < n; ++i) fs[w](q[i % 2], k[i % 2], v[i % 2], out[i % 2], dout[i % 2], lse, dq, dk, dv, b, s, hq, hkv, d, causal, nullptr); CK(cudaEventRecord(e1, 0)); CK(cudaEventSynchronize(e1)); float m; CK(cudaEventElapsedTime(&m, e0, e1)); return m / n; };
        std::vector<uint16_t> first;
        for (size_t i = 0; i < fs.size(); ++i) {
            CK(cudaMemset(dq, 0xff, nq * 2)); run(i, 1); std::vector<uint16_t> h(nq); CK(cudaMemcpy(h.data(), dq, nq * 2, cudaMemcpyDeviceToHost));
            if (i == 0) { first = h; continue; }
            auto f = [](uint16_t u) { uint32_t w = uint32_t(u) << 16; float z; memcpy(&z, &w, 4); return z; };
            double num = 0, den = 0; for (size_t j = 0; j < nq; ++j) { double g = f(h[j]), r = f(first[j]); num += (g - r) * (g - r); den += r * r; }
            printf("[%.6f] ", sqrt(num / den));
        }
        std::vector<std::vector<float>> times(fs.size()); std::vector<int> reps(fs.size());
        for (size_t i = 0; i < fs.size(); ++i) { run(i, 2); reps[i] = std::max(2, int(target / run(i, 2))); }
        for (int r = 0; r < rounds; ++r) for (size_t i = 0; i < fs.size(); ++i) { size_t j = r % 2 ? fs.size() - 1 - i : i; run(j, 1); times[j].push_back(run(j, reps[j])); }
        printf("b%d s%d h%d/%d d%d %s:", b, s, hq, hkv, d, causal ? "causal" : "full");
        double base = 0;
        for (size_t i = 0; i < fs.size(); ++i) { auto t = times[i]; std::sort(t.begin(), t.end()); double m = t[t.size() / 2] * 1e3; if (!i) base = m; printf("  %s %.0f us %.3f", names[i].c_str() + 5, m, m / base); }
        printf("\n"); fflush(stdout);
        for (int i = 0; i < 2; ++i) for (void* p : {q[i], k[i], v[i], out[i], dout[i]}) cudaFree(p);
        for (void* p : {dq, dk, dv}) cudaFree(p); cudaFree(lse);
    }
}
