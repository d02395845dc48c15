#include "cuda/sm90_attention/operands.h"

#include "cuda/alignment.h"
#include "cuda/sm90_attention/tiles.h"

#include <algorithm>

namespace octavo::cuda {
namespace {

constexpr int64_t kAnyNumber = (int64_t{1} << 31) - 1;  // stands for any number of tokens or pages above one

// The stride of an axis of length 1 is never used, and may be zero: any movable stride takes its place.
int64_t used_stride(int64_t length, int64_t stride) { return length == 1 ? kSm90BlockColumns : stride; }

Sm90Operand make_operand(const void* base, int64_t num_outer, int64_t outer_stride, int64_t num_tokens,
                         int64_t token_stride, int32_t num_heads, int64_t head_stride, int32_t edge) {
    return {base,
            used_stride(num_outer, outer_stride),
            used_stride(num_tokens, token_stride),
            used_stride(num_heads, head_stride),
            num_heads,
            edge};
}

int64_t num_tokens_q(const AttentionParams& p) { return p.cu_seqlens_q ? p.total_q : p.seqlen_q; }

// The bound of a packed batch's lengths may be any number, but the edge, which lies below the array, has to
// fit into the address space.
int32_t q_edge(const AttentionParams& p) {
    return static_cast<int32_t>(std::min<int64_t>(p.seqlen_q, num_tokens_q(p)));
}

int64_t num_outer_k(const AttentionParams& p) {
    if (p.paged()) return kAnyNumber;
    return p.cu_seqlens_k ? 1 : p.batch;
}

// For packed keys, the parameters hold only the length of the longest sequence.
int64_t num_tokens_k(const AttentionParams& p) {
    if (p.paged()) return p.page_size;
    return p.cu_seqlens_k ? kAnyNumber : p.seqlen_k;
}

int32_t k_edge(const AttentionParams& p) { return p.paged() ? p.page_size : p.seqlen_k; }

}  // namespace

bool is_movable_stride(int64_t stride, DType dtype) {
    constexpr int64_t kMaxBytes = int64_t{1} << 40;
    return stride > 0 && stride < kMaxBytes / size_of(dtype) && stride * size_of(dtype) % 16 == 0;
}

bool Sm90Operand::is_movable(DType dtype) const {
    return aligned(base, 16, {}, dtype) && is_movable_stride(outer_stride, dtype) &&
           is_movable_stride(token_stride, dtype) && is_movable_stride(head_stride, dtype) &&
           reinterpret_cast<uintptr_t>(base) / 2 > static_cast<uintptr_t>(edge * token_stride);
}

Sm90Operands::Sm90Operands(const AttentionParams& p)
    : q(make_operand(p.q, p.cu_seqlens_q || p.q_batch_stride == 0 ? 1 : p.batch, p.q_batch_stride,
                     num_tokens_q(p), p.q_token_stride, p.num_q_heads, p.q_head_stride, q_edge(p))),
      out(make_operand(p.out, p.cu_seqlens_q ? 1 : p.batch, p.out_batch_stride, num_tokens_q(p),
                       p.out_token_stride, p.num_q_heads, p.out_head_stride, q_edge(p))),
      k(make_operand(p.k, num_outer_k(p), p.k_outer_stride, num_tokens_k(p), p.k_token_stride, p.num_kv_heads,
                     p.k_head_stride, k_edge(p))),
      v(make_operand(p.v, num_outer_k(p), p.v_outer_stride, num_tokens_k(p), p.v_token_stride, p.num_kv_heads,
                     p.v_head_stride, k_edge(p))) {}

}  // namespace octavo::cuda
