// From checked parameters to the instance of the decode kernel that serves them.
#include "cuda/alignment.h"
#include "cuda/decode/batch_invariant.cuh"
#include "cuda/decode/decode.h"
#include "cuda/decode/split_kv_combine.cuh"
#include "cuda/runtime.h"

#include <algorithm>
#include <initializer_list>

namespace octavo::cuda {

template <class T, int kHeadDim, int kRowTiles>
void launch_stream_k_decode(const AttentionParams& params, cudaStream_t stream);
template <class T, int kHeadDim, int kRowTiles, SplitPolicy kPolicy>
void launch_split_kv_decode(const AttentionParams& params, cudaStream_t stream);
template <class T, int kHeadDim, int kRowTiles>
void launch_batch_invariant_decode(const AttentionParams& params, cudaStream_t stream);

namespace {

struct Instance {
    DType dtype;
    int32_t head_dim, rows;
    int32_t short_keys, unit_keys;                  // of short items; likewise, batch-invariant
    size_t shared_bytes;                            // that its kernels need at most
    int32_t (*most_units)(const AttentionParams&);  // of an item, batch-invariant
    void (*launch)(const AttentionParams&, cudaStream_t);
    void (*launch_dealt)(const AttentionParams&, cudaStream_t);
    void (*launch_dealt_by_length)(const AttentionParams&, cudaStream_t);
    void (*launch_batch_invariant)(const AttentionParams&, cudaStream_t);
    void (*launch_batch_invariant_dealt)(const AttentionParams&, cudaStream_t);
};

template <int kHeadDim, int kRowTiles>
int32_t most_units(const AttentionParams& p) {
    const Units<DecodeConfig<kHeadDim, kRowTiles>> units(p.num_kv_heads);
    return units.most((p.seqlen_k - 1) / kBlockKeys + 1);
}

template <int kHeadDim, int kRowTiles>
constexpr Instance shapes(Instance instance) {
    using Config = DecodeConfig<kHeadDim, kRowTiles>;
    instance.short_keys = SplitKvConfig<kHeadDim, kRowTiles, 1>::kShortKeys;
    instance.unit_keys = Units<Config>::kShort * kBlockKeys;
    instance.shared_bytes = std::max({sizeof(StreamKShared<StreamKConfig<kHeadDim, kRowTiles>>),
                                      sizeof(BatchInvariantShared<Config>),
                                      sizeof(SplitKvShared<SplitKvConfig<kHeadDim, kRowTiles, 1>>),
                                      sizeof(SplitKvShared<ByLengthConfig<kHeadDim, kRowTiles>>)});
    return instance;
}

// Every instance compiled, by rising head dim and rows; CMake writes the list that it compiles.
constexpr Instance kInstances[] = {
#define OCTAVO_DECODE_INSTANCE(type, head_dim, row_tiles)                                                   \
    shapes<head_dim, row_tiles>({dtype_of<type>(), head_dim, 8 * (row_tiles), 0, 0, 0,                      \
                                 most_units<head_dim, row_tiles>,                                           \
                                 launch_stream_k_decode<type, head_dim, row_tiles>,                         \
                                 launch_split_kv_decode<type, head_dim, row_tiles, SplitPolicy::even>,      \
                                 launch_split_kv_decode<type, head_dim, row_tiles, SplitPolicy::by_length>, \
                                 launch_batch_invariant_decode<type, head_dim, row_tiles>,                  \
                                 launch_split_kv_decode<type, head_dim, row_tiles, SplitPolicy::fixed>}),
#include "decode_instances.inc"
#undef OCTAVO_DECODE_INSTANCE
};

// The smallest instance that holds the problem, or null.
const Instance* choose_instance(const AttentionParams& p) {
    const int64_t rows = int64_t{p.seqlen_q} * p.group_size();
    for (const Instance& instance : kInstances) {
        if (instance.dtype == p.dtype && instance.head_dim >= p.head_dim && instance.rows >= rows)
            return &instance;
    }
    return nullptr;
}

struct Axis {
    int64_t length, stride;
};

// Whether the kernel's 32-bit offsets, which count 16 bytes, reach every row.
bool within_reach(DType dtype, std::initializer_list<Axis> axes) {
    int64_t last = 0;
    for (const Axis& axis : axes) {
        if (axis.length > 1 && axis.stride < 0) return false;
        last += std::max(axis.length - 1, int64_t{0}) * axis.stride;
    }
    return last / (16 / size_of(dtype)) < (int64_t{1} << 32);
}

// How many sequences a launch takes, whose blocks it counts in 32 bits.
int32_t sequences_at_once(const AttentionParams& p) {
    constexpr int64_t kMaxBlocks = (int64_t{1} << 30) - 1;
    const int64_t blocks = (int64_t{p.seqlen_k} / kBlockKeys + 1) * std::max(p.num_kv_heads, 1);
    return static_cast<int32_t>(std::min<int64_t>(kMaxBlocks / blocks, kMaxDecodeBatch));
}

// `count` sequences of the batch.
AttentionParams sequences(AttentionParams p, int32_t first, int32_t count) {
    p.batch = count;
    if (p.cu_seqlens_q) {
        p.cu_seqlens_q += first;
    } else {
        const int64_t size = static_cast<int64_t>(size_of(p.dtype));
        p.q = static_cast<const char*>(p.q) + first * p.q_batch_stride * size;
        p.out = static_cast<char*>(p.out) + first * p.out_batch_stride * size;
        if (p.lse) p.lse += first * p.lse_batch_stride;
    }
    p.page_table += first * p.page_table_stride;
    if (p.seq_lens) {
        p.seq_lens += first;
    } else {
        p.total_k -= first * p.seqlen_k;
    }
    if (p.prefix_lens) p.prefix_lens += first;
    if (p.alibi_slopes) p.alibi_slopes += first * p.alibi_batch_stride;
    return p;
}

bool may_deal(const AttentionParams& p) {
    if (p.window_left >= 0 || p.prefix_lens || p.num_pages == 0 || p.seqlen_k == 0) return false;
    return p.seq_lens && p.num_skipped_keys == 0;  // no pass of the cascade
}

// Whether blocks are dealt out evenly, which shares the work whatever the lengths are. One sequence; or short
// items, of up to `short_keys`, if CTAs are few or have 64 KB to read (256 sequences of 96 keys, 8 KV heads
// of dim 64: 24 us, 16 by a schedule); or so many items that SMs which have a short one take more of them: a
// long one that starts last takes an SM 8 us at most.
bool deals(const AttentionParams& p, int32_t short_keys) {
    if (!may_deal(p)) return false;
    const int64_t items = int64_t{p.batch} * p.num_kv_heads, sms = num_sms(p.device.index);
    if (p.batch == 1 && items <= sms) return true;
    const int64_t item_bytes = int64_t{p.seqlen_k} * p.head_dim * 2 * static_cast<int64_t>(size_of(p.dtype));
    constexpr int64_t kManyBytes = 512 * 1024;
    const bool has_enough = item_bytes >= 64 * 1024;
    if (!p.batch_invariant && items >= 6 * sms && has_enough && item_bytes <= kManyBytes) return true;
    return p.seqlen_k <= short_keys && (items <= 4 * sms || has_enough);
}

// Whether by length: where items have two CTAs or more each, if they are equally long.
bool deals_by_length(const AttentionParams& p) {
    return may_deal(p) && p.batch <= kMaxSequencesByLength && p.seqlen_k < (1 << 28) &&
           int64_t{2} * p.batch * p.num_kv_heads <= num_sms(p.device.index);
}

// Whether batch-invariant each unit has a CTA: unless there is room for so many that in a ragged batch those
// which have nothing to do would take longer than the others.
bool deals_units(const AttentionParams& p, const Instance& instance) {
    constexpr int64_t kMostOnSm = 64;
    const int64_t units = int64_t{p.batch} * p.num_kv_heads * instance.most_units(p);
    return deals(p, instance.unit_keys) || (may_deal(p) && units <= kMostOnSm * num_sms(p.device.index));
}

}  // namespace

std::vector<std::string> decode_instances() {
    std::vector<std::string> names;
    for (const Instance& instance : kInstances) {
        names.push_back("decode<" + to_string(instance.dtype) + ", " + std::to_string(instance.head_dim) +
                        ", " + std::to_string(instance.rows) + " rows>");
    }
    return names;
}

bool decode_serves(const AttentionParams& p) {
    const Instance* instance = choose_instance(p);
    if (!instance || !p.paged() || p.num_splits != 0) return false;
    return sequences_at_once(p) > 0 && p.num_kv_heads <= (1 << 16) &&
           within_reach(p.dtype, {{p.num_pages, p.k_outer_stride},
                                  {p.page_size, p.k_token_stride},
                                  {p.num_kv_heads, p.k_head_stride}}) &&
           within_reach(p.dtype, {{p.num_pages, p.v_outer_stride},
                                  {p.page_size, p.v_token_stride},
                                  {p.num_kv_heads, p.v_head_stride}}) &&
           within_reach(p.dtype, {{p.batch, p.cu_seqlens_q ? 0 : p.q_batch_stride},
                                  {p.cu_seqlens_q ? p.total_q : p.seqlen_q, p.q_token_stride},
                                  {p.num_q_heads, p.q_head_stride}}) &&
           shared_bytes_per_block(p.device.index) >= instance->shared_bytes &&
           aligned(p.q, 16, {p.q_batch_stride, p.q_token_stride, p.q_head_stride}, p.dtype) &&
           aligned(p.k, 16, {p.k_outer_stride, p.k_token_stride, p.k_head_stride}, p.dtype) &&
           aligned(p.v, 16, {p.v_outer_stride, p.v_token_stride, p.v_head_stride}, p.dtype) &&
           aligned(p.out, 16, {p.out_batch_stride, p.out_token_stride, p.out_head_stride}, p.dtype);
}

void decode(const AttentionParams& p, cudaStream_t stream) {
    const Instance& instance = *choose_instance(p);
    const int32_t at_once = sequences_at_once(p);
    for (int32_t first = 0; first < p.batch; first += at_once) {
        const AttentionParams part = sequences(p, first, std::min(p.batch - first, at_once));
        if (p.batch_invariant) {
            (deals_units(part, instance) ? instance.launch_batch_invariant_dealt
                                         : instance.launch_batch_invariant)(part, stream);
        } else if (deals(part, instance.short_keys)) {
            instance.launch_dealt(part, stream);
        } else if (deals_by_length(part)) {
            instance.launch_dealt_by_length(part, stream);
        } else {
            instance.launch(part, stream);
        }
    }
}

}  // namespace octavo::cuda
