// The arithmetic of linear(): a strip of weight rows times a tile of rows of x (linear_tile.inl).
#pragma once

#include "params/linear_params.h"

#include <cstdint>

namespace octavo::cpu {

constexpr int kLinearTileRows = 64;  // of x, at most
constexpr int kStripRows = 64;       // of w, at most
constexpr int kPanelRows = 4;        // of w: those that registers hold sums of
constexpr int kMaxLanes = 16;
constexpr int kStepBytes = 64;                       // of a row of w: a line of the cache
constexpr int kXNumbers = kLinearTileRows << 10;     // of x in scratch
constexpr int kPartBytes = 2 << 10;                  // of a row of w, beside which rows of x are cached
constexpr int kShortRowBytes = 2560;                 // of the longest rows of w that are asked for in order
constexpr int kWidenedNumbers = kPartBytes / 2;      // of 16 bits in them, as float32 in scratch
constexpr int kSumsStride = kStripRows + kMaxLanes;  // whole vectors may be read from any column

// Scratch of one thread: what stays in its second-level cache.
struct alignas(64) LinearScratch {
    float x[kXNumbers];                                     // [row, k], a run of K
    float panel[kPanelRows * kWidenedNumbers];              // [row of w, k], a part of that run
    float lanes[kStripRows * kLinearTileRows * kMaxLanes];  // [panel, row of x, row of w, lane]
    float sums[kLinearTileRows * kSumsStride];              // [row of x, row of w]
    float bias[kSumsStride], residual[kSumsStride], finished[kSumsStride];  // [column]
};

// A part of the result: rows of x and columns of out.
struct LinearPart {
    int64_t first_row, num_rows;
    int64_t first_column, num_columns;
};

struct LinearKernels {
    void (*compute)(const LinearParams&, const LinearPart&, LinearScratch&);
};

}  // namespace octavo::cpu
