#include "cuda/sm90_attention/row_tiles.h"

#include "cuda/plan.h"
#include "cuda/sm90_attention/operands.h"
#include "cuda/sm90_attention/tiles.h"

#include <algorithm>
#include <utility>

namespace octavo::cuda {
namespace {

constexpr int32_t kGroupRows = kSm90GroupRows;

template <class... Parts>
bool refused(std::string* why_not, const Parts&... parts) {
    refuse(why_not, parts...);
    return false;
}

// How many blocks of 64 rows one sequence of a dense batch takes over all heads, with `heads` heads side by
// side.
int64_t row_groups(const AttentionParams& p, int32_t heads) {
    return p.num_q_heads / heads * ceil_divide(p.seqlen_q, kGroupRows / heads);
}

// How many units make a section (Sm90Launch). There should be few, so that row tiles that share K and V run
// at the same time and find them in the L2 cache; but they must have enough row tiles that the SMs end
// together, although the first row tiles take longest under a causal mask.
int32_t choose_section(const AttentionParams& p, const Gpu& gpu, const Sm90Order& order, int32_t warpgroups,
                       int64_t clusters, int32_t heads) {
    // Two warpgroups read K and V again so often that it pays to run all row tiles of a short unit at the
    // same time (32 sequences of 512 keys, causal, head dim 128, on an H100: 107 us, and 114 with more
    // units); with three and four warpgroups, this takes longer (head dims 64 and 96: 1 and 6 %).
    constexpr int32_t kShort = 4;  // row tiles
    int64_t units = ceil_divide(gpu.num_sms, kShort);
    if (warpgroups > 2 || order.unit_row_tiles > kShort)
        units = ceil_divide((p.window_right >= 0 ? 4 : 2) * clusters, order.unit_row_tiles);
    // With more units than this, K and V are read from memory again and again: the units may fill half of the
    // cache, or more if so few units run at a time that eight CTAs share each.
    const int64_t unit_bytes = int64_t{2} * p.seqlen_k * (p.head_dim + p.head_dim_v) * heads / p.group_size();
    const int64_t most = std::max(gpu.l2_bytes / 2 / std::max<int64_t>(unit_bytes, 1), clusters / 8);
    return static_cast<int32_t>(std::clamp<int64_t>(std::min(units, most), 1, order.num_units));
}

// Returns the reason why the copy engine cannot move an array.
std::string why_not_movable(const char* name, const Sm90Operand& array, DType dtype) {
    const auto address = reinterpret_cast<uintptr_t>(array.base);
    if (address % 16 != 0) {
        return text_of("the copy engine (TMA) takes arrays that begin on a multiple of 16 bytes, and ", name,
                       " begins ", address % 16, " bytes behind one");
    }
    for (int64_t stride : {array.outer_stride, array.token_stride, array.head_stride}) {
        if (is_movable_stride(stride, dtype)) continue;
        return text_of(
            "the copy engine (TMA) takes strides that are positive multiples of 16 bytes and less "
            "than 1 TB, and ",
            name, " has a stride of ", counted(stride, "element"));
    }
    return text_of("the copy engine (TMA) is shown ", counted(array.edge, "token"), " below the first of ",
                   name, ", which begins too low in the address space");
}

}  // namespace

bool suits_sm90(const AttentionParams& p, const Gpu& gpu, std::string* why_not) {
    if (!gpu.has_sm90_kernels && gpu.compute_capability == 90)
        return refused(why_not, "this build has no code for sm_90a");
    if (!gpu.has_sm90_kernels) {
        return refused(why_not, "it consists of instructions that only sm_90a has, and this GPU is sm_",
                       gpu.compute_capability);
    }
    if (p.chosen_pages) return refused(why_not, kReadsAllPages);
    if (p.batch_invariant && !p.cu_seqlens_q) {
        return refused(why_not,
                       "with batch_invariant it takes packed queries alone, since whether the copy "
                       "engine can move others depends on the stride of the batch");
    }
    if (p.num_splits != 0) {
        return refused(why_not, "num_splits (", p.num_splits, ") is given, and this kernel takes none");
    }
    if (!(p.softmax_scale > 0.0f))
        return refused(why_not, "it needs a positive softmax_scale, and this is ", p.softmax_scale);
    if (p.seqlen_k == 0) return refused(why_not, "there are no keys");
    return true;
}

bool can_move_arrays(const AttentionParams& p, bool with_keys, std::string* why_not) {
    const Sm90Operands operands(p);
    const std::pair<const char*, const Sm90Operand*> arrays[] = {
        {"q", &operands.q}, {"out", &operands.out}, {"k", &operands.k}, {"v", &operands.v}};
    for (const auto& [name, array] : arrays) {
        if (!with_keys && (array == &operands.k || array == &operands.v)) continue;
        if (array->is_movable(p.dtype)) continue;
        if (why_not) *why_not = why_not_movable(name, *array, p.dtype);
        return false;
    }
    return true;
}

// Returns the largest divisor of the group size that wastes few rows: heads that lie side by side share K and
// V and see the same keys. For a packed batch only the bound of the lengths is known here, and one row in 16
// may be wasted. (The mean of the lengths is not used, so that a sequence's bits do not depend on its
// neighbours.)
int32_t choose_heads(const AttentionParams& p) {
    int32_t best = 1;
    const int32_t group_size = p.group_size();
    for (int32_t heads = 2; heads <= std::min(group_size, kGroupRows); ++heads) {
        if (group_size % heads != 0) continue;
        const bool fits = p.cu_seqlens_q ? 16 * (kGroupRows % heads) <= kGroupRows
                                         : row_groups(p, heads) <= row_groups(p, best);
        if (fits) best = heads;
    }
    return best;
}

int64_t count_row_tiles(const AttentionParams& p, int32_t row_blocks, int32_t heads) {
    const int64_t tile_tokens = int64_t{row_blocks} * (kGroupRows / heads);
    int64_t row_tiles = p.batch * ceil_divide(p.seqlen_q, tile_tokens);
    if (p.cu_seqlens_q) row_tiles = std::min(row_tiles, p.total_q / tile_tokens + p.batch);
    return row_tiles * (p.num_q_heads / heads);
}

Sm90Order order_row_tiles(const AttentionParams& p, const Gpu& gpu, int32_t row_blocks, int32_t ctas,
                          int32_t heads) {
    Sm90Order order{};
    order.num_units = p.batch * (p.num_q_heads / heads);
    order.unit_row_tiles =
        static_cast<int32_t>(ceil_divide(p.seqlen_q, int64_t{row_blocks} * (kGroupRows / heads)));
    order.section = choose_section(p, gpu, order, row_blocks / ctas, gpu.num_sms / ctas, heads);
    order.first_section = (order.num_units - 1) % order.section + 1;
    return order;
}

}  // namespace octavo::cuda
