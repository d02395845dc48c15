// Split-KV paged attention for few rows per KV head, where the host can divide the work: one sequence, a few,
// many short ones, ragged batches in splits of about one size, or fixed splits (batch-invariant). It is the
// shortest chain from launch to result. Page: docs/kernels/decode.md.
//
// grid: (num_kv_heads, batch, splits and then combiners of an item). A CTA owns one split of the keys of an
// item (one KV head of one sequence), or combines splits. The splits take turns at the blocks of keys, and so
// do the warps within a CTA, so that page ids can be loaded together with the length. The CTA combines the
// partial results of its warps; combiners, or the last split of an item, combine those of CTAs
// (split_kv_combine.cuh).
//
//     blocks      0  1  2  3  4  5  6  7  8  9 10 11 ...        (2 splits, 3 warps each)
//     split.warp 0.0 1.0 0.1 1.1 0.2 1.2 0.0 1.0 ...
//
// By length, the grid is (num_kv_heads, slots and then combiners of the sequences). How many slots a sequence
// has follows from all lengths (split_shares.cuh), for which page ids have to wait; the rest is the same.
//
// Sized: the grid has room for the splits of a full sequence. A CTA looks at its own length first, and ends
// if it has no split.
//
// Fixed splits (fixed_splits.h): a warp has blocks that follow each other. Which they are follows from the
// length; at first, a CTA assumes the length that the page table has room for. Where many CTAs may have
// nothing to do, each looks at the length first.
//
// Plain calls (plain_calls.h) over codes have instances of their own, without code for what they do not use,
// and over integers others where items have no more than four rows.
//
// Chosen pages (chosen_list.cuh): keys are numbered in an item's own list of pages, which is loaded together
// with the length. These calls have instances of their own, with fixed splits.
//
// A window bounds the blocks on the left too (visible_blocks.cuh): then, too, page ids wait for the length.
//
// Most code runs once. Before a CTA waits for earlier kernels, it computes all that does not depend on their
// results.
#pragma once

#include "cuda/decode/chosen_list.cuh"
#include "cuda/decode/page_ids.cuh"
#include "cuda/decode/plain_calls.h"
#include "cuda/decode/prefetch.cuh"
#include "cuda/decode/split_kv_combine.cuh"
#include "cuda/decode/split_shares.cuh"
#include "cuda/ptx/grid_dependency.h"

#include <type_traits>

namespace octavo::cuda {

// The one sequence that a CTA works on.
struct SplitKvSequence {
    SequenceSlice seq{};

    // Makes everything except the length.
    __device__ static SplitKvSequence make(const AttentionParams& p, int32_t sequence) {
        SequenceSlice seq = SequenceSlice::make(p, sequence, 0);
        seq.see.prefix_len = 0;
        return {seq};
    }
    __device__ const SequenceSlice& slice(int32_t) const { return seq; }

    // How many keys this launch has to read, for a length from seq_lens.
    __device__ static int32_t seqlen_k(const AttentionParams& p, int32_t length) {
        return max(min(length - p.num_skipped_keys, p.seqlen_k), 0);
    }
    __device__ void set_length(const AttentionParams& p, int32_t sequence, int32_t length) {
        seq.see.seqlen_k = seqlen_k(p, length);
        seq.see.prefix_len = SequenceSlice::prefix_len(p, sequence, seq.see.seqlen_k);
    }
};

// The same where pages are chosen, with the list of the CTA's KV head.
struct ChosenSequence : SplitKvSequence {
    ChosenList list{};
    const PageLayout* layout = nullptr;
    int32_t page_size = 0;

