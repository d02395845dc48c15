// Paged attention for few rows a KV head where little or nothing has to be known to share out the work: one
// sequence, a few, many short ones, or units of items (batch-invariant). The shortest chain from launch to
// result.
//
// grid: (num_kv_heads, batch, parts and then mergers of an item). Blocks of 16 keys are dealt out to the
// parts, and within a CTA to its warps, so that page ids are on their way together with the length. What the
// warps leave is added up in the CTA, what CTAs leave by mergers (dealt_merge.cuh).
//
// By length: (num_kv_heads, slots and then mergers of the sequences). A sequence has so many slots, which are
// the parts of its items, as follows from all lengths, for which page ids have to wait; the rest is the same.
//
// Batch-invariant, the parts are units (units.cuh) and the warps have leaves, which follow from the length;
// that is at first taken for what the page table has room for. Of many units, each CTA looks at the length
// first.
//
// As in kernel.cuh, code runs once: what does not depend on other kernels' results is worked out before they
// are waited for.
#pragma once

#include "cuda/decode/parameters.cuh"
#include "cuda/decode/split_kv_combine.cuh"
#include "cuda/decode/units.cuh"
#include "cuda/ptx/grid_dependency.h"

namespace octavo::cuda {

// The one sequence that a CTA works on. Windows and prefixes run in the other kernel.
struct SplitKvSequence {
    SequenceSlice seq{};

    // All but the length.
    __device__ static SplitKvSequence make(const AttentionParams& p, int32_t sequence) {
        SequenceSlice seq = SequenceSlice::make(p, sequence, 0);
        seq.see.prefix_len = 0;
        seq.see.window_left = -1;
        return {seq};
    }
    __device__ const SequenceSlice& slice(int32_t) const { return seq; }
};

// Copies the queries of an item, all warps of a CTA together.
template <class T, class Config>
class QueryCopier {
  public:
    __device__ QueryCopier(const AttentionParams& p, const FastDivide& group_size,
                           const RowCopier<T, Config>& rows, int32_t kv_head, int warp)
        : p_(p), group_size_(group_size), rows_(rows), kv_head_(kv_head), warp_(warp) {
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            const DecodeRow row(SequenceSlice{}, group_size, kv_head, first(i) + rows.lane_row());
            tokens_[i] = row.token;
            offsets_[i] = rows.query_offset(row);
            pin_in_register(tokens_[i]);
            pin_in_register(offsets_[i]);
        }
    }

    __device__ void copy(Rows<Config> q, const SequenceSlice& seq, int32_t sequence) const {
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            if (first(i) >= Config::kRows) break;
            rows_.copy_query_rows(q, first(i), rows_.query_begin(seq) + offsets_[i],
                                  tokens_[i] < seq.seqlen_q);
        }
        if (OCTAVO_RARE(p_.alibi_slopes != nullptr) && warp_ == Config::kWarps - 1) {
            rows_.copy_slopes(q, DecodeRow(seq, group_size_, kv_head_, threadIdx.x % 32), sequence);
        }
    }

  private:
    static constexpr int kRowsPerCopy = RowCopier<T, Config>::kRowsPerCopy;
    static constexpr int kCopies = (Config::kRows / kRowsPerCopy + Config::kWarps - 1) / Config::kWarps;

    __device__ int first(int i) const { return (i * Config::kWarps + warp_) * kRowsPerCopy; }

    const AttentionParams& p_;
    const FastDivide& group_size_;
    const RowCopier<T, Config>& rows_;
    int32_t kv_head_;
    int warp_;
    int32_t tokens_[kCopies];
    uint32_t offsets_[kCopies];
};

// Where the rows of a warp's blocks lie: every `stride`-th block of an item from `first` on, in their order.
template <class T, class Config>
class SplitKvBlocks {
  public:
    __device__ SplitKvBlocks(const AttentionParams& p, const SplitKvLaunch& plan,
                             const RowCopier<T, Config>& rows, int32_t kv_head)
        : p_(p), plan_(plan), rows_(rows), head_offset_(rows.head_offset(kv_head)) {
        pin_in_register(head_offset_);
    }

    // Before begin().
    __device__ void start(int32_t sequence, int32_t first, int32_t stride) {
        table_ = p_.page_table + sequence * p_.page_table_stride;
        stride_ = stride;
        next_window_ = first;
        first_entry_ = entry(first);
        pin_in_register(first_entry_);
    }

