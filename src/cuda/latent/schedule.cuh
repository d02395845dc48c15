// The schedule of Hopper's kernels for batches (stream-K): all tiles of keys are divided into equal runs, or
// runs that take equally long, wherever sequences end, and a CTA finds its run on the device from the lengths
// alone. But where all sequences are alike, and that leaves few SMs idle, runs end where sequences end.
//
//     sequences |------- 0 -------|--- 1 ---|-------------- 2 --------------|- 3 -|
//     runs      |      0      |      1      |      2      |      3      |     4     |
//
// A CTA works on the last sequence of its run first. So what the CTA of a later run waits for in
// latent_decode is known early, unless one sequence takes all of a run, and the sums of the sequence that a
// CTA completes are in registers when its partial results have arrived.
//
// If a sequence has several tiles of rows, a run has a CTA for each of them: the CTAs of a run read the same
// keys at about the same time.
#pragma once

#include "cuda/latent/parameters.h"
#include "cuda/latent/plan.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/warp.cuh"
#include "params/latent_attention_params.h"

#include <cstdint>

namespace octavo::cuda {

// A run's tiles of one sequence: [begin, end) of the sequence's `count` tiles.
struct LatentSegment {
    int32_t sequence;
    int32_t begin, end, count;
    int32_t end_key;  // the last query sees the keys below this one
};

// A run: its units, and how those of the batch, or of each sequence, are divided.
struct LatentRun {
    int32_t index, begin, end;
    int32_t size, larger;       // units of a run; the first `larger` runs have one more. 0: whole sequences
    int32_t runs_per_sequence;  // if each sequence has runs of its own
};

// What the threads of a CTA share to find their run.
struct alignas(16) LatentScheduleShared {
    int32_t unit_ends[kMaxLatentScheduleBatch];  // units up to the end of each sequence (LatentSchedule)
    int32_t end_keys[kMaxLatentScheduleBatch];   // the last query of a sequence sees the keys below this one
    int32_t warp_sums[kLatentScheduleThreads / 32];
    LatentRun run;  // in registers it would be too much
};
static_assert(sizeof(LatentScheduleShared) == kLatentScheduleBytes);

// Of tiles of kKeys keys. To begin with a sequence and to end with it takes as long as kCost tiles, so that
// what is divided are units: of each sequence kCost units, and then its tiles, one each. A run that would
// begin or end at or among the former does so where the sequence begins. A run has at least kMinTiles units,
// but for what it loses by that.
template <int kKeys, int kMinTiles, int kCost>
class LatentSchedule {
  public:
    // Finds run `run` of `num_runs`. All threads of the CTA construct it together.
    __device__ LatentSchedule(const LatentAttentionParams& p, LatentScheduleShared& shared, int32_t run,
                              int32_t num_runs)
        : p_(p), shared_(shared) {
        const int32_t batch = p.batch;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        int32_t total = 0;
        bool is_uniform = true;
        for (int32_t base = 0; base < batch; base += kLatentScheduleThreads) {
            const int32_t b = base + static_cast<int32_t>(threadIdx.x);
            const int32_t own = b < batch ? note_sequence(b) : 0;
            int32_t end = inclusive_sum(own);
            if (lane == 31) shared.warp_sums[warp] = end;
            __syncthreads();
            int32_t all = 0;
#pragma unroll
            for (int w = 0; w < kLatentScheduleThreads / 32; ++w) {
                const int32_t sum = shared.warp_sums[w];
                if (w < warp) end += sum;
                all += sum;
            }
            if (b < batch) shared.unit_ends[b] = total + end;
            total += all;
            // Nobody may read the first sequence's end yet, but all tiles of a batch that is uniform tell.
            const int32_t expected =
                base == 0 ? all / min(batch, kLatentScheduleThreads) : shared.unit_ends[0];
            is_uniform = __syncthreads_and(is_uniform && (b >= batch || own == expected));
        }
        if (warp == 0) {
            const LatentRun found = find_run(run, num_runs, total, is_uniform);
            if (lane == 0) shared.run = found;
        }
        __syncthreads();
    }

    __device__ bool is_empty() const { return shared_.run.begin == shared_.run.end; }
    __device__ int32_t num_tiles() const {
        static_assert(kCost == 0, "the run has other units, too");
        return shared_.run.end - shared_.run.begin;
    }

