// Writes the finished rows of an item.
#pragma once

#include "common/fast_divide.h"
#include "common/online_softmax.h"
#include "cuda/decode/item.cuh"
#include "cuda/types.h"

#include <type_traits>

namespace octavo::cuda {

// Writes results, four columns at a time. `Sequences` knows the batch's sequences: slice(i).
template <class T, class Sequences>
class OutputWriter {
  public:
    __device__ OutputWriter(const AttentionParams& p, const FastDivide& group_size,
                            const Sequences& sequences)
        : p_(p),
          group_size_(group_size),
          sequences_(sequences),
          num_rows_(p.seqlen_q * static_cast<int32_t>(group_size.divisor)) {}

    __device__ int num_rows() const { return num_rows_; }  // the most rows that an item has

    // Where a row's result goes; both are null for a row that the item does not have.
    struct Target {
        T* out;
        float* lse;
    };
    __device__ Target target(const Item& item, int row) const {
        const SequenceSlice seq = sequences_.slice(item.sequence);
        const DecodeRow place(seq, group_size_, item.kv_head, row);
        if (!place.valid) return {nullptr, nullptr};
        return {static_cast<T*>(p_.out) + seq.out_begin + place.token * p_.out_token_stride +
                    place.head * p_.out_head_stride,
                p_.lse ? p_.lse + seq.lse_begin + place.token * p_.lse_token_stride +
                             place.head * p_.lse_head_stride
                       : nullptr};
    }

    // Writes four columns of a row's result.
    __device__ void store(const Item& item, int row, int column, const SoftmaxState& state,
                          float4 out) const {
        store(target(item, row), item, row, column, state, out);
    }
    // The head's sink is loaded here and not with the target, where it would cost calls without sinks
    // registers (133 instead of 128 where a CTA has long items).
    __device__ void store(const Target& target, const Item& item, int row, int column, SoftmaxState state,
                          float4 out) const {
        if (!target.out || column >= p_.head_dim_v) return;
        float factor = p_.out_scale;
        if (OCTAVO_RARE(p_.sinks != nullptr)) {
            const int32_t head =
                DecodeRow(sequences_.slice(item.sequence), group_size_, item.kv_head, row).head;
            factor *= state.add_sink(p_.sinks[head] * kLog2e);
        }
        const float scale = state.inverse_sum() * factor;
        *reinterpret_cast<uint2*>(target.out + column) =
            make_uint2(pack_output<T>(p_.dtype, out.x * scale, out.y * scale),
                       pack_output<T>(p_.dtype, out.z * scale, out.w * scale));
        if (target.lse && column == 0) *target.lse = state.lse();
    }

  private:
    const AttentionParams& p_;
    const FastDivide& group_size_;
    const Sequences& sequences_;
    int num_rows_;
};

}  // namespace octavo::cuda
