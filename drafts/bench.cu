// bench LIB... -c CASES ; times variants in turns
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <dlfcn.h>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>
#define CK(x) do { cudaError_t e = (x); if (e) { printf("CUDA %s line %d\n", cudaGetErrorString(e), __LINE__); exit(1);} } while (0)
using Run = void (*)(void*, void*, void*, void*, void*, long, long, long, long, int, int, void*);
__global__ void fill(__nv_bfloat16* p, size_t n, unsigned seed) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        unsigned h = (unsigned)i * 2654435761u ^ seed; h ^= h >> 15; h *= 2246822519u; h ^= h >> 13; h *= 3266489917u; h ^= h >> 16;
        unsigned g = h * 747796405u + 2891336453u; g ^= g >> 16; g *= 2246822519u; g ^= g >> 13;
        float u = ((h >> 8) + 1) * 0x1p-24f, v = (g >> 8) * 0x1p-24f;
        p[i] = __float2bfloat16(sqrtf(-2 * logf(u)) * cosf(6.2831853f * v));
    }
}
__global__ void fill8(unsigned char* p, size_t n, unsigned seed) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        unsigned h = (unsigned)i * 2654435761u ^ seed; h ^= h >> 15; h *= 2246822519u; h ^= h >> 13; h *= 3266489917u; h ^= h >> 16;
        p[i] = (h & 0x80) | ((h >> 8) % 0x44);
    }
}
struct Inputs { void *q, *kv, *table, *lens, *out; };
int main(int argc, char** argv) {
    std::vector<std::string> names; std::vector<Run> runs; std::vector<std::string> cases; std::vector<int> splits;
    int rounds = 11, target = 1500;
    for (int i = 1; i < argc; ++i) {
        if (!strncmp(argv[i], "-r", 2)) { rounds = atoi(argv[i] + 2); continue; }
        if (!strncmp(argv[i], "-c", 2)) { cases.push_back(argv[i] + 2); continue; }
        std::string s = argv[i]; int sp = 0; auto at = s.find('@'); if (at != std::string::npos) { sp = atoi(s.c_str() + at + 1); }
        void* l = dlopen(s.substr(0, at).c_str(), RTLD_NOW | RTLD_LOCAL); if (!l) { printf("%s\n", dlerror()); return 1; }
        runs.push_back((Run)dlsym(l, "variant_run")); names.push_back(s.substr(s.rfind('/') + 1)); splits.push_back(sp);
    }
    if (cases.empty()) cases = {"1,16,0", "32,16,0", "128,16,0", "1,128,0", "32,128,0", "128,128,0", "1,16,1", "32,16,1", "128,16,1", "1,128,1", "32,128,1", "128,128,1"};
    printf("%-12s", "case"); for (auto& n : names) printf(" %16s", n.c_str()); printf("\n"); fflush(stdout);
    for (auto& c : cases) {
        long batch, heads, len = 4096; int fp8; 
        if (sscanf(c.c_str(), "%ld,%ld,%d,%ld", &batch, &heads, &fp8, &len) < 3) return 1;
        long pages = batch * len / 64; size_t kvn = (size_t)pages * 64 * 576, bytes = kvn * (fp8 ? 1 : 2);
        int copies = std::max<long>(2, 1 + 2 * 52428800L / bytes);
        std::vector<Inputs> in(copies); std::mt19937 rng(1);
        std::vector<std::vector<unsigned short>> first(runs.size());
        for (auto& x : in) {
            CK(cudaMalloc(&x.q, batch * heads * 576 * 2)); CK(cudaMalloc(&x.kv, bytes)); CK(cudaMalloc(&x.table, pages * 4)); CK(cudaMalloc(&x.lens, batch * 4)); CK(cudaMalloc(&x.out, batch * heads * 512 * 2));
            fill<<<1024, 256>>>((__nv_bfloat16*)x.q, batch * heads * 576, rng());
            if (fp8) fill8<<<1024, 256>>>((unsigned char*)x.kv, kvn, rng()); else fill<<<1024, 256>>>((__nv_bfloat16*)x.kv, kvn, rng());
            std::vector<int> t(pages), l(batch, len); std::iota(t.begin(), t.end(), 0); std::shuffle(t.begin(), t.end(), rng);
            CK(cudaMemcpy(x.table, t.data(), pages * 4, cudaMemcpyHostToDevice)); CK(cudaMemcpy(x.lens, l.data(), batch * 4, cudaMemcpyHostToDevice));
        }
        double guess = std::max({4.0, bytes / 3e6, 2.0 * batch * heads * len * 1088 / 6e8});
        int reps = std::max(1, (int)std::ceil(target / (guess * copies)));
        cudaStream_t s; CK(cudaStreamCreate(&s));
        std::vector<cudaGraphExec_t> g(runs.size());
        std::vector<double> diff(runs.size());
        std::vector<unsigned short> h(batch * heads * 512);
        for (size_t v = 0; v < runs.size(); ++v) {
            CK(cudaMemset(in[0].out, 0xff, batch * heads * 512 * 2));
            for (auto& x : in) runs[v](x.q, x.kv, x.table, x.lens, x.out, batch, heads, len, pages, fp8, splits[v], s);
            CK(cudaStreamSynchronize(s));
            CK(cudaMemcpy(h.data(), in[0].out, h.size() * 2, cudaMemcpyDeviceToHost)); first[v] = h;
            double d = 0; for (size_t i = 0; i < h.size(); ++i) { unsigned a = h[i] << 16, b = first[0][i] << 16; float fa, fb; memcpy(&fa, &a, 4); memcpy(&fb, &b, 4); double e = std::fabs(fa - fb); if (!(e <= 1e30)) e = 1e30; d = std::max(d, e); }
            diff[v] = d;
            cudaGraph_t graph; CK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
            for (int r = 0; r < reps; ++r) for (auto& x : in) runs[v](x.q, x.kv, x.table, x.lens, x.out, batch, heads, len, pages, fp8, splits[v], s);
            CK(cudaStreamEndCapture(s, &graph)); CK(cudaGraphInstantiate(&g[v], graph, 0));
        }
        std::vector<std::vector<float>> ms(runs.size());
        cudaEvent_t a, b; CK(cudaEventCreate(&a)); CK(cudaEventCreate(&b));
        for (int r = 0; r < rounds + 1; ++r)
            for (size_t i = 0; i < runs.size(); ++i) {
                size_t v = r % 2 ? runs.size() - 1 - i : i;
                CK(cudaEventRecord(a, s)); CK(cudaGraphLaunch(g[v], s)); CK(cudaEventRecord(b, s)); CK(cudaEventSynchronize(b));
                float t; CK(cudaEventElapsedTime(&t, a, b)); if (r) ms[v].push_back(t);
            }
        printf("%-12s", c.c_str());
        for (size_t v = 0; v < runs.size(); ++v) { std::sort(ms[v].begin(), ms[v].end()); double us = 1e3 * ms[v][ms[v].size() / 2] / (reps * copies);
            if (heads == 128) printf("   %6.1f %4.0fTF%s", us, 2.0 * batch * heads * len * 1088 / us / 1e6, diff[v] > 0.02 ? "!" : " "); else printf("   %6.1f       %s", us, diff[v] > 0.02 ? "!" : " "); 
            if (diff[v] > 0.02) printf("(%.3g)", diff[v]); }
        printf("\n"); fflush(stdout);
        for (auto& x : in) { cudaFree(x.q); cudaFree(x.kv); cudaFree(x.table); cudaFree(x.lens); cudaFree(x.out); }
        for (auto e : g) cudaGraphExecDestroy(e);
        CK(cudaStreamDestroy(s));
    }
}
