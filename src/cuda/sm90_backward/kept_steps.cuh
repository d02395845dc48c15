// The steps of a tile of keys where a mask hides blocks. The loader finds the queries that look at some of
// the keys, and says beside the slots of each step which they are.
#pragma once

#include "common/query_range.h"
#include "cuda/sm90_backward/shared.cuh"

namespace octavo::cuda {

// The bits of a part's flags: one for each warpgroup at some of whose keys its queries look, and whether some
// of them do not see some of the CTA's keys for another reason.
struct Sm90KeptFlags {
    static constexpr uint8_t kMasked = 4;
    __device__ static constexpr uint8_t kept(int group) { return static_cast<uint8_t>(1 << group); }
    // The same bit of all parts, in the flags of a step.
    template <class Config>
    __device__ static constexpr uint32_t of_step(uint8_t flag) {
        return flag * (Config::kParts > 1 ? 0x0101u : 1u);
    }
    static constexpr uint32_t kLast = 1u << 24;
};

// Finds the steps; the loader's warp calls together. Where a step has two parts of queries, these lie
// wherever some look at the keys, and most of them look at the keys of the same warpgroups.
template <class Config>
class Sm90KeptStepFinder {
    using Flags = Sm90KeptFlags;

  public:
    int32_t index;

    __device__ Sm90KeptStepFinder(const AttentionBackwardParams& p, const Sm90BackwardLaunch& plan,
                                  const Sm90BackwardWork<Config>& work, Sm90BackwardShared<Config>& shared,
                                  int32_t begin)
        : index(begin),
          p_(p),
          plan_(plan),
          work_(work),
          shared_(shared),
          head_(work.num_steps > 0 ? work.kv_head * work.group_size : heads_end()),
          tile_(work.first_tile),
          found_(begin * Config::kParts) {
        const int32_t begin_of_keys = lane() % Config::kConsumers * 64;
        const int32_t first_key = work.first_key + begin_of_keys,
                      num_keys = min(work.num_keys - begin_of_keys, 64);
        const QueryRange queries(work.seq.see, work.seq.seqlen_q, first_key, first_key + max(num_keys, 1));
        const bool any = num_keys > 0 && queries.begin < queries.end;
        tiles_begin_ = queries.begin / Config::kPartQueries;
        tiles_end_ = any ? (queries.end - 1) / Config::kPartQueries + 1 : 0;
        find();
    }

    // Whether there is a step that was not published yet.
    __device__ bool is_left() const { return index * Config::kParts < found_; }

    // Whether there is one is all that is known.
    __device__ int32_t left() const { return is_left() ? INT32_MAX : 0; }

    // Completes what was found of this step, and finds the next one. Then advance() follows.
    __device__ void publish() {
        Sm90KeptStep<Config>& step = shared_.kept.step(index);
        if (Config::kParts > 1 && found_ == index * Config::kParts + 1) {  // it has no second part
            if (lane() == 0) {
                step.parts[1] = step.parts[0];
                step.flags[1] = 0;
            }
            ++found_;
        }
        ++index;
        find();
        --index;
        if (lane() == 0) step.flags[3] = found_ <= (index + 1) * Config::kParts;
        __syncwarp();
    }
    __device__ void advance(const Sm90BackwardWork<Config>&) { ++index; }
    __device__ uint32_t stage() const { return static_cast<uint32_t>(index) % Config::kStages; }
    __device__ uint32_t parity() const { return static_cast<uint32_t>(index) / Config::kStages % 2; }

    // Of the published step.
    __device__ int32_t head_of(int part) const { return shared_.kept.step(index).parts[part].head; }
    __device__ int32_t first_query(int part) const {
        return shared_.kept.step(index).parts[part].first_query;
    }

  private:
    __device__ static int32_t lane() { return static_cast<int32_t>(threadIdx.x % 32); }
    __device__ int32_t heads_end() const { return (work_.kv_head + 1) * work_.group_size; }

