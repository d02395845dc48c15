// The schedule of the stream-K kernel: which warp works on which blocks, found on the device from the lengths
// alone.
//
// Blocks of keys are counted in this order: sequences, within a sequence its KV heads, within a head its
// blocks. An item is one KV head of one sequence. CTAs own runs of blocks (stream_k_ranges.cuh), and warps
// own runs of their CTA's blocks, wherever items end.
//
// Runs are equal in cost. A block costs 1, and an item kItemCost more, before its first block. Otherwise a
// warp with many short items would be the last one by far. Items cost nothing where all have equally many
// blocks, and so do runs, and where some have none since the launch does not serve their sequences.
//
//     blocks    |0 1 2|3|4 5 6 7 8|
//     cost      |. . . . 0 1 2|. . . . 3|. . . . 4 5 6 7 8|      (an item costs 4)
#pragma once

#include "cuda/decode/item.cuh"
#include "cuda/warp.cuh"
#include "params/attention_params.h"

#include <cstdint>

namespace octavo::cuda {

// Returns a / b where the quotient is small: a division by floats is off by one at most.
__device__ __forceinline__ int32_t quotient_by_floats(int32_t a, int32_t b) {
    const int32_t quotient = static_cast<int32_t>(__fdividef(static_cast<float>(a), static_cast<float>(b)));
    const int32_t rest = a - quotient * b;
    return quotient + (rest >= b ? 1 : (rest < 0 ? -1 : 0));
}

template <int kThreads>
struct ScheduleStorage {
    int32_t lengths[kMaxDecodeBatch];     // seqlen_k of each sequence
    int32_t ends[kMaxDecodeBatch];        // blocks of one head up to the end of each sequence
    int32_t own_ends[kThreads / 32][32];  // the same for a small batch, a copy for each warp
    int32_t own_lengths[kThreads / 32][32];
    int32_t warp_sums[kThreads / 32];
};

// The batch's work. Every thread of the CTA constructs it together.
template <class Config>
class Schedule {
    static constexpr int kThreads = Config::kThreads, kBlockKeys = Config::kBlockKeys;

  public:
    // A place in the order of cost.
    struct CostPlace {
        Item item;
        int32_t block;         // the next block, counted from the item's first
        int32_t item_cost_at;  // where the cost of the item begins
    };

    __device__ Schedule(const AttentionParams& p, ScheduleStorage<kThreads>& storage)
        : p_(p),
          lengths_(storage.lengths),
          ends_(storage.ends),
          batch_(p.batch),
          num_kv_heads_(p.num_kv_heads) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if (batch_ <= 32) {  // each warp does it by itself, so that none waits for another
            lengths_ = storage.own_lengths[warp];
            ends_ = storage.own_ends[warp];
            const int32_t end = inclusive_sum(lane < batch_ ? count_blocks(lane) : 0);
            ends_[lane] = end;
            __syncwarp();
            total_ = __shfl_sync(~0u, end, 31) * num_kv_heads_;
            const int32_t own = lane < batch_ ? blocks_of_head(lane) : ends_[0];
            uniform_ = __all_sync(~0u, own == ends_[0]);
            has_costs_ = !uniform_ && __all_sync(~0u, lane >= batch_ || own > 0);
            return;
        }
        int32_t before = 0;
        for (int32_t base = 0; base < batch_; base += kThreads) {
            const int32_t b = base + static_cast<int32_t>(threadIdx.x);
            int32_t end = inclusive_sum(b < batch_ ? count_blocks(b) : 0);
            if (lane == 31) storage.warp_sums[warp] = end;
            __syncthreads();
            int32_t all = 0;
#pragma unroll
            for (int w = 0; w < kThreads / 32; ++w) {
                const int32_t sum = storage.warp_sums[w];
                if (w < warp) end += sum;
                all += sum;
            }
            if (b < batch_) ends_[b] = before + end;
            before += all;
            __syncthreads();
        }
        total_ = before * num_kv_heads_;
        bool uniform = true, all_served = true;
        for (int32_t b = threadIdx.x; b < batch_; b += kThreads) {
            uniform = uniform && blocks_of_head(b) == ends_[0];
            all_served = all_served && blocks_of_head(b) > 0;
        }
        uniform_ = __syncthreads_and(uniform);
        has_costs_ = !uniform_ && (!p.cu_seqlens_q || __syncthreads_and(all_served));
    }