    __device__ static ChosenSequence make(const AttentionParams& p, int32_t sequence) {
        return {SplitKvSequence::make(p, sequence)};
    }
    // Sets everything, and returns the blocks that some query sees, numbered in the list. While the length is
    // still being loaded, the list is looked at.
    template <int kBlockKeys>
    __device__ VisibleBlocks choose(const AttentionParams& p, const PageLayout& pages, int32_t sequence,
                                    int32_t kv_head, int32_t length) {
        const int32_t last = ChosenList::last_entry(p, sequence, kv_head);
        *this = make(p, sequence);
        set_length(p, sequence, length);
        layout = &pages;
        page_size = p.page_size;
        list = ChosenList::of(p, sequence, kv_head, last, seq.see.seqlen_k);
        int32_t begin = 0;
        if (p.window_left >= 0) begin = list.first_from(seq.see.window_begin(seq.q_pos(0)), pages, page_size);
        const int32_t first = begin / kBlockKeys, end = (list.num_keys + kBlockKeys - 1) / kBlockKeys;
        return {begin < list.num_keys ? end - first : 0, 0, first, 0, begin};
    }
    __device__ int32_t position(int32_t key) const { return list.position(key, *layout, page_size); }
    // How many keys, in the list's order, the first query sees for sure: at most as many keys are hidden from
    // it as positions are.
    __device__ int32_t seen_by_all() const {
        return list.num_keys - (seq.see.seqlen_k - seq.see.window_end(seq.q_pos(0)));
    }
};

// Beside attention over numbers, the last CTA of the launch ends behind that kernel, whichever way it ends,
// so that the launch does not complete before it. No CTA that comes later has to wait for this one's place.
template <bool kUsed>
struct EndBehindNumbers {
    __device__ EndBehindNumbers(const SplitKvLaunch& launch, const uint3& index)
        : waits_(OCTAVO_RARE(launch.beside == Beside::numbers) && index.x + 1 == gridDim.x &&
                 index.y + 1 == gridDim.y && index.z + 1 == gridDim.z) {}
    __device__ ~EndBehindNumbers() {
        if (!OCTAVO_RARE(waits_)) return;
        ptx::launch_dependents();  // it may have ended before it came to that
        ptx::wait_for_previous_grid();
    }

