// Where queries lie in workspace that has whole tiles of rows for each sequence.
#pragma once

#include "params/attention_backward_params.h"

#include <cstdint>

namespace octavo::cuda {

// The row in workspace of a sequence's first query. Packed sequences need no prefix sum, since there is a
// tile to spare for each sequence before. `Launch` has the sequence_rows of dense arrays.
template <int kQueries, class Launch>
OCTAVO_HD int32_t first_workspace_row(const Launch& plan, const IndexArray& cu_seqlens_q, int32_t batch) {
    if (!cu_seqlens_q) return batch * plan.sequence_rows;
    return (cu_seqlens_q[batch] + batch * kQueries) / kQueries * kQueries;
}

// The query that a row of workspace belongs to; batch is -1 where there is none.
struct WorkspaceRow {
    int32_t batch, query;
};
template <int kQueries, class Launch>
OCTAVO_HD WorkspaceRow find_workspace_row(const AttentionBackwardParams& p, const Launch& plan, int32_t row) {
    if (!p.cu_seqlens_q) {
        const int32_t batch = row / plan.sequence_rows, query = row - batch * plan.sequence_rows;
        return {query < p.seqlen_q ? batch : -1, query};
    }
    int32_t low = 0, high = p.batch;  // the last sequence that begins at or before the row
    while (high - low > 1) {
        const int32_t middle = (low + high) / 2;
        (first_workspace_row<kQueries>(plan, p.cu_seqlens_q, middle) <= row ? low : high) = middle;
    }
    const int32_t query = row - first_workspace_row<kQueries>(plan, p.cu_seqlens_q, low);
    return {query < p.cu_seqlens_q[low + 1] - p.cu_seqlens_q[low] ? low : -1, query};
}

}  // namespace octavo::cuda
