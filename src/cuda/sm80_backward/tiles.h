// The tiles of sm80_backward.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo::cuda {

// How one of the two kernels cuts its work. Rows are keys in key_gradients_kernel and queries in
// query_gradients_kernel; columns are the other of the two.
struct Sm80BackwardSide {
    int warps;
    int parts;  // warps that share row_tiles times 16 rows; 1 in query_gradients_kernel
    int row_tiles;
    int columns;      // columns of one tile
    int stages;       // tiles of columns in shared memory
    int ds_slots;     // tiles of gradients of scores in shared memory, where dQ is summed; with two, a step
                      // multiplies those of the step before
    int ctas_per_sm;  // the number of CTAs on an SM that the registers must suffice for

    constexpr int rows() const { return 16 * row_tiles * warps / parts; }
};

// One row of the table. Some head dims have several rows; each needs more shared memory than the one before,
// and more than some GPUs have.
struct Sm80BackwardTiles {
    int head_dim;
    Sm80BackwardSide keys, queries;
};

constexpr Sm80BackwardTiles kSm80BackwardTiles[] = {
    {64, {4, 1, 2, 64, 1, 1, 2}, {4, 1, 2, 32, 2, 1, 2}},   //
    {96, {8, 1, 1, 64, 1, 1, 1}, {4, 1, 2, 32, 1, 1, 1}},   //
    {96, {8, 2, 2, 64, 2, 2, 1}, {4, 1, 2, 32, 1, 1, 1}},   //
    {128, {8, 1, 1, 32, 1, 1, 1}, {4, 1, 2, 32, 1, 1, 1}},  //
    {128, {8, 2, 2, 64, 2, 1, 1}, {8, 1, 1, 64, 2, 1, 1}},  //
    {128, {8, 2, 2, 64, 2, 2, 1}, {8, 1, 1, 64, 2, 1, 1}},  //
    {256, {4, 2, 1, 32, 1, 1, 1}, {2, 1, 1, 32, 1, 1, 1}},  //
    {256, {8, 4, 2, 64, 2, 2, 1}, {8, 1, 1, 32, 1, 1, 1}},  //
};

constexpr int sm80_backward_row_stride(int head_dim) { return head_dim + 8; }

// Of how many of a tile's queries the weights pass through shared memory. The warps of the first part need
// none of their own; where there are two parts, they alone have dV.
constexpr int sm80_backward_shared_weights(const Sm80BackwardSide& keys) {
    return keys.parts == 1 ? 0 : keys.parts == 2 ? keys.columns / 2 : keys.columns;
}

// The shared memory of a CTA of one of the kernels: two tiles of its rows, two tiles of its columns in each
// stage, the statistics of queries, and which weights dropout keeps.
constexpr size_t sm80_backward_shared_bytes(int head_dim, const Sm80BackwardSide& side) {
    const int elements = 2 * (side.rows() + side.stages * side.columns) * sm80_backward_row_stride(head_dim);
    return 2 * elements + 8 * side.stages * side.columns + 4 * ((side.rows() * side.columns + 31) / 32) + 64;
}
// On the keys' side, gradients of scores and weights that warps hand to each other come on top.
constexpr size_t sm80_backward_ds_bytes(const Sm80BackwardSide& keys) {
    return 2 * keys.rows() * (keys.ds_slots * keys.columns + sm80_backward_shared_weights(keys));
}

}  // namespace octavo::cuda