    // Asks for the first page ids, before the length is known: entries behind the last page are not used.
    __device__ void begin() { next_ids_ = ptx::load_relaxed(first_entry_); }

    // The next block, `block`: the offset that RowCopier takes.
    __device__ uint32_t next(int32_t block, int32_t seqlen_k) {
        if (block == next_window_) {
            ids_ = next_ids_;
            index_ = 0;
            next_window_ += (32 >> plan_.pages_per_block_log2) * stride_;
            if (next_window_ * int64_t{kBlockKeys} < seqlen_k) next_ids_ = *entry(next_window_);
        }
        const uint32_t row = offset(block, seqlen_k);
        index_ += 1 << plan_.pages_per_block_log2;
        return row;
    }

  private:
    // Where lane l finds a page id of its own: of 32 >> log2 blocks from `window` on, 1 << log2 pages each.
    __device__ const int32_t* entry(int32_t window) const {
        const int lane = threadIdx.x % 32, log2 = plan_.pages_per_block_log2;
        const int32_t block = min(window + (lane >> log2) * stride_, (p_.seqlen_k - 1) / kBlockKeys);
        const int32_t page = plan_.page_size.quotient(block * kBlockKeys) + (lane & ((1 << log2) - 1));
        return table_ + min(page, plan_.max_pages - 1);
    }

    // In the place of keys past the end, the last one.
    __device__ uint32_t offset(int32_t block, int32_t seqlen_k) const {
        const int32_t first_key = block * kBlockKeys;
        const int32_t key = min(first_key + static_cast<int32_t>(threadIdx.x % kBlockKeys), seqlen_k - 1);
        const int32_t page = plan_.page_size.quotient(key);
        const uint32_t id = __shfl_sync(~0u, ids_, index_ + page - plan_.page_size.quotient(first_key));
        return rows_.row_offset(id, key - page * p_.page_size, head_offset_);
    }

    const AttentionParams& p_;
    const SplitKvLaunch& plan_;
    const RowCopier<T, Config>& rows_;
    const int32_t *table_, *first_entry_;
    uint32_t head_offset_;
    int32_t stride_, next_window_;  // the block whose first page is lane 0's of next_ids_
    int index_ = 0;                 // the lane that holds the first page of the next block
    uint32_t ids_ = 0, next_ids_ = 0;
};

// The blocks of a warp: [first, end), `stride` apart.
struct WarpShare {
    int32_t first, end, stride;
};

// Batch-invariant: a warp's leaf of a unit, and what is known of the item.
struct FixedShare {
    int32_t first = 0, end = 0;          // blocks
    int32_t leaves = 0;                  // of the unit
    int32_t num_units = 0, at_once = 1;  // units of the item, and of a part

    template <class Config>
    __device__ static FixedShare of(const Units<Config>& units, int32_t num_blocks, int32_t unit, int warp) {
        const UnitCut cut = units.cut(num_blocks);
        FixedShare own{cut.leaf_of(unit, warp), cut.leaf_of(unit, warp + 1), cut.num_leaves(),
                       cut.num_units(), 1 << cut.part_log2};
        pin_in_register(own.first);
        pin_in_register(own.end);
        pin_in_register(own.leaves);
        pin_in_register(own.num_units);
        pin_in_register(own.at_once);
        return own;
    }
};

// The CTAs of a KV head, by length: each item has one, and so many more as its length deserves of those that
// are left. Every warp works this out.
struct LengthShare {
    int32_t sequence, seqlen_k;
    int32_t first, num_parts;  // of its CTAs

    // A slot: the CTA's number among those of its head.
    template <class Config>
    __device__ static LengthShare of_slot(const AttentionParams& p, const SplitKvLaunch& plan, int32_t slot) {
        const LengthShare own = of_lane<Config>(p, plan);
        return own.from(__popc(__ballot_sync(~0u, own.first + own.num_parts <= slot)));
    }
    template <class Config>
    __device__ static LengthShare of_sequence(const AttentionParams& p, const SplitKvLaunch& plan,
                                              int32_t sequence) {
        return of_lane<Config>(p, plan).from(sequence);
    }

