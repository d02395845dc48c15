#include <octavo/attention.h>
using namespace octavo;
extern "C" void backward_once(void* q, void* k, void* v, void* out, void* dout, void* lse, void* dq, void* dk, void* dv, int b, int s, int hq, int hkv, int d, int causal, void* stream) {
    Device gpu{DeviceType::cuda, 0};
    auto t = [&](void* p, int h) { return TensorView{p, DType::bfloat16, {b, s, h, d}, gpu}; };
    AttentionBackwardArgs x;
    x.q = t(q, hq); x.k = t(k, hkv); x.v = t(v, hkv); x.out = t(out, hq); x.dout = t(dout, hq); x.dq = t(dq, hq); x.dk = t(dk, hkv); x.dv = t(dv, hkv);
    x.lse = TensorView{lse, DType::float32, {b, s, hq}, gpu}; x.causal = causal; x.stream = stream;
    attention_backward(x);
}
