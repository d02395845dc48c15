// The steps of a tile of keys where a mask hides blocks. The loader finds the queries that look at some of
// the keys, and says beside the slots of each step which they are.
#pragma once

#include "common/query_range.h"
#include "cuda/sm90_backward/shared.cuh"

namespace octavo::cuda {

// What consumers have to know of a step from its begin to its end, in one register.
template <class Config>
struct Sm90StepFlags {
    // The bit of a part of the queries that looks at keys of a warpgroup, and all such bits of the warpgroup.
    __device__ static uint32_t kept(int group, int part) { return 1u << (Config::kParts * group + part); }
    __device__ static uint32_t kept(int group) {
        return ((1u << Config::kParts) - 1) << (Config::kParts * group);
    }
    // Whether some queries do not see some keys of a warpgroup.
    __device__ static uint32_t masked(int group) { return 1u << (8 + group); }
    static constexpr uint32_t kLast = 1u << 16;  // the last step of its tile of keys
};

// Finds the steps; the loader's warp calls together. Where a step has two parts of queries, these lie
// wherever some look at the keys, and most are alike in which warpgroups' keys they look at.
template <class Config>
class Sm90KeptStepFinder {
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
          tile_(work.first_tile) {
#pragma unroll
        for (int group = 0; group < Config::kConsumers; ++group) {
            const int32_t first_key = work.first_key + 64 * group,
                          num_keys = min(work.num_keys - 64 * group, 64);
            const QueryRange queries(work.seq.see, work.seq.seqlen_q, first_key,
                                     first_key + max(num_keys, 1));
            const bool any = num_keys > 0 && queries.begin < queries.end;
            shared.kept.tiles_begin[group] = queries.begin / Config::kPartQueries;
            shared.kept.tiles_end[group] = any ? (queries.end - 1) / Config::kPartQueries + 1 : 0;
        }
        __syncwarp();
        find();
    }

    // Whether there is a step that was not published yet.
    __device__ bool is_left() const { return next_ != end_; }

    // Writes the step to its place, and finds the next one. Then advance() follows.
    __device__ void publish() {
        using Flags = Sm90StepFlags<Config>;
        Sm90KeptStep<Config>& step = shared_.kept.step(index);
        const bool leads = threadIdx.x % 32 == 0;
        uint32_t flags = 0;
        if (leads) {
            bool masked = false;
#pragma unroll
            for (int i = 0; i < Config::kParts; ++i) {
                const bool is_part = next_ + i < end_;
                const Sm90KeptPart part = shared_.kept.part(is_part ? next_ + i : next_);
                step.head[i] = part.head;
                step.first_query[i] = part.tile * Config::kPartQueries;
                step.place[i] = part.head * static_cast<int32_t>(plan_.num_rows / Config::kPartQueries) +
                                work_.workspace_tile + part.tile;
                masked |= part.tile < work_.whole_begin || part.tile >= work_.whole_end;
#pragma unroll
                for (int group = 0; group < Config::kConsumers; ++group)
                    if (is_part && part.kept >> group & 1) flags |= Flags::kept(group, i);
            }
#pragma unroll
            for (int group = 0; group < Config::kConsumers; ++group)
                if (masked || (flags & Flags::kept(group)) != Flags::kept(group))
                    flags |= Flags::masked(group);
        }
        next_ = min(next_ + Config::kParts, end_);
        find();
        if (leads) step.flags = flags | (is_left() ? 0 : Flags::kLast);
    }
    __device__ void advance(const Sm90BackwardWork<Config>&) { ++index; }
    __device__ uint32_t stage() const { return static_cast<uint32_t>(index) % Config::kStages; }
    __device__ uint32_t parity() const { return static_cast<uint32_t>(index) / Config::kStages % 2; }

    // Of the published step.
    __device__ int32_t head_of(int part) const { return shared_.kept.step(index).head[part]; }
    __device__ int32_t first_query(int part) const { return shared_.kept.step(index).first_query[part]; }

  private:
    __device__ int32_t heads_end() const { return (work_.kv_head + 1) * work_.group_size; }

    // Finds the parts of a step, if there are as many.
    __device__ void find() {
        while (end_ - next_ < Config::kParts && head_ < heads_end()) {
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
        const int32_t tile = tile_ + static_cast<int32_t>(threadIdx.x % 32);
        uint32_t kept = 0;
#pragma unroll
        for (int group = 0; group < Config::kConsumers; ++group) {
            if (tile >= shared_.kept.tiles_begin[group] && tile < shared_.kept.tiles_end[group] &&
                p_.block_mask.sees(work_.batch, head_, tile * Config::kPartQueries,
                                   work_.first_key + 64 * group))
                kept |= 1u << group;
        }
#pragma unroll
        for (uint32_t kind = (1u << Config::kConsumers) - 1; kind > 0; --kind) {
            const uint32_t alike = __ballot_sync(~0u, kept == kind);
            const uint32_t before = alike & ((1u << threadIdx.x % 32) - 1);
            if (kept == kind) shared_.kept.part(end_ + __popc(before)) = {head_, tile, kept};
            end_ += __popc(alike);
        }
        __syncwarp();
    }

    const AttentionBackwardParams& p_;
    const Sm90BackwardLaunch& plan_;
    const Sm90BackwardWork<Config>& work_;
    Sm90BackwardShared<Config>& shared_;
    int32_t head_, tile_;         // where it looks next
    int32_t next_ = 0, end_ = 0;  // the parts that were found and are not in a step yet
};

// The steps as consumers read them.
template <class Config>
class Sm90KeptWalk {
    using Flags = Sm90StepFlags<Config>;

  public:
    int32_t index;

    __device__ Sm90KeptWalk(const Sm90BackwardShared<Config>& shared, int32_t begin)
        : index(begin), shared_(shared) {}

    __device__ bool is_left() const { return !(before_ & Flags::kLast); }
    // Once its queries have arrived.
    __device__ void read() { flags_ = step().flags; }
    __device__ void advance(const Sm90BackwardWork<Config>&) {
        before_ = flags_;
        ++index;
    }
    __device__ uint32_t stage() const { return static_cast<uint32_t>(index) % Config::kStages; }
    __device__ uint32_t parity() const { return static_cast<uint32_t>(index) / Config::kStages % 2; }

    __device__ int32_t first_query(int part) const { return step().first_query[part]; }
    __device__ bool keeps(int part, int group) const { return flags_ & Flags::kept(group, part); }
    // Whether some of its queries look at keys of this warpgroup.
    __device__ bool keeps_any(int group) const { return flags_ & Flags::kept(group); }
    __device__ bool is_masked(const Sm90BackwardWork<Config>&, int group) const {
        return flags_ & Flags::masked(group);
    }
    // Whether some queries of the step before looked at them.
    __device__ bool kept_any_before(int group) const { return before_ & Flags::kept(group); }
    // Where dQ goes that this warpgroup computes: one of two parts, or its columns of the only one.
    __device__ int32_t place(const Sm90BackwardLaunch&, const Sm90BackwardWork<Config>&, int group) const {
        return step().place[Config::kParts > 1 ? group : 0];
    }

  private:
    __device__ const Sm90KeptStep<Config>& step() const { return shared_.kept.step(index); }

    const Sm90BackwardShared<Config>& shared_;
    uint32_t flags_ = 0, before_ = 0;  // of the step before, at the end those of the last step
};

}  // namespace octavo::cuda