  private:
    template <class Config>
    __device__ static LengthShare of_lane(const AttentionParams& p, const SplitKvLaunch& plan) {
        const int32_t lane = threadIdx.x % 32;
        const bool has_sequence = lane < p.batch;
        const int32_t seqlen_k = has_sequence ? min(ptx::load_relaxed(p.seq_lens + lane), p.seqlen_k) : 0;
        const uint32_t blocks = (static_cast<uint32_t>(max(seqlen_k, 0)) + (kBlockKeys - 1)) / kBlockKeys;
        const uint32_t left = plan.num_slots - p.batch, all = max(__reduce_add_sync(~0u, blocks), 1u);
        const int32_t deserved = 1 + static_cast<int32_t>(blocks * left / all);
        const int32_t most = min(plan.num_parts, Config::parts_of(static_cast<int32_t>(blocks)));
        const int32_t num_parts = has_sequence ? min(deserved, most) : 0;
        return {lane, seqlen_k, inclusive_sum(num_parts) - num_parts, num_parts};
    }
    __device__ LengthShare from(int lane) const {
        return {lane, __shfl_sync(~0u, seqlen_k, lane), __shfl_sync(~0u, first, lane),
                __shfl_sync(~0u, num_parts, lane)};
    }
};

template <class T, class Config, SplitPolicy kPolicy>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtas)
    split_kv_decode_kernel(const __grid_constant__ AttentionParams p,
                           const __grid_constant__ SplitKvLaunch plan) {
    constexpr bool kBatchInvariant = kPolicy == SplitPolicy::fixed;
    constexpr bool kByLength = kPolicy == SplitPolicy::by_length;
    extern __shared__ __align__(512) unsigned char split_kv_shared_bytes[];
    auto& shared = *reinterpret_cast<SplitKvShared<Config>*>(split_kv_shared_bytes);
    const int warp =
        __shfl_sync(~0u, threadIdx.x / 32, 0);  // the same for all lanes, as the compiler now knows
    const int32_t kv_head = blockIdx.x;
    int32_t sequence = blockIdx.y, part = blockIdx.z;
    WarpShare share{part + plan.num_parts * warp, 0, plan.num_parts * Config::kWarps};
    const bool is_merger = kByLength ? sequence >= plan.num_slots : part >= plan.num_parts;
    auto blocks_of = [](int32_t length) {
        return static_cast<int32_t>((static_cast<uint32_t>(max(length, 0)) + (kBlockKeys - 1)) / kBlockKeys);
    };
    const auto units = Units<Config>::of_log2(plan.max_units_log2);
    const bool knows_length = kBatchInvariant && plan.many_units;
    int32_t seqlen_k = p.seqlen_k;  // at first what the page table has room for, which it often is
    FixedShare leaf;
    if constexpr (kBatchInvariant) {
        if (knows_length) {
            ptx::wait_for_previous_grid();
            seqlen_k = min(ptx::load_relaxed(p.seq_lens + sequence), p.seqlen_k);
            const int32_t num_units = units.cut(max(blocks_of(seqlen_k), 1)).num_units();
            if (is_merger ? num_units == 1 : part >= num_units) return;
        }
        leaf = FixedShare::of(units, max(blocks_of(seqlen_k), 1), part, warp);
        share = {leaf.first, 0, 1};
    }
    const int32_t likely_blocks = blocks_of(seqlen_k);

    // The others tell so when they have read all: the next launch's CTAs would take places unevenly before.
    if (is_merger) ptx::launch_dependents();
    prefetch_params(p);
    const RowCopier<T, Config> rows(p);
    const QueryCopier<T, Config> query_copier(p, plan.group_size, rows, kv_head, warp);
    SplitKvBlocks<T, Config> blocks(p, plan, rows, kv_head);
    if (!kByLength) blocks.start(sequence, share.first, share.stride);
    SplitKvSequence own;
    WarpAttention<T, Config, SplitKvSequence, kBatchInvariant> state(p, plan.group_size, own);
    const Rows<Config> queries{ptx::shared_address(shared.queries)};
    const uint32_t tiles = ptx::shared_address(shared.warps[warp].tiles);
    ptx::wait_for_previous_grid();

    int32_t num_parts = 0, first_part = (sequence * gridDim.x + kv_head) * plan.num_parts;
    if constexpr (kByLength) {
        prefetch_page_table(p, plan.page_size);
        const int32_t merger = sequence - plan.num_slots;
        const LengthShare deal = is_merger
                                     ? LengthShare::of_sequence<Config>(p, plan, merger / plan.num_mergers)
                                     : LengthShare::of_slot<Config>(p, plan, sequence);
        if (deal.sequence >= p.batch) return;
        part = is_merger ? plan.num_parts + merger % plan.num_mergers : sequence - deal.first;
        sequence = deal.sequence;
        seqlen_k = deal.seqlen_k;
        num_parts = deal.num_parts;
        first_part = kv_head * plan.num_slots + deal.first;
        share = {part + num_parts * warp, 0, num_parts * Config::kWarps};
        blocks.start(sequence, share.first, share.stride);
    } else if (!knows_length) {
        seqlen_k = min(ptx::load_relaxed(p.seq_lens + sequence), p.seqlen_k);
    }
    if (!is_merger) blocks.begin();
    own = SplitKvSequence::make(p, sequence);
    if (!is_merger) query_copier.copy(queries, own.seq, sequence);
    ptx::cp_async_commit();
    own.seq.see.seqlen_k = seqlen_k;
    const int32_t num_blocks = blocks_of(seqlen_k);
    if (!kByLength) num_parts = max(1, min(num_blocks, plan.num_parts));  // of no blocks, one CTA tells
    share.end = num_blocks;
    if constexpr (kBatchInvariant) {
        if (num_blocks != likely_blocks) {
            leaf = FixedShare::of(units, max(num_blocks, 1), part, warp);
            if (leaf.first != share.first) {
                share.first = leaf.first;
                blocks.start(sequence, leaf.first, share.stride);
                if (!is_merger) blocks.begin();
            }
        }
        num_parts = leaf.num_units;
        share.end = min(leaf.end, num_blocks);
    }
    const Item item{sequence, kv_head, 0, num_blocks};
    const OutputWriter<T, Config, SplitKvSequence> part_merge(p, plan.group_size, own);
    const SplitKvCombine<T, Config, SplitKvSequence, kPolicy> merge(part_merge, plan, shared, item,
                                                                    first_part);
    if (is_merger) return merge.merge_parts(part - plan.num_parts, num_parts, leaf.at_once);
    if (part >= num_parts) return ptx::cp_async_wait<0>();  // another CTA may get this shared memory

    // A warp's tiles, keys and values in turn, a group of copies each. A tile is copied to the place of the
    // one before that in use: `place`, the tile in use follows it.
    constexpr int kAhead = Config::kTiles - 1;
    auto tile = [&](int place) { return Rows<Config>{tiles + place * 16 * Config::kTileChunks}; };
    auto next = [](int place) { return place + 1 == Config::kTiles ? 0 : place + 1; };
    typename decltype(state)::BlockWeights weights;
    int place = 0;
    int32_t copied = share.first, used = share.first - kAhead / 2 * share.stride;
#pragma unroll 1
    do {
        const bool copies = copied < share.end, uses = used >= share.first && used < share.end;
        uint32_t offset = 0;
        if (copies) {
            offset = blocks.next(copied, seqlen_k);
            rows.copy_keys(tile(place), offset);
        }
        ptx::cp_async_commit();
        place = next(place);
        if (uses) {
            ptx::cp_async_wait<kAhead>();
            __syncwarp();  // every lane's copies have arrived
            state.add_keys(weights, tile(place), used);
            __syncwarp();  // every lane is done with the tile
        }
        if (copies) rows.copy_values(tile(place), offset);
        ptx::cp_async_commit();
        place = next(place);
        if (uses) {
            ptx::cp_async_wait<kAhead>();
            __syncwarp();  // as above
            state.add_values(weights, tile(place));
            __syncwarp();
        }
        copied += share.stride;
        used += share.stride;
        if (used == share.first) {  // while the first copies are on their way
            state.begin(item, queries);
            state.reset();
            ptx::cp_async_wait<kAhead>();
            __syncthreads();  // the queries have arrived
        }
    } while (used < share.end || used < share.first);
    ptx::launch_dependents();
    state.sum_over_keys();
    state.leave(shared.warps[warp].piece);
    __syncthreads();  // all pieces are there
    merge.merge_warps(part, num_parts, leaf.leaves);
}

}  // namespace octavo::cuda
