// The schedule of latent_decode (stream-K): every CTA has an equal run of all tiles of keys, wherever
// sequences end, and finds it on the device from the lengths alone. But where all sequences are alike, and
// that leaves few SMs idle, runs end where sequences end.
//
//     sequences |------- 0 -------|--- 1 ---|-------------- 2 --------------|- 3 -|
//     CTAs      |      0      |      1      |      2      |      3      |     4     |
//
// A CTA works on its last sequence first. So what a later CTA waits for is known early, unless one sequence
// takes all of a CTA's run, and the sums of the sequence that it completes are in registers when its partial
// results have arrived.
#pragma once

#include "cuda/latent/parameters.h"
#include "cuda/latent_decode/tiles.cuh"
#include "cuda/warp.cuh"
#include "params/latent_attention_params.h"

#include <cstdint>

namespace octavo::cuda {

// A CTA's tiles of one sequence: [begin, end) of the sequence's `count` tiles.
struct LatentSegment {
    int32_t sequence;
    int32_t begin, end, count;
    int32_t end_key;  // the last query sees the keys below this one
};

template <class Config>
class LatentSchedule {
  public:
    // All threads of the CTA construct it together.
    __device__ LatentSchedule(const LatentAttentionParams& p, LatentDecodeShared<Config>& shared, int32_t cta)
        : shared_(shared), batch_(p.batch), cta_(cta) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        int32_t total = 0;
        bool is_uniform = true;
        for (int32_t base = 0; base < batch_; base += kLatentDecodeThreads) {
            const int32_t b = base + static_cast<int32_t>(threadIdx.x);
            const int32_t own = b < batch_ ? note_sequence(p, b) : 0;
            int32_t end = inclusive_sum(own);
            if (lane == 31) shared.warp_sums[warp] = end;
            __syncthreads();
            int32_t all = 0;
#pragma unroll
            for (int w = 0; w < kLatentDecodeThreads / 32; ++w) {
                const int32_t sum = shared.warp_sums[w];
                if (w < warp) end += sum;
                all += sum;
            }
            if (b < batch_) shared.tile_ends[b] = total + end;
            total += all;
            // Nobody may read the first sequence's end yet, but all tiles of a batch that is uniform tell.
            const int32_t expected =
                base == 0 ? all / min(batch_, kLatentDecodeThreads) : shared.tile_ends[0];
            is_uniform = __syncthreads_and(is_uniform && (b >= batch_ || own == expected));
        }
        find_run(total, is_uniform);
    }

    __device__ bool is_empty() const { return begin_ == end_; }
    __device__ int32_t num_tiles() const { return end_ - begin_; }

    // The segment with the last tile of the run. All lanes of a warp call this together.
    __device__ LatentSegment last() const {
        const int32_t tile = end_ - 1, lane = threadIdx.x % 32;
        const auto ended = [&](int32_t b) { return shared_.tile_ends[min(b, batch_ - 1)] <= tile; };
        const int32_t base = 32 * __popc(__ballot_sync(~0u, ended(32 * lane + 31)));
        return segment_of(base + __popc(__ballot_sync(~0u, base + lane < batch_ && ended(base + lane))));
    }
    // The segment before this one; there is one if this is not the first.
    __device__ LatentSegment before(const LatentSegment& segment) const {
        int32_t b = segment.sequence - 1;
        while (begin_of_sequence(b) == shared_.tile_ends[b]) --b;  // it has no queries
        return segment_of(b);
    }
    __device__ bool is_first(const LatentSegment& segment) const {
        return begin_of_sequence(segment.sequence) <= begin_;
    }
    // The CTA that has the first tile of the segment's sequence.
    __device__ int32_t first_cta(const LatentSegment& segment) const {
        if (ctas_per_sequence_ > 0) return segment.sequence * ctas_per_sequence_;
        if (segment.begin == 0) return cta_;  // always so where a CTA has whole sequences
        const int32_t tile = begin_of_sequence(segment.sequence), in_larger = larger_ * (size_ + 1);
        return tile < in_larger ? tile / (size_ + 1) : larger_ + (tile - in_larger) / size_;
    }

  private:
    // Notes where a sequence's keys end, and returns the number of its tiles. A sequence without keys still
    // has one tile, which writes its empty result.
    __device__ int32_t note_sequence(const LatentAttentionParams& p, int32_t b) {
        const LatentSequence sequence = LatentSequence::make(p, b);
        if (sequence.seqlen_q == 0) return shared_.end_keys[b] = 0;
        const int32_t end_key = min(sequence.end_key(p.causal, sequence.seqlen_q - 1), sequence.seqlen_k);
        shared_.end_keys[b] = end_key;
        return max((end_key + Config::kKeys - 1) / Config::kKeys, 1);
    }
    // Finds this CTA's run of the batch's tiles.
    __device__ void find_run(int32_t total, bool is_uniform) {
        if (total == 0) return;
        const auto num_ctas = static_cast<int32_t>(gridDim.x);
        constexpr int32_t kMinTiles = kLatentDecodeMinKeys / Config::kKeys;
        const int32_t count = total / batch_;  // tiles of each sequence, if all are alike
        const int32_t most = max(count / kMinTiles, 1), ctas = min(num_ctas / batch_, most);
        const int32_t sequences = (batch_ + num_ctas - 1) / num_ctas;
        if (is_uniform && ctas > 0 && (ctas == most || 8 * batch_ * ctas >= 7 * num_ctas)) {
            // Each sequence has as many CTAs of its own.
            ctas_per_sequence_ = ctas;
            const int32_t sequence = cta_ / ctas, place = cta_ - sequence * ctas;
            if (sequence >= batch_) return;
            share(count, ctas);
            begin_ = sequence * count + begin_of(place);
            end_ = sequence * count + begin_of(place + 1);
        } else if (is_uniform && ctas == 0 && 8 * batch_ >= 7 * sequences * num_ctas) {
            // Each CTA has as many whole sequences.
            begin_ = min(cta_ * sequences, batch_) * count;
            end_ = min((cta_ + 1) * sequences, batch_) * count;
        } else {
            const int32_t num_ranges = min(num_ctas, max(total / kMinTiles, 1));
            if (cta_ >= num_ranges) return;
            share(total, num_ranges);
            begin_ = begin_of(cta_);
            end_ = begin_of(cta_ + 1);
        }
    }
    // Divides `total` tiles into `count` shares, of which the first few have one tile more than the rest.
    __device__ void share(int32_t total, int32_t count) {
        size_ = total / count;
        larger_ = total - size_ * count;
    }
    __device__ int32_t begin_of(int32_t i) const { return i * size_ + min(i, larger_); }
    __device__ int32_t begin_of_sequence(int32_t b) const { return b == 0 ? 0 : shared_.tile_ends[b - 1]; }
    __device__ LatentSegment segment_of(int32_t b) const {
        const int32_t first = begin_of_sequence(b), last = shared_.tile_ends[b];
        return {b, max(begin_, first) - first, min(end_, last) - first, last - first, shared_.end_keys[b]};
    }

    LatentDecodeShared<Config>& shared_;
    int32_t batch_, cta_;
    int32_t size_ = 1, larger_ = 0;
    int32_t ctas_per_sequence_ = 0;  // if each sequence has CTAs of its own
    int32_t begin_ = 0, end_ = 0;
};

}  // namespace octavo::cuda
