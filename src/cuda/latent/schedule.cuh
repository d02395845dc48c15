// The schedule of Hopper's kernels for batches (stream-K): all tiles of keys are divided into equal runs,
// wherever sequences end, and a CTA finds its run on the device from the lengths alone. But where all
// sequences are alike, and that leaves few SMs idle, runs end where sequences end.
//
//     sequences |------- 0 -------|--- 1 ---|-------------- 2 --------------|- 3 -|
//     runs      |      0      |      1      |      2      |      3      |     4     |
//
// A CTA works on the last sequence of its run first. So what the CTA of a later run waits for is known early,
// unless one sequence takes all of a run, and the sums of the sequence that a CTA completes are in registers
// when its partial results have arrived.
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

// What the threads of a CTA share to find their run.
struct alignas(16) LatentScheduleShared {
    int32_t tile_ends[kMaxLatentScheduleBatch];  // tiles up to the end of each sequence
    int32_t end_keys[kMaxLatentScheduleBatch];   // the last query of a sequence sees the keys below this one
    int32_t warp_sums[kLatentScheduleThreads / 32];
    // The run: its tiles, and how those of the batch, or of each sequence, are divided. In registers they
    // would be too many.
    int32_t run, begin, end;
    int32_t size, larger;  // of a run, tiles; the first `larger` runs have one more. Unset: whole sequences
    int32_t runs_per_sequence;  // if each sequence has runs of its own
    uint32_t ticket;            // for grid_index
};
static_assert(sizeof(LatentScheduleShared) == kLatentScheduleBytes);

// Of tiles of kKeys keys. A run has at least kMinTiles tiles.
template <int kKeys, int kMinTiles>
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
            if (b < batch) shared.tile_ends[b] = total + end;
            total += all;
            // Nobody may read the first sequence's end yet, but all tiles of a batch that is uniform tell.
            const int32_t expected =
                base == 0 ? all / min(batch, kLatentScheduleThreads) : shared.tile_ends[0];
            is_uniform = __syncthreads_and(is_uniform && (b >= batch || own == expected));
        }
        if (threadIdx.x == 0) find_run(run, num_runs, total, is_uniform);
        __syncthreads();
    }

    __device__ bool is_empty() const { return shared_.begin == shared_.end; }
    __device__ int32_t num_tiles() const { return shared_.end - shared_.begin; }

    // The segment with the last tile of the run. All lanes of a warp call this together.
    __device__ LatentSegment last() const {
        const int32_t tile = shared_.end - 1, lane = threadIdx.x % 32;
        const auto ended = [&](int32_t b) { return shared_.tile_ends[min(b, p_.batch - 1)] <= tile; };
        const int32_t base = 32 * __popc(__ballot_sync(~0u, ended(32 * lane + 31)));
        const int32_t b = base + __popc(__ballot_sync(~0u, base + lane < p_.batch && ended(base + lane)));
        return segment_of(ptx::uniform(b));
    }
    // The segment before that of a sequence; there is one if that is not the first.
    __device__ LatentSegment before(int32_t sequence) const {
        int32_t b = sequence - 1;
        while (begin_of_sequence(b) == shared_.tile_ends[b]) --b;  // it has no queries
        return segment_of(b);
    }
    __device__ bool is_first(int32_t sequence) const { return begin_of_sequence(sequence) <= shared_.begin; }
    // The place of this run among those that have tiles of the segment's sequence.
    __device__ int32_t place_of(const LatentSegment& segment) const {
        if (shared_.runs_per_sequence > 0) return shared_.run - segment.sequence * shared_.runs_per_sequence;
        if (segment.begin == 0) return 0;  // always so where a run has whole sequences
        const int32_t tile = begin_of_sequence(segment.sequence), size = shared_.size;
        const int32_t larger = shared_.larger, in_larger = larger * (size + 1);
        return shared_.run - (tile < in_larger ? tile / (size + 1) : larger + (tile - in_larger) / size);
    }

  private:
    // Notes where a sequence's keys end, and returns the number of its tiles. A sequence without keys still
    // has one tile, which writes its empty result.
    __device__ int32_t note_sequence(int32_t b) {
        const LatentSequence sequence = LatentSequence::make(p_, b);
        if (sequence.seqlen_q == 0) return shared_.end_keys[b] = 0;
        const int32_t end_key = min(sequence.end_key(p_.causal, sequence.seqlen_q - 1), sequence.seqlen_k);
        shared_.end_keys[b] = end_key;
        return max((end_key + kKeys - 1) / kKeys, 1);
    }
    // Finds this run of the batch's tiles. One thread calls it.
    __device__ void find_run(int32_t run, int32_t num_runs, int32_t total, bool is_uniform) {
        shared_.run = run;
        shared_.begin = shared_.end = shared_.runs_per_sequence = 0;
        if (total == 0) return;
        const int32_t batch = p_.batch, count = total / batch;  // tiles of each sequence, if all are alike
        const int32_t most = max(count / kMinTiles, 1), runs = min(num_runs / batch, most);
        const int32_t sequences = (batch + num_runs - 1) / num_runs;
        if (is_uniform && runs > 0 && (runs == most || 8 * batch * runs >= 7 * num_runs)) {
            // Each sequence has as many runs of its own.
            shared_.runs_per_sequence = runs;
            const int32_t sequence = run / runs;
            if (sequence < batch) set_run(count, runs, run - sequence * runs, sequence * count);
        } else if (is_uniform && runs == 0 && 8 * batch >= 7 * sequences * num_runs) {
            // Each run has as many whole sequences.
            shared_.begin = min(run * sequences, batch) * count;
            shared_.end = min((run + 1) * sequences, batch) * count;
        } else {
            const int32_t num_shares = min(num_runs, max(total / kMinTiles, 1));
            if (run < num_shares) set_run(total, num_shares, run, 0);
        }
    }
    // Of `total` tiles, from `first` on, divided into `count` shares, the run is share `i`. The first few
    // have one tile more than the rest.
    __device__ void set_run(int32_t total, int32_t count, int32_t i, int32_t first) {
        const int32_t size = total / count, larger = total - size * count;
        shared_.size = size;
        shared_.larger = larger;
        shared_.begin = first + i * size + min(i, larger);
        shared_.end = first + (i + 1) * size + min(i + 1, larger);
    }
    __device__ int32_t begin_of_sequence(int32_t b) const { return b == 0 ? 0 : shared_.tile_ends[b - 1]; }
    __device__ LatentSegment segment_of(int32_t b) const {
        const int32_t first = begin_of_sequence(b), last = shared_.tile_ends[b];
        return {b, max(shared_.begin, first) - first, min(shared_.end, last) - first, last - first,
                shared_.end_keys[b]};
    }

    const LatentAttentionParams& p_;
    LatentScheduleShared& shared_;
};

}  // namespace octavo::cuda
