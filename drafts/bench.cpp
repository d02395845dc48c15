#include <octavo/octavo.h>
#include <octavo/paged_attention.h>
#include <cuda_runtime.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>
#include <random>
#include <cmath>
#include <algorithm>
#include <functional>
using namespace octavo;
#define CK(x) do { cudaError_t err_ = (x); if (err_ != cudaSuccess) { printf("%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(err_)); exit(1);} } while (0)
static Device gpu{DeviceType::cuda, 0};
static std::vector<uint64_t> noise;
static char* fresh(size_t bytes, int kind) {  // 0 bf16 normal-ish, 1 codes, 2 fp8, 3 float scales, 4 half2 scales
    char* p; CK(cudaMalloc(&p, bytes));
    static std::mt19937_64 r(7);
    const size_t chunk = 8 << 20;
    std::vector<char> h(std::min(bytes, chunk));
    if (kind == 0) { auto* u = (uint16_t*)h.data(); for (size_t i = 0; i < h.size() / 2; ++i) { uint64_t x = r(); float f = ((x & 0xffff) + (x >> 16 & 0xffff) + (x >> 32 & 0xffff) + (x>>48)) / 65536.0f - 2.0f; f *= 1.7f; uint32_t b; memcpy(&b, &f, 4); u[i] = b >> 16; } }
    else if (kind == 1) for (size_t i = 0; i + 8 <= h.size(); i += 8) { uint64_t x = r(); memcpy(&h[i], &x, 8); }
    else if (kind == 2) for (size_t i = 0; i < h.size(); ++i) { uint8_t x = r(); h[i] = (x & 0x87) | ((2 + (x >> 3 & 7) % 6) << 3); }
    else if (kind == 3) { auto* f = (float*)h.data(); for (size_t i = 0; i < h.size() / 4; ++i) f[i] = 0.005f + 0.02f * (r() % 1000) / 1000; }
    else if (kind == 4) { auto* u = (uint32_t*)h.data(); for (size_t i = 0; i < h.size() / 4; ++i) u[i] = 0x3000u + (r() & 0x3ff) | (0xb800u + (r() & 0x3ff)) << 16; }
    for (size_t o = 0; o < bytes; o += h.size()) { size_t n = std::min(h.size(), bytes - o); CK(cudaMemcpy(p + o, h.data(), n, cudaMemcpyHostToDevice)); }
    return p;
}
static void* ints(const std::vector<int32_t>& v) { void* p; CK(cudaMalloc(&p, v.size() * 4)); CK(cudaMemcpy(p, v.data(), v.size() * 4, cudaMemcpyHostToDevice)); return p; }
struct Call { PagedAttentionArgs a; size_t out_bytes; };
static Call make(const std::string& type, const std::vector<int32_t>& lq, const std::vector<int32_t>& lk, int hq = 32, int hk = 8, int d = 128, int ps = 16) {
    Call c; auto& a = c.a;
    int batch = lq.size(), most = *std::max_element(lk.begin(), lk.end()), mp = (most + ps - 1) / ps, total = 0;
    std::vector<int32_t> cu{0}, table(batch * mp, 0x7fffff); 
    std::vector<int32_t> ids; for (int l : lk) for (int i = 0; i < (l + ps - 1) / ps; ++i) ids.push_back(ids.size());
    std::mt19937 r(3); std::shuffle(ids.begin(), ids.end(), r);
    int64_t pages = ids.size(), at = 0;
    for (int b = 0; b < batch; ++b) { total += lq[b]; cu.push_back(total); for (int i = 0; i < (lk[b] + ps - 1) / ps; ++i) table[b * mp + i] = ids[at++]; }
    a.q = TensorView(fresh(size_t(total) * hq * d * 2, 0), DType::bfloat16, {total, hq, d}, gpu);
    c.out_bytes = size_t(total) * hq * d * 2;
    a.out = TensorView(fresh(c.out_bytes, 0), DType::bfloat16, {total, hq, d}, gpu);
    a.page_table = TensorView(ints(table), DType::int32, {batch, mp}, gpu);
    a.seq_lens = TensorView(ints(lk), DType::int32, {batch}, gpu);
    a.cu_seqlens_q = TensorView(ints(cu), DType::int32, {batch + 1}, gpu);
    a.max_seqlen_q = *std::max_element(lq.begin(), lq.end());
    auto cache = [&](const std::string& t) {
        int w = t == "int4" ? d / 2 : d; size_t e = t == "bf16" ? 2 : 1;
        DType dt = t == "bf16" ? DType::bfloat16 : t == "fp8" ? DType::float8_e4m3fn : t == "int4" ? DType::uint8 : DType::int8;
        TensorView v(fresh(size_t(pages) * ps * hk * w * e, t == "bf16" ? 0 : t == "fp8" ? 2 : 1), dt, {pages, ps, hk, w}, gpu);
        v.strides = {int64_t(ps) * hk * w, w, int64_t(ps) * w, 1};
        return v;
    };
    auto scales = [&](const std::string& t) {
        if (t == "int4") { TensorView v(fresh(size_t(pages) * ps * hk * 4, 4), DType::float16, {pages, ps, hk, 2}, gpu); v.strides = {int64_t(ps) * hk * 2, 2, int64_t(ps) * 2, 1}; return v; }
        TensorView v(fresh(size_t(pages) * ps * hk * 4, 3), DType::float32, {pages, ps, hk}, gpu); v.strides = {int64_t(ps) * hk, 1, ps}; return v;
    };
    std::string kt = type == "int8_int4" ? "int8" : type, vt = type == "int8_int4" ? "int4" : type;
    a.k_pages = cache(kt); a.v_pages = cache(vt);
    if (type == "fp8") { a.k_scale = 0.4f; a.v_scale = 0.5f; }
    else if (type != "bf16") { a.k_scales = scales(kt); a.v_scales = scales(vt); if (kt == "int4") a.kv_dtype = DType::int4; else if (vt == "int4") a.kv_dtype = DType::int4; }
    return c;
}
struct Variant { std::string name, env; int call; cudaGraphExec_t g; std::vector<float> us; };
int main(int argc, char** argv) {
    // bench SHAPE types(comma) variants(comma: value of OCTAVO_P) rounds
    std::string shape = argv[1]; std::vector<int32_t> lq, lk;
    auto add = [&](int n, int q, int k) { for (int i = 0; i < n; ++i) { lq.push_back(q); lk.push_back(k); } };
    if (shape == "mixed") { add(60, 1, 2048); add(4, 512, 4096); }
    else if (shape == "mixed2") { add(120, 1, 1024); add(2, 2048, 2048); }
    else if (shape == "mixed3") { add(30, 1, 4096); add(1, 1500, 4096); add(1, 548, 2048); }
    else if (shape == "mixed4") { add(200, 1, 2048); add(1, 1848, 4096); }
    else if (shape == "mixed5") { add(16, 1, 8192); add(8, 512, 8192); }
    else if (shape == "spec8") { add(64, 8, 4096); }
    else if (shape == "spec4") { add(128, 4, 2048); }
    else if (shape == "spec16") { add(64, 16, 4096); }
    else if (shape == "spec8few") { add(10, 8, 8192); }
    else if (shape == "specragged") { for (int i = 0; i < 64; ++i) add(1, 1 + i % 8, 4096); }
    else return 1;
    auto split = [](std::string s) { std::vector<std::string> v; size_t p; while ((p = s.find(',')) != std::string::npos) { v.push_back(s.substr(0, p)); s = s.substr(p + 1); } v.push_back(s); return v; };
    int rounds = atoi(argv[4]); const int reps = 4;
    cudaStream_t s; CK(cudaStreamCreate(&s));
    std::vector<Variant> vs; std::vector<Call> calls;
    for (auto& t : split(argv[2])) {
        calls.push_back(make(t, lq, lk)); auto& c = calls.back(); c.a.stream = s;
        std::vector<char> first;
        for (auto& e : t == "bf16" ? std::vector<std::string>{"0"} : split(argv[3])) {
            if (e == "W") setenv("OCTAVO_WIDE", "1", 1); else unsetenv("OCTAVO_WIDE"); setenv("OCTAVO_P", e.c_str(), 1);
            CK(cudaMemset(c.a.out.data, 0xff, c.out_bytes));
            for (int i = 0; i < 3; ++i) paged_attention(c.a);
            CK(cudaStreamSynchronize(s));
            std::vector<char> got(c.out_bytes); CK(cudaMemcpy(got.data(), c.a.out.data, c.out_bytes, cudaMemcpyDeviceToHost));
            if (first.empty()) first = got; else if (got != first) { size_t n = 0; for (size_t i = 0; i < got.size(); i += 2) n += memcmp(&got[i], &first[i], 2) != 0; double num = 0, den = 0, most = 0; for (size_t i = 0; i < got.size(); i += 2) { auto f = [&](std::vector<char>& v) { uint16_t u; memcpy(&u, &v[i], 2); uint32_t b = uint32_t(u) << 16; float x; memcpy(&x, &b, 4); return double(x); }; double x = f(got), y = f(first); num += (x - y) * (x - y); den += y * y; most = std::max(most, std::abs(x - y)); }
            printf("%s %s: %zu numbers differ, relative %.2e, most %.3g\n", t.c_str(), e.c_str(), n, std::sqrt(num / den), most); }
            for (size_t i = 0; i < got.size(); i += 2) { uint16_t u; memcpy(&u, &got[i], 2); if ((u & 0x7f80) == 0x7f80) { printf("%s %s: not finite at %zu\n", t.c_str(), e.c_str(), i); break; } }
            Variant v{t, e, 0, nullptr, {}}; cudaGraph_t g;
            CK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
            for (int i = 0; i < reps; ++i) paged_attention(c.a);
            CK(cudaStreamEndCapture(s, &g)); CK(cudaGraphInstantiate(&v.g, g, 0)); vs.push_back(v);
        }
    }
    cudaEvent_t b, e; cudaEventCreate(&b); cudaEventCreate(&e);
    for (int r = -1; r < rounds; ++r) for (auto& v : vs) {
        CK(cudaGraphLaunch(v.g, s));
        CK(cudaEventRecord(b, s)); for (int i = 0; i < 2; ++i) CK(cudaGraphLaunch(v.g, s)); CK(cudaEventRecord(e, s)); CK(cudaStreamSynchronize(s));
        float ms; cudaEventElapsedTime(&ms, b, e); if (r >= 0) v.us.push_back(ms * 1e3f / (2 * reps));
    }
    for (auto& v : vs) { std::sort(v.us.begin(), v.us.end()); printf("%s %-9s P=%-4s %7.1f us (%.1f to %.1f)\n", shape.c_str(), v.name.c_str(), v.env.c_str(), v.us[v.us.size() / 2], v.us.front(), v.us.back()); }
}
