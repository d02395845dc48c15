// The query heads of a KV head, shared by several CTAs: where a batch has few tiles of keys, one CTA for each
// would leave SMs idle. A KV head is then several, each with some of the query heads, whose K and V are the
// same. Each has its own dK and dV in workspace, which are added up in order.
//
//     KV head 0, query heads 0 1 2 3      one part:  0: 0 1 2 3    two parts:  0: 0 1   1: 2 3
#pragma once

#include "cuda/gpu.h"
#include "params/attention_backward_params.h"

#include <cstdint>

namespace octavo::cuda {

// What decides how many parts there are.
struct KeyTileShape {
    int64_t num_tiles;      // tiles of keys over the batch, of one KV head
    int32_t keys, queries;  // of a tile of keys, and of the tiles of queries that a CTA walks for it
    int32_t num_places;     // CTAs that run at a time
    int64_t query_bytes;    // what the tiles of a sequence and KV head read of queries, and add to
    double steps_of_tile;   // what a tile of keys takes beside its queries, in tiles of queries
};
// The number of parts that takes least time, by an estimate: 1, or another divisor of the group size.
int32_t choose_group_parts(const AttentionBackwardParams& params, const Gpu& gpu, const KeyTileShape& shape);

// dK and dV of the parts, in workspace: in C order, dV behind dK.
class GroupParts {
  public:
    GroupParts(const AttentionBackwardParams& p, int32_t parts)
        : heads_(p.num_kv_heads * parts),
          dk_bytes_((p.cu_seqlens_k ? p.total_k : int64_t{p.batch} * p.seqlen_k) * heads_ * p.head_dim *
                    size_of(p.dtype)) {}

    int64_t bytes(const AttentionBackwardParams& p) const {
        return dk_bytes_ / p.head_dim * (p.head_dim + p.head_dim_v);
    }
    // The call with as many KV heads as there are parts. Its K and V still have heads of their own number.
    AttentionBackwardParams divide(const AttentionBackwardParams& p, char* workspace) const {
        AttentionBackwardParams divided = p;
        divided.num_kv_heads = heads_;
        divided.dk = workspace;
        divided.dv = workspace + dk_bytes_;
        divided.dk_strides = strides(p, p.head_dim);
        divided.dv_strides = strides(p, p.head_dim_v);
        return divided;
    }

  private:
    GradientStrides strides(const AttentionBackwardParams& p, int64_t columns) const {
        const int64_t token = heads_ * columns;
        return {p.cu_seqlens_k ? 0 : p.seqlen_k * token, token, columns};
    }

    const int32_t heads_;
    const int64_t dk_bytes_;
};

}  // namespace octavo::cuda