  private:
    const bool waits_;
};
template <>
struct EndBehindNumbers<false> {
    __device__ EndBehindNumbers(const SplitKvLaunch&, const uint3&) {}
};

template <class T, class Config, SplitKvCalls kCalls>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtas)
    split_kv_decode_kernel(const __grid_constant__ AttentionParams params,
                           const __grid_constant__ SplitKvLaunch launch) {
    extern __shared__ __align__(512) unsigned char split_kv_shared_bytes[];
    constexpr bool kChosen = kCalls == SplitKvCalls::chosen,
                   kFixed = kCalls == SplitKvCalls::fixed || kChosen;
    // Whether a launch may serve a part of a batch, beside another one over numbers. Over 16 bits none does;
    // there the branch for it would cost the shortest calls 1.5 %.
    constexpr bool kServesParts = Config::kHasCodes && kCalls == SplitKvCalls::all;
    constexpr bool kGaps = kFixed && !kChosen;
    const KnownParams<kCalls == SplitKvCalls::plain> known(params);
    const AttentionParams& p = known.params;
    auto& shared = *reinterpret_cast<SplitKvShared<Config>*>(split_kv_shared_bytes);
    const int warp =
        __shfl_sync(~0u, threadIdx.x / 32, 0);  // so that the compiler knows it to be warp-uniform
    const uint3 index = grid_index(launch.partial);
    const int32_t kv_head = index.x;
    int32_t sequence = index.y, split = index.z;
    const bool combines =
        launch.policy == SplitPolicy::by_length ? sequence >= launch.num_slots : split >= launch.num_splits;
    const FixedSplits<Config> fixed_splits(launch.max_fixed_splits_log2);
    [[maybe_unused]] const EndBehindNumbers<kServesParts> end(launch, index);
    VisibleBlocks& visible = shared.visible[warp];
    const bool length_first = kChosen || launch.length_first;
    int32_t length = 0;  // the value in seq_lens
    int32_t num_blocks = 0, num_splits = 0,
            first_partial = (sequence * gridDim.x + kv_head) * launch.num_splits;
    WarpBlocks own{split + launch.num_splits * warp, 0, launch.num_splits * Config::kWarps};
    FixedShare fixed;
    KeyRange keys{0, 0};                                    // keys that some query sees
    const bool has_window = kChosen || p.window_left >= 0;  // implies length_first
    using Sequence = std::conditional_t<kChosen, ChosenSequence, SplitKvSequence>;
    Sequence seq;
    // Returns the blocks that the queries see. Call it when the length is known.
    auto visible_blocks = [&] {
        if (!has_window) return VisibleBlocks::all<Config::kBlockKeys>(SplitKvSequence::seqlen_k(p, length));
        if constexpr (kChosen) {
            return seq.template choose<Config::kBlockKeys>(p, launch.pages, sequence, kv_head, length);
        } else {
            seq = Sequence::make(p, sequence);
            seq.set_length(p, sequence, length);
            return VisibleBlocks::of<Config::kBlockKeys>(seq.seq);
        }
    };
    // Translates shares of the visible blocks into places in the sequence. Call it when this CTA's share of
    // the blocks is known.
    auto place_blocks = [&](const VisibleBlocks& blocks) {
        int32_t num_keys = SplitKvSequence::seqlen_k(p, length);
        if constexpr (kChosen) num_keys = seq.list.num_keys;
        keys = blocks.keys(num_keys);
        if (!has_window) return;
        own.first = blocks.place(own.first);
        own.end = own.end > 0 ? blocks.place(own.end - 1) + 1 : 0;
        if (!kGaps || !launch.pages.has_gap) return;
        if (threadIdx.x % 32 == 0) visible = blocks;
        __syncwarp();
    };
    if constexpr (kFixed) {
        VisibleBlocks blocks = VisibleBlocks::all<Config::kBlockKeys>(p.seqlen_k);  // as if it were full
        if (length_first) {
            if (launch.waits_first) ptx::wait_for_previous_grid();
            length = ptx::load_relaxed(p.seq_lens.at(sequence));
            blocks = visible_blocks();
        }
        num_blocks = blocks.count;
        fixed = FixedShare::of(fixed_splits, max(num_blocks, 1), split, warp);
        num_splits = fixed.num_splits;
        own = {fixed.first, min(fixed.end, num_blocks), 1};
        if (length_first) {
            if (combines ? num_splits == 1 : split >= num_splits) return;
            place_blocks(blocks);
        }
    }

    // Combiners let the next kernel start now. Other CTAs do so after their last read: if released earlier,
    // the next kernel's CTAs pile up, two on some SMs and none on others.
    if (combines) ptx::launch_dependents();
    prefetch_params<Config>(params);
    const BlockCopier<T, Config> rows(p, launch.codes);
    const QueryCopier<T, Config> query_copier(p, launch.group_size, rows, kv_head, warp);
    PageIds<T, Config, kGaps, kChosen> page_ids(p, launch.pages, rows);
    page_ids.enter(kv_head);
    if constexpr (kChosen) page_ids.choose(seq.list.pages);
    if (kFixed || !length_first) page_ids.start(sequence, own.first, own.stride, visible);
    WarpAttention<T, Config, Sequence, kFixed, kChosen> state(p, launch.group_size, launch.codes, seq);
    const QueryRows<Config> queries{ptx::shared_address(shared.queries)};
    const uint32_t tiles = ptx::shared_address(shared.warps[warp].blocks.tiles);
    // A kernel that this one runs beside lets it start only when what it reads is there.
    // Combiners look at words which an earlier kernel may have left in the workspace.
    if (launch.waits_first || (combines && launch.waits_for_new)) ptx::wait_for_previous_grid();
    if constexpr (kServesParts) {
        if (OCTAVO_RARE(launch.serves_a_part) && p.served_queries(sequence) == 0) return;
    }

    if (!length_first) {
        length = ptx::load_relaxed(p.seq_lens.at(sequence));  // first used after page ids are asked for
    } else if (!kFixed) {
        if (launch.policy == SplitPolicy::by_length) {
            prefetch_page_table(p, launch.pages.page_size);
            const int32_t combiner = sequence - launch.num_slots;
            const LengthShare share =
                combines ? LengthShare::of_sequence<Config>(p, launch, combiner / launch.combiners_per_item)
                         : LengthShare::of_slot<Config>(p, launch, sequence);
            if (share.sequence >= p.batch) return;
            split =
                combines ? launch.num_splits + combiner % launch.combiners_per_item : sequence - share.first;
            sequence = share.sequence;
            length = share.length;
            num_splits = share.num_splits;
            first_partial = kv_head * launch.num_slots + share.first;
        } else {
            length = ptx::load_relaxed(p.seq_lens.at(sequence));
        }
        const VisibleBlocks blocks = visible_blocks();
        num_blocks = blocks.count;
        if (launch.policy != SplitPolicy::by_length) num_splits = launch.num_splits_of(num_blocks);
        if (combines ? num_splits == 1 : split >= num_splits) return;
        own = {split + num_splits * warp, num_blocks, num_splits * Config::kWarps};
        place_blocks(blocks);
        page_ids.start(sequence, own.first, own.stride, visible);
    }
    if (!combines) page_ids.ask();
    if (!has_window) seq = Sequence::make(p, sequence);
    if (!combines && !launch.waits_for_new) query_copier.copy(queries, seq.seq, sequence);
    ptx::cp_async_commit();
    if (!has_window) seq.set_length(p, sequence, length);
    if (!length_first) {
        keys.end = seq.seq.see.seqlen_k;
        const int32_t all_blocks = VisibleBlocks::all<Config::kBlockKeys>(keys.end).count;
        if constexpr (kFixed) {
            if (all_blocks != num_blocks) {  // the length is not the one that was assumed
                fixed = FixedShare::of(fixed_splits, max(all_blocks, 1), split, warp);
                num_splits = fixed.num_splits;
                if (fixed.first != own.first) {
                    own.first = fixed.first;
                    page_ids.start(sequence, own.first, own.stride, visible);
                    if (!combines) page_ids.ask();
                }
            }
            own.end = min(fixed.end, all_blocks);
        } else {
            num_splits = max(1, min(all_blocks, launch.num_splits));  // one split writes an empty result
            own.end = all_blocks;
        }
        num_blocks = all_blocks;
    }
    const Item item{sequence, kv_head, 0, num_blocks};
    const OutputWriter<T, Sequence> writer(p, launch.group_size, seq);
    const SplitKvCombine<T, Config, Sequence, kFixed> combine(writer, launch, shared, item, first_partial);
    if (!combines) {
        if (split >= num_splits)
            return ptx::cp_async_wait<0>();  // before another CTA gets this shared memory

        // A warp copies tiles of keys and of values in turn, each in a cp.async group of its own. A tile is
        // copied to `place`, where the tile that was used last lies; the tile that is used next follows it.
        constexpr int kAhead = Config::kTiles - 1;
        auto keys_at = [&](int place) { return KeyRows<Config>{tiles + place * 16 * Config::kTileChunks}; };
        auto values_at = [&](int place) {
            return ValueRows<Config>{tiles + place * 16 * Config::kTileChunks};
        };
        auto next = [](int place) { return place + 1 == Config::kTiles ? 0 : place + 1; };
        typename decltype(state)::BlockWeights weights;
        int place = 0;
        ScaleRing<Config> scales(shared.warps[warp]);
        int32_t copied = own.first, used = own.first - kAhead / 2 * own.stride;
        // With static_past, the first block that holds a key of this call's tokens.
        const int32_t first_new =
            launch.waits_for_new ? (seq.seq.see.seqlen_k - seq.seq.seqlen_q) / Config::kBlockKeys : INT32_MAX;
#pragma unroll 1
        do {
            const bool copies = copied < own.end, uses = used >= own.first && used < own.end;
            typename BlockCopier<T, Config>::Place lies{};
            if (copies) {
                if (copied >= first_new) ptx::wait_for_previous_grid();
                lies = page_ids.next(copied, keys, visible, [&](int32_t from) {
                    if (from * int64_t{Config::kBlockKeys} < keys.end) page_ids.ask_from(from, visible);
                });
                rows.copy_keys(keys_at(place), scales.next(), lies);
            }
            ptx::cp_async_commit();
            place = next(place);
            scales.advance();
            if (uses) {
                ptx::cp_async_wait<kAhead>();
                __syncwarp();  // every lane's copies have arrived
                state.add_keys(weights, keys_at(place), scales.next(), used * Config::kBlockKeys);
                __syncwarp();  // every lane is done with the tile
            }
            if (copies) rows.copy_values(values_at(place), lies);
            ptx::cp_async_commit();
            place = next(place);
            if (uses) {
                ptx::cp_async_wait<kAhead>();
                __syncwarp();  // every lane's copies have arrived
                state.add_values(weights, values_at(place));
                __syncwarp();
            }
            if (kGaps && OCTAVO_RARE(launch.pages.has_gap)) {
                copied = visible.past_gap(copied, copied + own.stride);
                used = uses ? visible.past_gap(used, used + own.stride) : used + own.stride;
            } else {
                copied += own.stride;
                used += own.stride;
            }
            if (used == own.first) {  // once, while the first copies are in flight
                state.begin(item, queries);
                state.reset();
                if (launch.waits_for_new) {
                    ptx::wait_for_previous_grid();
                    query_copier.copy(queries, seq.seq, sequence);
                    ptx::cp_async_commit();
                }
                combine.prepare();
                if (launch.waits_for_new) {
                    ptx::cp_async_wait<0>();
                } else {
                    ptx::cp_async_wait<kAhead>();
                }
                __syncthreads();  // the queries have arrived
                state.load_queries();
            }
        } while (used < own.end || used < own.first);
        ptx::launch_dependents();
        state.finish();
        state.leave(shared.warps[warp].partial);
        __syncthreads();  // all partial results are there
        const int num_warps = kFixed ? fixed.num_warps : Config::kWarps;
        combine.combine_warps(split, num_warps, num_splits == 1);
        if (!kFixed && launch.beside != Beside::nothing && index.y >= launch.first_that_waits)
            ptx::wait_for_previous_grid();
        if (kFixed || launch.combiners_per_item > 0 || split < num_splits - 1) return;
    } else {
        combine.prepare();
        __syncthreads();
    }
    if (num_splits > 1) {  // as a combiner, or as the item's last split
        combine.combine_splits(max(split - launch.num_splits, 0), max(launch.combiners_per_item, 1),
                               num_splits, fixed.splits_of_subtotal);
    }
}

}  // namespace octavo::cuda