    // What an item costs besides its blocks, and what all items cost together with them.
    __device__ int32_t item_cost() const { return has_costs_ ? Config::kItemCost : 0; }
    __device__ int32_t total_cost() const { return total_ + item_cost() * num_items(); }

    __device__ int32_t num_items() const { return batch_ * num_kv_heads_; }
    __device__ int32_t blocks_of_head(int32_t sequence) const { return ends_[sequence] - begin_of(sequence); }
    // How many blocks every item has, if all have equally many; otherwise 0.
    __device__ int32_t uniform_count() const { return uniform_ ? ends_[0] : 0; }

    // Reads the length from shared memory: a load from global memory would wait behind the copies of keys.
    __device__ SequenceSlice slice(int32_t sequence) const {
        return SequenceSlice::make(p_, sequence, lengths_[sequence]);
    }

    // Returns the item that holds `block`. All lanes call this and the next together: they look at 32
    // sequences at a time.
    __device__ Item find(int32_t block) const { return find_cost<0>(block).item; }
    __device__ CostPlace find_cost(int32_t cost) const {
        return has_costs_ ? find_cost<Config::kItemCost>(cost) : find_cost<0>(cost);
    }
    // The cost of all that comes before the item's first block.
    __device__ int32_t cost_before(const Item& item) const {
        return item.begin + item_cost() * (item.sequence * num_kv_heads_ + item.kv_head + 1);
    }

    // The item after this one; there has to be one.
    __device__ Item next(Item item) const {
        if (++item.kv_head < num_kv_heads_) {
            const int32_t count = item.end - item.begin;
            item.begin += count;
            item.end += count;
            return item;
        }
        item.kv_head = 0;
        do {
            ++item.sequence;
        } while (ends_[item.sequence] * num_kv_heads_ ==
                 item.end);  // a sequence without queries, or of another launch, has no blocks
        item.begin = item.end;
        item.end += ends_[item.sequence] - begin_of(item.sequence);
        return item;
    }

  private:
    // The place where the cost so far is `cost`, if an item costs kItemCost. At the end of all, it is the one
    // behind the last item.
    template <int kItemCost>
    __device__ CostPlace find_cost(int32_t cost) const {
        const int lane = threadIdx.x % 32;
        const int32_t step = (batch_ + 31) / 32, last = batch_ - 1;
        auto done = [&](int32_t sequence) {  // whether it ends before that
            const int32_t it = min(sequence, last);
            return (ends_[it] + kItemCost * (it + 1)) * num_kv_heads_ <= cost;
        };
        int32_t sequence = __popc(__ballot_sync(~0u, done(lane * step + step - 1))) * step;
        if (step > 1) sequence += __popc(__ballot_sync(~0u, lane < step && done(sequence + lane)));
        sequence = min(sequence, last);
        const int32_t first = begin_of(sequence), count = ends_[sequence] - first;
        const int32_t first_cost = (first + kItemCost * sequence) * num_kv_heads_;
        const int32_t kv_head = quotient_by_floats(cost - first_cost, count + kItemCost);
        const int32_t begin = first * num_kv_heads_ + kv_head * count;
        const int32_t cost_at = first_cost + kv_head * (count + kItemCost);
        const int32_t block = min(max(cost - cost_at - kItemCost, 0), count);
        return {{sequence, kv_head, begin, begin + count}, block, cost_at};
    }

    // An item without keys still has one block, which writes its empty result.
    __device__ int32_t count_blocks(int32_t sequence) {
        lengths_[sequence] = SequenceSlice::seqlen_k(p_, sequence);
        if (p_.cu_seqlens_q && p_.served_queries(sequence) == 0) return 0;
        return max(key_blocks<kBlockKeys>(slice(sequence)).count, 1);
    }

    __device__ int32_t begin_of(int32_t sequence) const { return sequence == 0 ? 0 : ends_[sequence - 1]; }

    const AttentionParams& p_;
    int32_t *lengths_, *ends_;
    int32_t batch_, num_kv_heads_;
    int32_t total_;
    bool uniform_, has_costs_;
};

}  // namespace octavo::cuda
