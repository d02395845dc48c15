#include <octavo/attention.h>
#include <cuda_runtime.h>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#include <string>
#include <algorithm>
using namespace octavo;
#define CK(x) do { cudaError_t e_ = (x); if (e_ != cudaSuccess) { printf("%s: %s\n", #x, cudaGetErrorString(e_)); exit(1);} } while (0)
static uint64_t state = 88172645463325252ull;
static uint32_t rnd() { state ^= state << 13; state ^= state >> 7; state ^= state << 17; return uint32_t(state >> 32); }
static uint16_t bf(float x) { uint32_t b; memcpy(&b, &x, 4); return uint16_t((b + 0x8000) >> 16); }
static const size_t CH = 1000003;
static uint16_t* chunk() { static uint16_t* d = nullptr; if (!d) { std::vector<uint16_t> h(CH); for (auto& x : h) { float u = (rnd() + 0.5f) / 4294967296.0f, v = rnd() / 4294967296.0f; x = bf(sqrtf(-2 * logf(u)) * cosf(6.2831853f * v)); } CK(cudaMalloc(&d, CH * 2)); CK(cudaMemcpy(d, h.data(), CH * 2, cudaMemcpyHostToDevice)); } return d; }
static uint16_t* filled(size_t n) { uint16_t* d; CK(cudaMalloc(&d, n * 2)); size_t at = 0; while (at < n) { size_t off = rnd() % (CH - 1000), m = std::min(n - at, CH - off); CK(cudaMemcpy(d + at, chunk() + off, m * 2, cudaMemcpyDeviceToDevice)); at += m; } return d; }
// bench ROUNDS MS CHECKS variants case...; variants: comma list of p(lain), o(ld), n[rounds[.mixed]]; case b:s:hq:hkv:d:causal
int main(int argc, char** argv) {
    int rounds = atoi(argv[1]); double target = atof(argv[2]); int checks = atoi(argv[3]);
    std::vector<std::string> vs; { char buf[300]; strcpy(buf, argv[4]); for (char* t = strtok(buf, ","); t; t = strtok(nullptr, ",")) vs.push_back(t); }
    cudaStream_t st, other; CK(cudaStreamCreateWithFlags(&st, cudaStreamNonBlocking)); CK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    char* load; CK(cudaMalloc(&load, 512 << 20));
    for (int a = 5; a < argc; ++a) {
        int b, s, hq, hkv, d, causal; sscanf(argv[a], "%d:%d:%d:%d:%d:%d", &b, &s, &hq, &hkv, &d, &causal);
        size_t nq = size_t(b) * s * hq * d, nk = size_t(b) * s * hkv * d, nl = size_t(b) * s * hq;
        void *q = filled(nq), *k = filled(nk), *v = filled(nk), *out = filled(nq), *dout = filled(nq), *dq, *dk, *dv; float* lse;
        CK(cudaMalloc(&dq, nq * 2)); CK(cudaMalloc(&dk, nk * 2)); CK(cudaMalloc(&dv, nk * 2)); CK(cudaMalloc(&lse, nl * 4));
        std::vector<float> hl(nl);
        for (size_t i = 0; i < nl; ++i) { int t = (i / hq) % s; hl[i] = logf(causal ? t + 1 : s) + 0.5f; }
        CK(cudaMemcpy(lse, hl.data(), nl * 4, cudaMemcpyHostToDevice));
        Device gpu{DeviceType::cuda, 0};
        AttentionBackwardArgs x;
        auto tq = [&](void* p) { return TensorView{p, DType::bfloat16, {b, s, hq, d}, gpu}; };
        auto tk = [&](void* p) { return TensorView{p, DType::bfloat16, {b, s, hkv, d}, gpu}; };
        x.q = tq(q); x.k = tk(k); x.v = tk(v); x.out = tq(out); x.dout = tq(dout); x.dq = tq(dq); x.dk = tk(dk); x.dv = tk(dv);
        x.lse = TensorView{lse, DType::float32, {b, s, hq}, gpu}; x.causal = causal; x.stream = st;
        auto set = [&](const std::string& w) {
            x.deterministic = w[0] != 'p';
            setenv("OCTAVO_TURNS", w[0] == 'n' ? "1" : "0", 1);
            unsetenv("OCTAVO_ROUNDS"); unsetenv("OCTAVO_MIXED"); unsetenv("OCTAVO_LAG");
            const char* const dot = strchr(w.c_str(), '.'), * const lag = strchr(w.c_str(), 'l');
            if (w[0] == 'n' && atoi(w.c_str() + 1) > 0) setenv("OCTAVO_ROUNDS", std::to_string(atoi(w.c_str() + 1)).c_str(), 1);
            if (dot) setenv("OCTAVO_MIXED", std::to_string(atoi(dot + 1)).c_str(), 1);
            if (w[0] == 'n' && lag) setenv("OCTAVO_LAG", std::to_string(atoi(lag + 1)).c_str(), 1);
        };
        cudaEvent_t e0, e1; CK(cudaEventCreate(&e0)); CK(cudaEventCreate(&e1));
        auto run = [&](int n) { CK(cudaEventRecord(e0, st)); for (int i = 0; i < n; ++i) attention_backward(x); CK(cudaEventRecord(e1, st)); CK(cudaEventSynchronize(e1)); float m; CK(cudaEventElapsedTime(&m, e0, e1)); return m / n; };
        auto get = [&](void* p, size_t n) { std::vector<uint16_t> h(n); CK(cudaMemcpy(h.data(), p, n * 2, cudaMemcpyDeviceToHost)); return h; };
        printf("b%d s%d h%d/%d d%d %s:", b, s, hq, hkv, d, causal ? "causal" : "full"); fflush(stdout);
        if (checks) {
            auto f = [](uint16_t u) { uint32_t w = uint32_t(u) << 16; float z; memcpy(&z, &w, 4); return z; };
            set("p"); run(1); auto ref = get(dq, nq), rk = get(dk, nk);
            set("n"); std::vector<uint16_t> first; int differ = 0;
            for (int c = 0; c < checks; ++c) {
                CK(cudaMemsetAsync(dq, 0xff, nq * 2, st)); CK(cudaMemsetAsync(dk, 0xff, nk * 2, st));
                if (c % 2) for (int i = 0; i < 6; ++i) CK(cudaMemcpyAsync(load, load + (256 << 20), size_t(16 + 16 * (c % 5)) << 20, cudaMemcpyDeviceToDevice, other));
                run(1); auto got = get(dq, nq);
                if (c == 0) first = got; else if (got != first) ++differ;
            }
            double num = 0, den = 0, n2 = 0, d2 = 0; auto gk = get(dk, nk);
            for (size_t i = 0; i < nq; ++i) { double g = f(first[i]), r = f(ref[i]); num += (g - r) * (g - r); den += r * r; }
            for (size_t i = 0; i < nk; ++i) { double g = f(gk[i]), r = f(rk[i]); n2 += (g - r) * (g - r); d2 += r * r; }
            printf(" dq diff %.6f dk diff %.6f; %d of %d differ;", sqrt(num / den), sqrt(n2 / d2), differ, checks - 1);
        }
        std::vector<std::vector<float>> times(vs.size()); std::vector<int> reps(vs.size());
        for (size_t i = 0; i < vs.size(); ++i) { set(vs[i]); run(2); reps[i] = std::max(2, int(target / run(2))); }
        for (int r = 0; r < rounds; ++r) for (size_t i = 0; i < vs.size(); ++i) { size_t j = r % 2 ? vs.size() - 1 - i : i; set(vs[j]); run(1); times[j].push_back(run(reps[j])); }
        double base = 0;
        for (size_t i = 0; i < vs.size() && rounds; ++i) { auto t = times[i]; std::sort(t.begin(), t.end()); double m = t[t.size() / 2] * 1e3; if (!i) base = m; printf("  %s %.0f us %.3f", vs[i].c_str(), m, m / base); }
        printf("\n"); fflush(stdout);
        for (void* p : {q, k, v, out, dout, dq, dk, dv}) cudaFree(p); cudaFree(lse);
    }
}
