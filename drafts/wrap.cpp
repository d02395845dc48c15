#include <octavo/latent_attention.h>
#include <cstdio>
using namespace octavo;
extern "C" void variant_run(void* q, void* kv, void* table, void* lens, void* out, long batch, long heads, long len, long pages, int fp8, int splits, void* stream) {
    LatentAttentionArgs a;
    const Device gpu{DeviceType::cuda, 0};
    a.softmax_scale = 0.0721687836;
    a.q = TensorView(q, DType::bfloat16, {batch, heads, 576}, gpu);
    a.kv_pages = TensorView(kv, fp8 ? DType::float8_e4m3fn : DType::bfloat16, {pages, 64, 576}, gpu);
    a.page_table = TensorView(table, DType::int32, {batch, len / 64}, gpu);
    a.seq_lens = TensorView(lens, DType::int32, {batch}, gpu);
    a.out = TensorView(out, DType::bfloat16, {batch, heads, 512}, gpu);
    if (splits > 0) a.num_splits = splits;
    a.stream = stream;
    latent_attention(a);
}
