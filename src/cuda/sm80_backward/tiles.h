// The tiles of sm80_backward.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo::cuda {

// How one of the two kernels cuts its work. A warp owns row_tiles times 16 rows, which are keys in
// key_gradients_kernel and queries in query_gradients_kernel; columns are the other of the two.
struct Sm80BackwardSide {
    int warps;
    int row_tiles;
    int columns;      // columns of one tile
    int stages;       // tiles of columns in shared memory
    int ctas_per_sm;  // the number of CTAs on an SM that the registers must suffice for

    constexpr int rows() const { return 16 * row_tiles * warps; }
};

// One row of the table. Some head dims have two rows; the second needs more shared memory than some GPUs
// have.
struct Sm80BackwardTiles {
    int head_dim;
    int dim_splits;  // CTAs that divide the columns of dK and dV, whose sums need registers, and those of dQ
    Sm80BackwardSide keys, queries;
};

constexpr Sm80BackwardTiles kSm80BackwardTiles[] = {
    {64, 1, {4, 2, 32, 2, 2}, {4, 2, 32, 2, 2}},   //
    {96, 1, {8, 1, 64, 1, 1}, {4, 2, 32, 1, 1}},   //
    {128, 1, {8, 1, 32, 1, 1}, {4, 2, 32, 1, 1}},  //
    {128, 1, {8, 1, 64, 2, 1}, {8, 1, 64, 2, 1}},  //
    {256, 2, {4, 1, 16, 1, 1}, {2, 1, 32, 1, 1}},  //
    {256, 2, {8, 1, 32, 1, 1}, {8, 1, 32, 1, 1}},  //
};

constexpr int sm80_backward_row_stride(int head_dim) { return head_dim + 8; }

// The shared memory of a CTA of one of the kernels: two tiles of its rows, two tiles of its columns in each
// stage, the statistics of queries, and which weights dropout keeps. Where the keys' side adds to sums of dQ,
// a tile of gradients of scores comes on top (ScoreGradientTile).
constexpr size_t sm80_backward_ds_bytes(const Sm80BackwardSide& side) {
    return 2 * side.rows() * (side.columns + 8);
}
constexpr size_t sm80_backward_shared_bytes(int head_dim, const Sm80BackwardSide& side) {
    const int elements = 2 * (side.rows() + side.stages * side.columns) * sm80_backward_row_stride(head_dim);
    return 2 * elements + 8 * side.stages * (side.rows() > side.columns ? side.rows() : side.columns) +
           4 * ((side.rows() * side.columns + 31) / 32) + 64;
}

}  // namespace octavo::cuda