    // Finds the parts of the step `index`, if there are as many.
    __device__ void find() {
        while (found_ < (index + 1) * Config::kParts && head_ < heads_end()) {
            look();
            tile_ += 32;
            if (tile_ >= work_.first_tile + work_.num_tiles) {
                tile_ = work_.first_tile;
                ++head_;
            }
        }
    }
    // Looks at 32 tiles of kPartQueries of a head, one a lane, and appends those that are kept.
    __device__ void look() {
        const int32_t tile = tile_ + lane(), first_query = tile * Config::kPartQueries;
        uint8_t kept = 0;
#pragma unroll
        for (int group = 0; group < Config::kConsumers; ++group) {
            const int32_t begin = __shfl_sync(~0u, tiles_begin_, group);
            const int32_t end = __shfl_sync(~0u, tiles_end_, group);
            if (tile >= begin && tile < end &&
                p_.block_mask.sees(work_.batch, head_, first_query, work_.first_key + 64 * group))
                kept |= Flags::kept(group);
        }
        // First those that both warpgroups take; then steps for one of them and for the other in turn, so
        // that both have work.
        static_assert(Config::kConsumers == 2);
        const uint32_t of_first = __ballot_sync(~0u, kept == Flags::kept(0));
        const uint32_t of_second = __ballot_sync(~0u, kept == Flags::kept(1));
        const uint32_t of_both = __ballot_sync(~0u, kept == (Flags::kept(0) | Flags::kept(1)));
        auto before = [](uint32_t lanes) { return __popc(lanes & ((1u << lane()) - 1)); };
        const int32_t begin = found_ + __popc(of_both), is_open = begin % Config::kParts;
        int32_t place = found_ + before(of_both);
        if (kept == Flags::kept(0)) {
            const int32_t i = before(of_first), step = (i + is_open) / Config::kParts;
            place = begin + i + min(__popc(of_second), step * Config::kParts);
        } else if (kept == Flags::kept(1)) {
            const int32_t i = before(of_second), step = i / Config::kParts;
            place = begin + i + min(__popc(of_first), (step + 1) * Config::kParts - is_open);
        }
        found_ = begin + __popc(of_first) + __popc(of_second);
        if (kept != 0) {
            Sm90KeptStep<Config>& step = shared_.kept.step(place / Config::kParts);
            const bool masked = tile < work_.whole_begin || tile >= work_.whole_end;
            step.parts[place % Config::kParts] = {
                head_, first_query,
                head_ * static_cast<int32_t>(plan_.num_rows / Config::kPartQueries) + work_.workspace_tile +
                    tile};
            step.flags[place % Config::kParts] = kept | (masked ? Flags::kMasked : 0);
        }
        __syncwarp();
    }

    const AttentionBackwardParams& p_;
    const Sm90BackwardLaunch& plan_;
    const Sm90BackwardWork<Config>& work_;
    Sm90BackwardShared<Config>& shared_;
    int32_t head_, tile_;              // where it looks next
    int32_t found_;                    // parts, counted as if all steps before had kParts
    int32_t tiles_begin_, tiles_end_;  // the tiles that see keys of warpgroup lane() % kConsumers
};

// The steps as consumers read them.
template <class Config>
class Sm90KeptWalk {
    using Flags = Sm90KeptFlags;

  public:
    int32_t index;

    __device__ Sm90KeptWalk(const Sm90BackwardShared<Config>& shared, int32_t begin)
        : index(begin), shared_(shared) {}

    __device__ bool is_left() const { return !(before_ & Flags::kLast); }
    // Once its queries have arrived.
    __device__ void read() { flags_ = *reinterpret_cast<const uint32_t*>(step().flags); }
    __device__ void advance(const Sm90BackwardWork<Config>&) {
        before_ = flags_;
        ++index;
    }
    __device__ uint32_t stage() const { return static_cast<uint32_t>(index) % Config::kStages; }
    __device__ uint32_t parity() const { return static_cast<uint32_t>(index) / Config::kStages % 2; }

    __device__ int32_t first_query(int part) const { return step().parts[part].first_query; }
    __device__ bool keeps(int part, int group) const { return flags_ >> (8 * part) & Flags::kept(group); }
    // Whether some of its queries look at keys of this warpgroup.
    __device__ bool keeps_any(int group) const { return flags_ & kept(group); }
    __device__ bool is_masked(const Sm90BackwardWork<Config>&, int group) const {
        return (flags_ & (kept(group) | Flags::of_step<Config>(Flags::kMasked))) != kept(group);
    }
    // Whether some queries of the step before looked at them.
    __device__ bool kept_any_before(int group) const { return before_ & kept(group); }
    // Where dQ goes that this warpgroup computes: one of two parts, or its columns of the only one.
    __device__ int32_t place(const Sm90BackwardLaunch&, const Sm90BackwardWork<Config>&, int group) const {
        return step().parts[Config::kParts > 1 ? group : 0].place;
    }

  private:
    __device__ static uint32_t kept(int group) { return Flags::of_step<Config>(Flags::kept(group)); }
    __device__ const Sm90KeptStep<Config>& step() const { return shared_.kept.step(index); }

    const Sm90BackwardShared<Config>& shared_;
    uint32_t flags_ = 0, before_ = 0;  // of this step, and of the one before
};

}  // namespace octavo::cuda
