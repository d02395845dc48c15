#include <octavo/attention.h>
#include <cuda_runtime.h>
#include <cstdio>
#include <cstdlib>
#include <cmath>
#include <cstring>
#include <vector>
#include <string>
#include <algorithm>
#include <exception>
using namespace octavo;
extern "C" { unsigned headdims_skip_rows = 0; }
#define CK(x) do { cudaError_t e = (x); if (e != cudaSuccess) { printf("%s: %s\n", #x, cudaGetErrorString(e)); exit(1);} } while (0)
static uint64_t state = 88172645463325252ull;
static uint32_t rnd() { state ^= state << 13; state ^= state >> 7; state ^= state << 17; return uint32_t(state >> 32); }
static std::vector<uint16_t> table;
static uint16_t bf(float x) { uint32_t b; memcpy(&b, &x, 4); return uint16_t((b + 0x8000) >> 16); }
static void* filled(size_t n) {
    std::vector<uint16_t> h(n);
    for (auto& x : h) x = table[rnd() >> 16];
    void* d; CK(cudaMalloc(&d, n * 2)); CK(cudaMemcpy(d, h.data(), n * 2, cudaMemcpyHostToDevice)); return d;
}
struct Case { int b, s, hq, hkv, d; bool causal; };
// bench ROUNDS MS case... ; case = b:s:hq:hkv:d:causal:masks with masks = comma list of skip masks (hex)
int main(int argc, char** argv) {
    table.resize(65536);
    for (auto& x : table) { float u = (rnd() + 0.5f) / 4294967296.0f, v = rnd() / 4294967296.0f; x = bf(sqrtf(-2 * logf(u)) * cosf(6.2831853f * v)); }
    int rounds = atoi(argv[1]); double ms_target = atof(argv[2]);
    cudaStream_t st; CK(cudaStreamCreate(&st));
    for (int a = 3; a < argc; ++a) {
        Case c; int causal; char masks[200];
        sscanf(argv[a], "%d:%d:%d:%d:%d:%d:%s", &c.b, &c.s, &c.hq, &c.hkv, &c.d, &causal, masks);
        c.causal = causal;
        std::vector<unsigned> skip; for (char* t = strtok(masks, ","); t; t = strtok(nullptr, ",")) skip.push_back(strtoul(t, nullptr, 16));
        size_t nq = size_t(c.b) * c.s * c.hq * c.d, nk = size_t(c.b) * c.s * c.hkv * c.d, nl = size_t(c.b) * c.s * c.hq;
        void *q = filled(nq), *k = filled(nk), *v = filled(nk), *out = filled(nq), *dout = filled(nq), *dq, *dk, *dv; float* lse;
        CK(cudaMalloc(&dq, nq * 2)); CK(cudaMalloc(&dk, nk * 2)); CK(cudaMalloc(&dv, nk * 2)); CK(cudaMalloc(&lse, nl * 4));
        std::vector<float> hl(nl);
        for (size_t i = 0; i < nl; ++i) { int t = (i / c.hq) % c.s; hl[i] = logf(c.causal ? t + 1 : c.s) + 0.5f; }
        CK(cudaMemcpy(lse, hl.data(), nl * 4, cudaMemcpyHostToDevice));
        Device gpu{DeviceType::cuda, 0};
        AttentionBackwardArgs x;
        auto tq = [&](void* p) { return TensorView{p, DType::bfloat16, {c.b, c.s, c.hq, c.d}, gpu}; };
        auto tk = [&](void* p) { return TensorView{p, DType::bfloat16, {c.b, c.s, c.hkv, c.d}, gpu}; };
        x.q = tq(q); x.k = tk(k); x.v = tk(v); x.out = tq(out); x.dout = tq(dout); x.dq = tq(dq); x.dk = tk(dk); x.dv = tk(dv);
        x.lse = TensorView{lse, DType::float32, {c.b, c.s, c.hq}, gpu}; x.causal = c.causal; x.stream = st;
        double fl = 2.5 * 4 * double(c.b) * c.hq * double(c.s) * c.s * c.d * (c.causal ? 0.5 : 1.0);
        std::vector<std::vector<float>> times(skip.size()); std::vector<int> reps(skip.size());
        cudaEvent_t e0, e1; CK(cudaEventCreate(&e0)); CK(cudaEventCreate(&e1));
        auto run = [&](int n) { CK(cudaEventRecord(e0, st)); for (int i = 0; i < n; ++i) attention_backward(x); CK(cudaEventRecord(e1, st)); CK(cudaEventSynchronize(e1)); float m; CK(cudaEventElapsedTime(&m, e0, e1)); return m / n; };
        std::vector<std::vector<uint16_t>> ref;
        try {
        for (size_t i = 0; i < skip.size(); ++i) {
            headdims_skip_rows = skip[i]; CK(cudaMemset(dq, 0xff, nq * 2)); CK(cudaMemset(dk, 0xff, nk * 2)); CK(cudaMemset(dv, 0xff, nk * 2));
            run(1); reps[i] = std::max(1, int(ms_target / run(2)));
            std::vector<std::vector<uint16_t>> got;
            for (auto [p, n] : {std::pair<void*, size_t>{dq, nq}, {dk, nk}, {dv, nk}}) { std::vector<uint16_t> h(n); CK(cudaMemcpy(h.data(), p, n * 2, cudaMemcpyDeviceToHost)); got.push_back(h); }
            if (i == 0) ref = got;
            else { for (int t = 0; t < 3; ++t) { double num = 0, den = 0; auto f = [](uint16_t b) { uint32_t u = uint32_t(b) << 16; float z; memcpy(&z, &u, 4); return z; };
                for (size_t j = 0; j < got[t].size(); ++j) { double g = f(got[t][j]), r = f(ref[t][j]); num += (g - r) * (g - r); den += r * r; } printf("%s%.5f", t ? " " : "  diff ", sqrt(num / den)); } printf("\n"); }
        }
        for (int r = 0; r < rounds; ++r) for (size_t i = 0; i < skip.size(); ++i) { size_t j = r % 2 ? skip.size() - 1 - i : i; headdims_skip_rows = skip[j]; run(1); times[j].push_back(run(reps[j])); }
        } catch (const std::exception& e) { printf("%s\n", e.what()); }
        printf("b%d s%d h%d/%d d%d %s:", c.b, c.s, c.hq, c.hkv, c.d, c.causal ? "causal" : "full");
        for (size_t i = 0; i < skip.size(); ++i) { auto t = times[i]; if (t.empty()) continue; std::sort(t.begin(), t.end()); printf("  [%x] %.3f ms %.0f TF (%.0f-%.0f)", skip[i], t[t.size() / 2], fl / t[t.size() / 2] * 1e-9, fl / t.back() * 1e-9, fl / t[0] * 1e-9); }
        printf("\n"); fflush(stdout);
        for (void* p : {q, k, v, out, dout, dq, dk, dv}) cudaFree(p); cudaFree(lse);
    }
}
