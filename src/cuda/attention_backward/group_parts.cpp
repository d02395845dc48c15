#include "cuda/attention_backward/group_parts.h"

#include "cuda/attention_backward/tile_order.h"

#include <algorithm>
#include <cmath>

namespace octavo::cuda {
namespace {

// A step is the work for one tile of queries. What it takes to add up parts was fitted to times on an H200.
constexpr double kStepsToAdd = 2, kStepsToAddKeys = 1.0 / 512;
// More parts have to take less than this part of the time, since the estimate is coarse.
constexpr double kMostTime = 0.97;

// How long a launch takes, in steps.
class LaunchTime {
  public:
    LaunchTime(const AttentionBackwardParams& p, const Gpu& gpu, const KeyTileShape& shape)
        : p_(p),
          gpu_(gpu),
          shape_(shape),
          queries_(p.cu_seqlens_q ? static_cast<double>(p.total_q) / p.batch : p.seqlen_q),
          keys_(p.cu_seqlens_k ? static_cast<double>(p.total_k) / p.batch : p.seqlen_k) {}

    double of(int32_t parts) const {
        const double rounds =
            static_cast<double>(shape_.num_tiles) * p_.num_kv_heads * parts / shape_.num_places;
        const double added = parts > 1 ? kStepsToAdd + kStepsToAddKeys * rounds * shape_.keys : 0;
        // Tiles that are alike take whole rounds.
        if (p_.window_right < 0) return std::ceil(rounds) * steps(parts, queries_) + added;
        double most = queries_;  // that see some of a tile of keys
        if (p_.window_left >= 0) most = std::min(most, static_cast<double>(p_.window_left) + shape_.keys);
        const double mean = std::min(queries_ - std::min(queries_, keys_) / 2, most);
        const double all = rounds * steps(parts, mean), longest = steps(parts, most);
        return std::max(all, all * share_before_last_pairs(parts) + longest) + added;
    }

  private:
    double steps(int32_t parts, double queries) const {
        return queries * p_.group_size() / parts / shape_.queries + shape_.steps_of_tile;
    }
    // The part of the work that is done when the last pairs begin, with their longest tiles (TileOrder).
    double share_before_last_pairs(int32_t parts) const {
        const bool packed{p_.cu_seqlens_k};
        TileOrder order{};
        order.tiles = static_cast<int32_t>(packed ? shape_.num_tiles : shape_.num_tiles / p_.batch);
        order.pairs = p_.num_kv_heads * parts * (packed ? 1 : p_.batch);
        order.mix(int64_t{2} * shape_.num_places, gpu_.l2_bytes,
                  std::max<int64_t>(shape_.query_bytes / parts, 1));
        const int64_t tiles_before = int64_t{order.tiles} * (order.pairs - std::max(order.mixed, 1));
        return static_cast<double>(std::max<int64_t>(tiles_before - shape_.num_places, 0)) /
               static_cast<double>(order.num_ctas());
    }

    const AttentionBackwardParams& p_;
    const Gpu& gpu_;
    const KeyTileShape& shape_;
    const double queries_, keys_;  // of a sequence, in the mean
};

}  // namespace

int32_t choose_group_parts(const AttentionBackwardParams& p, const Gpu& gpu, const KeyTileShape& shape) {
    const int32_t group = p.group_size();
    if (group == 1 || p.batch == 0 || shape.num_tiles < p.batch) return 1;
    const LaunchTime time(p, gpu, shape);
    int32_t best = 1;
    for (int32_t parts = 2; parts <= group; ++parts) {
        if (group % parts == 0 && time.of(parts) < kMostTime * time.of(best)) best = parts;
    }
    return best;
}

}  // namespace octavo::cuda
