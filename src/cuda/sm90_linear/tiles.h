// What the kernels of sm90_linear are compiled for. CMakeLists.txt reads the tables, one row per line.
#pragma once

#include "cuda/linear/stage.h"

#include <cstdint>

namespace octavo::cuda {

// Raise it with each change of a kernel or tile that changes times, so that measurements that users made of
// earlier kernels are no longer used.
constexpr int32_t kLinearKernels = 2;

constexpr int32_t kMaxLinearStages = 32;
constexpr int32_t kMaxLinearSplits = 8;

// Tiles of sm90_flat by their rows of w, a multiple of 16.
struct FlatTile {
    int32_t w_rows;
    int32_t panels;      // panels in a stage, a multiple of two
    int32_t max_x_rows;  // the tile is compiled for all of kFlatXRows up to this
};
// clang-format off
constexpr FlatTile kFlatTiles[] = {
    {16, 4, 64},
    {32, 4, 64},
    {48, 4, 64},
    {64, 2, 16},
    {80, 2, 16},
    {96, 2, 16},
    {112, 2, 16},
};
// clang-format on
constexpr int32_t kFlatXRows[] = {8, 16, 32, 64};
// Tiles of sm90_flat with at most this many rows of x also have an instance that normalises x, of bfloat16.
constexpr int32_t kMostNormalisedXRows = 16;
// The room for the sums of squares of all warps and of all CTAs of a cluster, and for what follows from them.
OCTAVO_HD constexpr int32_t norm_factor_bytes(int32_t splits, int32_t x_rows) {
    return ((kFlatWarps + splits + 1) * x_rows * 4 + 127) / 128 * 128;
}

// Tiles of sm90_wide by their rows of w, a multiple of 16 that wgmma can take.
struct WideTile {
    int32_t w_rows;
    int32_t max_x_rows;  // the tile is compiled for all of kWideXRows up to this
};
// clang-format off
constexpr WideTile kWideTiles[] = {
    {64, 128},
    {80, 128},
    {96, 128},
    {112, 128},
    {128, 128},
    {144, 128},
    {176, 128},
    {192, 128},
    {224, 128},
    {256, 128},
};
// clang-format on
constexpr int32_t kWideXRows[] = {16, 32, 64, 128};

constexpr int32_t wide_warpgroups(int32_t x_rows) { return x_rows <= 64 ? 1 : x_rows / 64; }

// Whether one SM has enough registers for two CTAs of a tile.
constexpr bool flat_fits_twice(int32_t w_rows, int32_t x_rows) { return w_rows * x_rows < 32 * 64; }
constexpr bool wide_fits_twice(int32_t w_rows, int32_t x_rows) { return w_rows * x_rows <= 64 * 192; }

}  // namespace octavo::cuda
