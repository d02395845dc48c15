// Multi-head latent attention over a paged cache (MLA: DeepSeek-V2, arXiv:2405.04434, section 2.1), in the
// form in which all query heads share one latent head: the up-projections of keys and values are absorbed
// into those of queries and outputs.
#pragma once

#include <octavo/error.h>
#include <octavo/tensor.h>

#include <cstdint>
#include <optional>

namespace octavo {

// q [batch, num_q_heads, qk_dim]: one token a sequence; or packed [total_q, num_q_heads, qk_dim] with
// cu_seqlens_q int32 or int64 [batch + 1]. qk_dim is the latent part and the rotary part behind it: 512 + 64
// in DeepSeek's models. kv_pages [num_pages, page_size, qk_dim], or with an axis of one head before the last,
// any strides with a unit last one: a token's key, of which the first v_dim numbers are its value. They have
// the dtype of q, or hold float8_e4m3fn, whose values are kv_scale x code.
//
// page_table, seq_lens, cu_seqlens_q, padding and positions are as in PagedAttentionArgs; masks too.
struct LatentAttentionArgs {
    TensorView q, kv_pages, page_table, seq_lens;
    TensorView out;                 // like q with v_dim in place of qk_dim; apart from all else
    std::optional<TensorView> lse;  // float32, the shape of q without its last axis
    std::optional<TensorView> cu_seqlens_q;
    std::optional<int64_t> max_seqlen_q;
    int64_t v_dim = 512;
    // Must be given: it is that of the heads before the absorption, whose keys are not qk_dim wide. In
    // DeepSeek's models 1 / sqrt(128 + 64), times what their YaRN adds.
    std::optional<double> softmax_scale;
    bool causal = true;
    std::optional<float> kv_scale;      // multiplies what is stored; default: 1
    std::optional<int64_t> num_splits;  // runs of keys worked on at once; default: chosen
    void* stream = nullptr;
};

void latent_attention(const LatentAttentionArgs& args);

}  // namespace octavo
