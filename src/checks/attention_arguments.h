// The checks that the operators of attention share. Each function sets its fields of the parameters.
#pragma once

#include "checks/check.h"
#include "params/attention_params.h"

#include <octavo/tensor.h>

#include <cstdint>
#include <optional>

namespace octavo {

// The axes of q and of arrays like it, or of k and of arrays like it.
struct Layout {
    int ndim;
    const char* axes;  // as messages show them: "[batch, num_q_heads, head_dim]"
};
Layout dense_or_packed_q(bool packed);
Layout dense_or_packed_k(bool packed);

struct RowStrides {
    int64_t batch, token, head;
};

// The strides of an array of this layout, or of an array with one number for each row of it.
RowStrides row_strides(const TensorView& t, const Layout& layout);

// Checks that an array is like q, but with head_dim_v numbers in a row, as `out` is.
void check_like_out(const Checker& check, const AttentionParams& p, const char* name, const TensorView& t,
                    const TensorView& q);

// Checks the head dim of keys or of values, which the message calls `name`.
void check_head_dim(const char* op, const char* name, int64_t head_dim);

// Checks and sets the head counts and head_dim of queries and of keys named `k_name`; head_dim_v becomes the
// same as head_dim until set_value_dim() sets it.
void set_heads(const Checker& check, AttentionParams& p, const char* k_name, const TensorView& q,
               const TensorView& k);

// Checks and sets the head dim of values named `v_name`.
void set_value_dim(const Checker& check, AttentionParams& p, const char* v_name, int64_t head_dim_v);

// Checks dense or packed q, k and v: arrays, lengths and strides. Args is AttentionArgs or
// AttentionBackwardArgs.
template <class Args>
void set_dense_or_packed(const Checker& check, AttentionParams& p, const Args& args);

// The bound of the lengths of sequences that have `total` tokens together: the caller's bound, or the total.
int32_t check_max_seqlen(const Checker& check, const char* name, std::optional<int64_t> bound, int64_t total);

// Checks cu_seqlens [batch + 1] over `total` tokens; on the CPU also its values, and that no length exceeds
// `max_seqlen`.
IndexArray set_cu_seqlens(const Checker& check, const char* name, const TensorView& cu_seqlens, int64_t batch,
                          int64_t total, const char* max_name, int64_t max_seqlen);

// Checks and sets prefixes, slopes, sinks, scale, softcap and the window.
template <class Args>
void set_masks(const Checker& check, AttentionParams& p, const Args& args);

// Checks and sets the block mask of dense and packed attention.
template <class Args>
void set_block_mask(const Checker& check, AttentionParams& p, const Args& args);

// Checks that the factors of the scores survive in float32, and that a softcap does not round to none.
void check_score(const AttentionParams& p, const char* scale_name, double softcap);

// Calls check_score(), and checks and sets dropout: what dense and packed attention need besides set_masks().
template <class Args>
void set_score_and_dropout(AttentionParams& p, const Args& args);

}  // namespace octavo
