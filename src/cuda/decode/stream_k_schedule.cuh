// The schedule of the stream-K kernel: which warp works on which blocks, found on the device from the lengths
// alone.
//
// Work is counted in blocks of keys, in this order: sequences, within a sequence its KV heads, within a head
// its blocks. An item is one KV head of one sequence. CTAs own runs of blocks (stream_k_ranges.cuh), and
// warps own equal runs of their CTA's blocks, wherever items end.
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
template <int kThreads, int kBlockKeys>
class Schedule {
  public:
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
            uniform_ = __all_sync(~0u, lane >= batch_ || blocks_of_head(lane) == ends_[0]);
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
        bool uniform = true;
        for (int32_t b = threadIdx.x; b < batch_; b += kThreads) {
            uniform = uniform && blocks_of_head(b) == ends_[0];
        }
        uniform_ = __syncthreads_and(uniform);
    }

    __device__ int32_t total() const { return total_; }

    __device__ int32_t num_items() const { return batch_ * num_kv_heads_; }
    __device__ int32_t blocks_of_head(int32_t sequence) const { return ends_[sequence] - begin_of(sequence); }
    // How many blocks every item has, if all have equally many; otherwise 0.
    __device__ int32_t uniform_count() const { return uniform_ ? ends_[0] : 0; }

    // Reads the length from shared memory: a load from global memory would wait behind the copies of keys.
    __device__ SequenceSlice slice(int32_t sequence) const {
        return SequenceSlice::make(p_, sequence, lengths_[sequence]);
    }

    // Returns the item that holds `block`. All lanes call this together: they look at 32 sequences at a time.
    __device__ Item find(int32_t block) const {
        const int lane = threadIdx.x % 32;
        const int32_t step = (batch_ + 31) / 32;
        auto done = [&](int32_t sequence) {  // whether it ends before `block`
            return ends_[min(sequence, batch_ - 1)] * num_kv_heads_ <= block;
        };
        int32_t sequence = __popc(__ballot_sync(~0u, done(lane * step + step - 1))) * step;
        if (step > 1) sequence += __popc(__ballot_sync(~0u, lane < step && done(sequence + lane)));
        const int32_t first = begin_of(sequence), count = ends_[sequence] - first;
        const int32_t from_first = block - first * num_kv_heads_;
        const int32_t kv_head = quotient_by_floats(from_first, count);
        const int32_t begin = first * num_kv_heads_ + kv_head * count;
        return {sequence, kv_head, begin, begin + count};
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
    // An item without keys still has one block, which writes its empty result.
    __device__ int32_t count_blocks(int32_t sequence) {
        // Not more than the launcher has planned for.
        lengths_[sequence] = min(SequenceSlice::seqlen_k(p_, sequence), p_.seqlen_k);
        if (p_.cu_seqlens_q && p_.served_queries(sequence) == 0) return 0;
        return max(key_blocks<kBlockKeys>(slice(sequence)).count, 1);
    }

    __device__ int32_t begin_of(int32_t sequence) const { return sequence == 0 ? 0 : ends_[sequence - 1]; }

    const AttentionParams& p_;
    int32_t *lengths_, *ends_;
    int32_t batch_, num_kv_heads_;
    int32_t total_;
    bool uniform_;
};

}  // namespace octavo::cuda