    // The segment with the last tile of the run. All lanes of a warp call this together.
    __device__ LatentSegment last() const {
        return segment_of(ptx::uniform(sequence_of(shared_.run.end - 1)));
    }
    // The segment before that of a sequence; there is one if that is not the first.
    __device__ LatentSegment before(int32_t sequence) const {
        int32_t b = sequence - 1;
        while (begin_of_sequence(b) == shared_.unit_ends[b]) --b;  // it has no queries
        return segment_of(b);
    }
    __device__ bool is_first(int32_t sequence) const {
        return begin_of_sequence(sequence) <= shared_.run.begin;
    }
    // The place of this run among those that have tiles of a sequence, whose tiles it has from `begin` on.
    __device__ int32_t place_of(int32_t sequence, int32_t begin) const {
        if (shared_.run.runs_per_sequence > 0)
            return shared_.run.index - sequence * shared_.run.runs_per_sequence;
        if (begin == 0) return 0;  // always so where a run has whole sequences
        const int32_t first = begin_of_sequence(sequence) + kCost, size = shared_.run.size;
        const int32_t larger = shared_.run.larger, in_larger = larger * (size + 1);
        return shared_.run.index -
               (first < in_larger ? first / (size + 1) : larger + (first - in_larger) / size);
    }

  private:
    // Notes where a sequence's keys end, and returns the number of its units. A sequence without keys still
    // has one tile, which writes its empty result.
    __device__ int32_t note_sequence(int32_t b) {
        const LatentSequence sequence = LatentSequence::make(p_, b);
        if (sequence.seqlen_q == 0) return shared_.end_keys[b] = 0;
        const int32_t end_key = min(sequence.end_key(p_.causal, sequence.seqlen_q - 1), sequence.seqlen_k);
        shared_.end_keys[b] = end_key;
        return max((end_key + kKeys - 1) / kKeys, 1) + kCost;
    }
    // Finds the run of this index. All lanes of a warp call this together.
    __device__ LatentRun find_run(int32_t index, int32_t num_runs, int32_t total, bool is_uniform) const {
        if (total == 0) return {index};
        const int32_t batch = p_.batch, each = total / batch;  // units of a sequence, if all are alike
        const int32_t most = max((each - kCost) / kMinTiles, 1), runs = min(num_runs / batch, most);
        const int32_t sequences = (batch + num_runs - 1) / num_runs;
        if (is_uniform && runs > 0 && (runs == most || 8 * batch * runs >= 7 * num_runs)) {
            // Each sequence has as many runs of its own.
            const int32_t sequence = index / runs;
            LatentRun run{index};
            if (sequence < batch)
                run = share(each - kCost, runs, index, sequence * runs, sequence * each + kCost);
            run.runs_per_sequence = runs;
            return run;
        }
        if (is_uniform && runs == 0 && 8 * batch >= 7 * sequences * num_runs) {
            // Each run has as many whole sequences.
            return {index, min(index * sequences, batch) * each, min((index + 1) * sequences, batch) * each};
        }
        const int32_t num_shares = min(num_runs, max(total / kMinTiles, 1));
        // As operand of a conditional operator, LatentRun{index} is left without its other members by
        // nvcc 13.0.
        if (index >= num_shares) return {index};
        return share(total, num_shares, index, 0, 0);
    }
    // Of `total` units, from `begin` on, divided into `count` runs from `first` on, the run of this index.
    // The first few have one unit more than the rest.
    __device__ LatentRun share(int32_t total, int32_t count, int32_t index, int32_t first,
                               int32_t begin) const {
        const int32_t size = total / count, larger = total - size * count, i = index - first;
        return {index,
                past_cost(begin + i * size + min(i, larger)),
                past_cost(begin + (i + 1) * size + min(i + 1, larger)),
                size,
                larger,
                0};
    }
    // Where a run begins or ends that would do so at `unit`.
    __device__ int32_t past_cost(int32_t unit) const {
        if (kCost == 0 || unit == 0) return unit;
        const int32_t begin = begin_of_sequence(sequence_of(unit - 1));
        return unit - begin <= kCost ? begin : unit;
    }
    // The sequence of a unit. All lanes of a warp call this together.
    __device__ int32_t sequence_of(int32_t unit) const {
        const int32_t lane = threadIdx.x % 32;
        const auto ended = [&](int32_t b) { return shared_.unit_ends[min(b, p_.batch - 1)] <= unit; };
        const int32_t base = 32 * __popc(__ballot_sync(~0u, ended(32 * lane + 31)));
        return base + __popc(__ballot_sync(~0u, base + lane < p_.batch && ended(base + lane)));
    }
    __device__ int32_t begin_of_sequence(int32_t b) const { return b == 0 ? 0 : shared_.unit_ends[b - 1]; }
    __device__ LatentSegment segment_of(int32_t b) const {
        const int32_t first = begin_of_sequence(b), last = shared_.unit_ends[b];
        return {b, max(shared_.run.begin - first - kCost, 0), min(shared_.run.end, last) - first - kCost,
                last - first - kCost, shared_.end_keys[b]};
    }

    const LatentAttentionParams& p_;
    LatentScheduleShared& shared_;
};

}  // namespace octavo::cuda
