#include <cuda_runtime.h>
#include <dlfcn.h>
#include <cstdio>
#include <vector>
#include <numeric>
#include <algorithm>
#include <random>
#include <cuda_bf16.h>
using Run = void (*)(void*, void*, void*, void*, void*, long, long, long, long, int, int, void*);
__global__ void fill(__nv_bfloat16* p, size_t n, unsigned seed) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        unsigned h = (unsigned)i * 2654435761u ^ seed; h ^= h >> 15; h *= 2246822519u; h ^= h >> 13; h *= 3266489917u; h ^= h >> 16;
        p[i] = __float2bfloat16(((int)(h & 0xffff) - 32768) / 18000.f);
    }
}
int main(int argc, char** argv) {
    void* l = dlopen(argv[1], RTLD_NOW); if (!l) { puts(dlerror()); return 1; }
    auto run = (Run)dlsym(l, "variant_run"); auto get = (void (*)(long long*))dlsym(l, "variant_stamps");
    long batch = atoi(argv[2]), heads = atoi(argv[3]), len = 4096, pages = batch * 64; int fp8 = atoi(argv[4]);
    void *q, *kv, *table, *lens, *out;
    cudaMalloc(&q, batch * heads * 1152); cudaMalloc(&kv, pages * 64 * 1152); cudaMalloc(&table, pages * 4); cudaMalloc(&lens, batch * 4); cudaMalloc(&out, batch * heads * 1024);
    fill<<<1024, 256>>>((__nv_bfloat16*)q, batch * heads * 576, 1);
    if (fp8) cudaMemset(kv, 0x31, pages * 64 * 576); else fill<<<1024, 256>>>((__nv_bfloat16*)kv, pages * 64 * 576, 2);
    std::vector<int> t(pages), ln(batch, len); std::iota(t.begin(), t.end(), 0); std::shuffle(t.begin(), t.end(), std::mt19937(1));
    cudaMemcpy(table, t.data(), pages * 4, cudaMemcpyHostToDevice); cudaMemcpy(lens, ln.data(), batch * 4, cudaMemcpyHostToDevice);
    cudaStream_t s; cudaStreamCreate(&s);
    for (int i = 0; i < 400; ++i) run(q, kv, table, lens, out, batch, heads, len, pages, fp8, 0, s);
    cudaStreamSynchronize(s);
    static long long st[2][64][10]; get(&st[0][0][0]);
    printf("err %s\n", cudaGetErrorString(cudaGetLastError()));
    for (int pair = 24; pair < 30; ++pair)
        for (int w = 0; w < 2; ++w) { printf("pair %d wg %d:", pair, w); for (int i = 0; i < 8; ++i) printf(" %6lld", st[w][pair][i] - st[0][24][0]); printf("\n"); }
    double per = (st[0][56][0] - st[0][8][0]) / 48.0; printf("clocks a tile %.0f\n", per);
    double d[2][8] = {}; for (int p = 8; p < 56; ++p) for (int w = 0; w < 2; ++w) for (int i = 0; i < 8; ++i) d[w][i] += (st[w][p][i] - st[0][p][0]) / 48.0;
    for (int w = 0; w < 2; ++w) { printf("mean wg %d:", w); for (int i = 0; i < 8; ++i) printf(" %6.0f", d[w][i]); printf("\n"); }
}
