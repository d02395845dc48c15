// Makes the tensor map of one array: the tensor of five axes that Sm90Launch describes.
#pragma once

#include "cuda/sm90_attention/operands.h"
#include "cuda/sm90_attention/tiles.h"
#include "cuda/tma/tensor_map.h"

namespace octavo::cuda {

inline CUtensorMap map_of(const Sm90Operand& operand, int32_t head_dim, int32_t box_heads, int32_t box_tokens,
                          int32_t box_columns = kSm90BlockColumns) {
    constexpr int64_t kAnyNumber = (int64_t{1} << 31) - 1;  // lengths decide what is read and written
    return make_tensor_map(
        static_cast<const unsigned char*>(operand.base) - 2 * (operand.edge * operand.token_stride),
        {{head_dim, operand.num_heads, operand.edge, kAnyNumber, kAnyNumber},
         {operand.head_stride, operand.token_stride, operand.token_stride, operand.outer_stride},
         {box_columns, box_heads, box_tokens, 1, 1}});
}

}  // namespace octavo::cuda
