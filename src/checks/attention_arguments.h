// What the operators of attention check alike. Each part sets its fields of the parameters.
#pragma once

#include "checks/check.h"
#include "params/attention_params.h"

#include <octavo/tensor.h>

#include <cstdint>
#include <optional>

namespace octavo {

// The axes of q and of what is like it, or of k and of what is like it.
struct Layout {
    int ndim;
    const char* axes;  // as messages show them: "[batch, num_q_heads, head_dim]"
};
Layout dense_or_packed_q(bool packed);
Layout dense_or_packed_k(bool packed);

struct RowStrides {
    int64_t batch, token, head;
};

// The strides of an array of this layout, or of one with a number for each of its rows.
RowStrides row_strides(const TensorView& t, const Layout& layout);

// An array like q with head_dim_v numbers in a row, as `out` is.
void check_like_out(const Checker& check, const AttentionParams& p, const char* name, const TensorView& t,
                    const TensorView& q);

// The head counts and head_dim, of queries and of keys named `k_name`; head_dim_v is the same.
void set_heads(const Checker& check, AttentionParams& p, const char* k_name, const TensorView& q,
               const TensorView& k);

// Checks dense or packed q, k and v: arrays, lengths and strides. Args are those of attention, or of its
// backward.
template <class Args>
void set_dense_or_packed(const Checker& check, AttentionParams& p, const Args& args);

// The longest of `total` tokens' sequences: the caller's bound, or the total.
int32_t check_max_seqlen(const Checker& check, const char* name, std::optional<int64_t> bound, int64_t total);

// cu_seqlens [batch + 1] over `total` tokens; on the CPU its values too, and that none exceeds `max_seqlen`.
IndexArray set_cu_seqlens(const Checker& check, const char* name, const TensorView& cu_seqlens, int64_t batch,
                          int64_t total, const char* max_name, int64_t max_seqlen);

// Prefixes, slopes, sinks, scale, softcap and the window.
template <class Args>
void set_masks(const Checker& check, AttentionParams& p, const Args& args);

// Which blocks of dense and packed attention are looked at.
template <class Args>
void set_block_mask(const Checker& check, AttentionParams& p, const Args& args);

// What the scores are multiplied by must survive in float32, and a cap must not round to none.
void check_score(const AttentionParams& p, const char* scale_name, double softcap);

// The check of the score, and dropout, as dense and packed attention have them beside set_masks().
template <class Args>
void set_score_and_dropout(AttentionParams& p, const Args& args);

}  // namespace octavo
