#include "cuda/decode/instances.h"

#include "cuda/alignment.h"
#include "cuda/cache_arrays.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <iterator>
#include <utility>

namespace octavo::cuda {
namespace {

using DecodeShapes = std::array<DecodeShape, std::size(kDecodeTiles)>;
template <Codes kCodes, size_t... kRows>
constexpr DecodeShapes shapes(std::index_sequence<kRows...>) {
    return {DecodeShape::of<kDecodeTiles[kRows].head_dim, kDecodeTiles[kRows].row_tiles, kCodes>()...};
}
template <Codes kCodes>
constexpr DecodeShapes kShapes = shapes<kCodes>(std::make_index_sequence<std::size(kDecodeTiles)>());

}  // namespace

const DecodeShape& shape_of(Codes codes, int32_t row) {
    switch (codes) {
        case Codes::none: break;
        case Codes::e4m3: return kShapes<Codes::e4m3>[row];
        case Codes::e5m2: return kShapes<Codes::e5m2>[row];
        case Codes::int8: return kShapes<Codes::int8>[row];
        case Codes::int4: return kShapes<Codes::int4>[row];
        case Codes::int8_int4: return kShapes<Codes::int8_int4>[row];
    }
    return kShapes<Codes::none>[row];
}

int32_t count_sequences(const AttentionParams& p) {
    constexpr int64_t kMaxBlocks = (int64_t{1} << 30) - 1;
    const int64_t blocks = (int64_t{p.seqlen_k} / kStepKeys + 1) * p.num_kv_heads;
    return static_cast<int32_t>(
        std::min<int64_t>({kMaxBlocks / blocks, int64_t{kMaxDecodeBatch}, int64_t{p.batch}}));
}

std::optional<Instance> choose_instance(const AttentionParams& p, const Gpu& gpu, std::string* why_not) {
    if (!p.paged())
        return refuse(why_not,
                      "it reads keys and values from pages, and those of this call are dense or packed");
    if (p.num_pages == 0 || p.seqlen_k == 0) return refuse(why_not, "there are no pages to read");
    if (p.num_splits != 0) {
        return refuse(why_not, "num_splits (", p.num_splits,
                      ") is given, and this kernel chooses its splits by itself");
    }
    if (p.attention_chunk.divisor > 0 && p.seqlen_q > 1) {
        return refuse(why_not,
                      "with attention_chunk it takes one query of each sequence, and these may have ",
                      p.seqlen_q);
    }
    if (p.ranges) return refuse(why_not, kHasNoRanges);
    if (p.alibi_symmetric) return refuse(why_not, kOneSidedAlibi);
    if (p.has_tree_mask && p.softmax_phi_of_heads)
        return refuse(why_not, "it keeps the words of a tree mask where softmax_phi of each head would be");
    const std::optional<Codes> codes = codes_of(p.k_dtype, p.v_dtype);
    if (!codes) {
        return refuse(why_not, "no instance reads keys of ", to_string(p.k_dtype), " with values of ",
                      to_string(p.v_dtype));
    }
    const int64_t rows = int64_t{p.seqlen_q} * p.group_size();
    const int32_t head_dim = std::max(p.head_dim, p.head_dim_v);
    int32_t row = 0, most_rows = 0;
    for (; row < static_cast<int32_t>(std::size(kDecodeTiles)); ++row) {
        if (kDecodeTiles[row].head_dim < head_dim) continue;
        if (*codes != Codes::none && !kDecodeTiles[row].has_codes) continue;
        most_rows = std::max(most_rows, kDecodeTiles[row].rows());
        if (kDecodeTiles[row].rows() >= rows) break;
    }
    if (row == static_cast<int32_t>(std::size(kDecodeTiles))) {
        return refuse(why_not, "it takes at most ", most_rows, " rows per KV head for head_dim ", head_dim,
                      ", and these are ", rows, ": ", counted(p.seqlen_q, "query token"), " of ",
                      counted(p.group_size(), "query head"));
    }
    if (gpu.shared_bytes_per_block < static_cast<int64_t>(kDecodeSharedBytes)) {
        return refuse(why_not, "it takes up to ", kDecodeSharedBytes / 1024,
                      " KB of shared memory, and this GPU has ", gpu.shared_bytes_per_block / 1024,
                      " KB for a block");
    }
    if (count_sequences(p) == 0 || p.num_kv_heads > (1 << 16)) {
        return refuse(why_not, "it counts steps of 16 keys in 32 bits, and a sequence may have ", p.seqlen_k,
                      " keys of ", p.num_kv_heads, " heads");
    }
    const int64_t q_length = p.cu_seqlens_q ? p.total_q : p.seqlen_q;
    if (!is_within_reach(p, p.k_dtype, p.k_outer_stride, p.k_token_stride, p.k_head_stride) ||
        !is_within_reach(p, p.v_dtype, p.v_outer_stride, p.v_token_stride, p.v_head_stride) ||
        !is_within_reach(p, p.k_scales) || !is_within_reach(p, p.v_scales) ||
        !is_within_reach(p.dtype, {{p.batch, p.cu_seqlens_q ? 0 : p.q_batch_stride},
                                   {q_length, p.q_token_stride},
                                   {p.num_q_heads, p.q_head_stride}})) {
        return refuse(why_not,
                      "its offsets reach the 64 GB behind an array's first element, those of scales 16 GB, "
                      "and q, k_pages, v_pages or scales have elements beyond");
    }
    if (!aligned(p.q, 16, {p.q_batch_stride, p.q_token_stride, p.q_head_stride}, p.dtype) ||
        !aligned(p.k, 16, {p.k_outer_stride, p.k_token_stride, p.k_head_stride}, p.k_dtype) ||
        !aligned(p.v, 16, {p.v_outer_stride, p.v_token_stride, p.v_head_stride}, p.v_dtype) ||
        !aligned(p.out, 16, {p.out_batch_stride, p.out_token_stride, p.out_head_stride}, p.dtype)) {
        return refuse(why_not,
                      "it moves 16 bytes at a time, and some row of q, k_pages, v_pages or out does "
                      "not begin on a multiple of 16 bytes");
    }
    for (const auto& [row_dim, dtype] :
         {std::pair(p.head_dim, p.k_dtype), std::pair(p.head_dim_v, p.v_dtype)}) {
        const int32_t bits = bits_of(dtype);
        if (*codes == Codes::none || row_dim * bits % 128 == 0) continue;
        return refuse(why_not, "it moves 16 bytes at a time, and rows of head_dim ", row_dim, " have ",
                      row_dim * bits / 8, " bytes with ", bits, " bits for a number");
    }
    return Instance{row, *codes};
}

int32_t group_parts_of(const AttentionParams& p) {
    constexpr int32_t kMostParts = 8;  // each of which reads all keys, all but one of them from the L2 cache
    const int32_t head_dim = std::max(p.head_dim, p.head_dim_v);
    if (!is_code(p.k_dtype) || p.chosen_pages || head_dim <= kHeadDimWithoutParts) return 1;
    int32_t most_rows = 0;
    for (const DecodeTiles& tiles : kDecodeTiles) {
        if (tiles.has_codes && tiles.head_dim >= head_dim) most_rows = std::max(most_rows, tiles.rows());
    }
    const int64_t group = p.group_size();
    if (group <= most_rows) return 1;
    for (int32_t parts = 2; parts <= kMostParts; ++parts) {
        if (group % parts == 0 && p.seqlen_q * group / parts <= most_rows) return parts;
    }
    return 1;
}

}  // namespace octavo::cuda
