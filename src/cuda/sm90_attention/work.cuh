// Which row tile a CTA works on next: the scheduler that hands out the row tiles of a launch.
#pragma once

#include "cuda/ptx/cluster.h"
#include "cuda/sm90_attention/near_ranges.cuh"
#include "cuda/sm90_attention/parameters.h"
#include "cuda/sm90_attention/tiles.h"
#include "cuda/warp.cuh"
#include "params/attention_params.h"

namespace octavo::cuda {

// One row tile, or one split of its keys: heads from `first_head` up to first_head + plan.heads, and queries
// of its sequence from `first_token` on.
struct alignas(16) Sm90Work {
    int32_t batch;  // -1: no more work
    int32_t first_head;
    int32_t first_token;
    int32_t seqlen_q;
    int32_t seqlen_k;
    int32_t prefix_len;
    int32_t q_begin;  // packed arrays: the sequence's first token
    int32_t k_begin;  // likewise; paged ones: see is_split()

    template <class Config>
    __device__ Visibility visibility(const AttentionParams& p) const {
        return {seqlen_k, prefix_len, p.window_left, p.window_right,
                Config::kSinksAndChunks ? p.attention_chunk : FastDivide{}};
    }
    // The same with the bidirectional ranges that matter to queries at positions [first_q_pos, last_q_pos].
    // All lanes of a warp call this together.
    template <class Config>
    __device__ auto with_ranges(const AttentionParams& p, const Visibility& see, int32_t first_q_pos,
                                int32_t last_q_pos) const {
        if constexpr (Config::kRanges) {
            return RangedVisibilityOf<NearRanges>{see, NearRanges(p.ranges, batch, first_q_pos, last_q_pos),
                                                  p.ranges.keep_window_left};
        } else {
            return see;
        }
    }
    // That of the queries from `begin` up to `end`, likewise.
    template <class Config>
    __device__ auto visibility(const AttentionParams& p, int32_t begin, int32_t end) const {
        if constexpr (Config::kRanges) {
            return with_ranges<Config>(p, visibility<Config>(p), q_pos(begin), q_pos(end - 1));
        } else {
            return visibility<Config>(p);
        }
    }
    __device__ Sm90Work from_lane_0() const {
        auto get = [](int32_t x) { return __shfl_sync(~0u, x, 0); };
        return {get(batch),    get(first_head), get(first_token), get(seqlen_q),
                get(seqlen_k), get(prefix_len), get(q_begin),     get(k_begin)};
    }
    // Whether this is split number `split` of the `num_splits` of a row tile, whose partial results lie side
    // by side in the workspace, from number `first_split` on. Only paged arrays have splits, and only packed
    // ones have a first key, so both share a field.
    __device__ bool is_split() const { return k_begin != 0; }
    __device__ int32_t split() const { return k_begin % kMaxSm90Splits; }
    __device__ int32_t num_splits() const { return k_begin / kMaxSm90Splits % kMaxSm90Splits + 1; }
    __device__ int32_t first_split() const { return k_begin / (kMaxSm90Splits * kMaxSm90Splits); }
    __device__ void set_split(int32_t first_split, int32_t num_splits, int32_t split) {
        k_begin = (first_split * kMaxSm90Splits + num_splits - 1) * kMaxSm90Splits + split;
    }
    __device__ int32_t q_pos(int32_t token) const { return seqlen_k - seqlen_q + token; }
    // Keys from here on may be hidden by a tree mask.
    __device__ int32_t tree_begin(const AttentionParams& p) const {
        return p.is_tree(seqlen_q) ? q_pos(0) : INT32_MAX;
    }
    // Which of the 64 keys from `first_key` on the tree mask hides from a query of the sequence, if there is
    // such a query.
    __device__ uint64_t hidden_by_tree(const AttentionParams& p, int32_t token, int32_t first_key) const {
        if (token >= seqlen_q) return 0;
        const int64_t first = p.cu_seqlens_q ? int64_t{q_begin} : int64_t{batch} * p.seqlen_q;
        return octavo::hidden_by_tree(p.tree_word(first + token), q_pos(0), prefix_len, first_key);
    }
    // The index in p.lse of a query of the sequence and a head counted from `first_head`.
    __device__ int64_t lse_place(const AttentionParams& p, int32_t token, int32_t head) const {
        const int64_t begin = p.cu_seqlens_q ? q_begin * p.lse_token_stride : batch * p.lse_batch_stride;
        return begin + token * p.lse_token_stride + (first_head + head) * p.lse_head_stride;
    }
    // The same in p.out.
    __device__ int64_t out_place(const AttentionParams& p, int32_t token, int32_t head) const {
        const int64_t begin = p.cu_seqlens_q ? q_begin * p.out_token_stride : batch * p.out_batch_stride;
        return begin + token * p.out_token_stride + (first_head + head) * p.out_head_stride;
    }
    // How many rows the row tile has.
    template <class Config>
    __device__ int32_t rows(const Sm90Launch& plan) const {
        return min(Config::kTileBlocks * plan.tokens, seqlen_q - first_token) * plan.heads;
    }
};

// Whether a row tile with this number of rows is worked through as few_rows.cuh says.
template <class Config>
__device__ __forceinline__ bool is_few_rows(int32_t rows) {
    return Config::kFewRowTiles > 0 && rows <= 8 * Config::kFewRowTiles;
}

// Which block of 64 rows of a row tile belongs to warpgroup `group` of this CTA. The blocks alternate between
// the CTAs of a pair, so that under a causal mask neither has all of the long ones.
template <class Config>
__device__ __forceinline__ int tile_block(int group) {
    return Config::kCtas == 1 ? group : 2 * group + (static_cast<int>(ptx::cluster_rank()) ^ (group & 1));
}

// Hands out the row tiles of the launch, in order, to whichever cluster asks next. One warp of each cluster
// uses it; all of its lanes call together.
template <class Config>
class Sm90Scheduler {
  public:
    __device__ Sm90Scheduler(const AttentionParams& p, const Sm90Launch& plan)
        : p_(p),
          plan_(plan),
          tile_tokens_(Config::kTileBlocks * plan.tokens),
          units_a_sequence_(p.num_q_heads / plan.heads),
          index_(blockIdx.x / Config::kCtas) {}

    // To be called first: it decides what follows from the lengths of all sequences.
    __device__ void look_at_lengths() {
        static_assert(!kFew || !Config::kSplits);
        if (kFew && p_.cu_seqlens_q) count_row_tiles();
        if (Config::kSplits && plan_.by_length) cut_by_length();
    }

    // The current item: a row tile, or one split of it.
    __device__ Sm90Work work() {
        Sm90Work w{};
        int32_t row_tile = index_;
        if (Config::kSplits && !by_length() && index_ >= plan_.num_whole) {
            const int32_t split = index_ - plan_.num_whole;
            row_tile = plan_.num_whole + split / plan_.num_splits;
            w.set_split(split - split % plan_.num_splits, plan_.num_splits, split % plan_.num_splits);
        }
        if (p_.cu_seqlens_q || by_length()) {
            const int32_t few_before = kFew ? num_few_before(row_tile) : 0;
            const bool few = kFew && row_tile < end_ && num_few_before(row_tile + 1) > few_before;
            const int32_t index = few ? few_before : row_tile - few_before;
            find_sequence(few, index);
            w.batch = __shfl_sync(~0u, batch_, few);
            if (w.batch < 0) return w;
            int32_t items = __shfl_sync(~0u, sequence_items_, few);
            int32_t at = index - __shfl_sync(~0u, before_, few);
            const int32_t splits = splits_of(w.batch);
            if (splits > 1) {
                w.set_split(index - at % splits, splits, at % splits);
                items /= splits;
                at /= splits;
            }
            w.first_head = at % units_a_sequence_ * plan_.heads;
            w.q_begin = p_.cu_seqlens_q ? p_.cu_seqlens_q[w.batch] : 0;
            w.seqlen_q = p_.cu_seqlens_q ? p_.cu_seqlens_q[w.batch + 1] - w.q_begin : p_.seqlen_q;
            w.first_token = few ? w.seqlen_q / tile_tokens_ * tile_tokens_
                                : (items / units_a_sequence_ - 1 - at / units_a_sequence_) * tile_tokens_;
        } else {
            end_ = plan_.num_row_tiles * plan_.num_units;
            w.batch = -1;
            if (row_tile >= end_) return w;
            int32_t first_unit = 0, units = plan_.first_section, at = row_tile;
            if (at >= units * plan_.num_row_tiles) {
                at -= units * plan_.num_row_tiles;
                const int32_t section = at / (plan_.section * plan_.num_row_tiles);
                at -= section * plan_.section * plan_.num_row_tiles;
                first_unit = units + section * plan_.section;
                units = plan_.section;
            }
            const int32_t unit = first_unit + at % units;
            w.batch = unit / units_a_sequence_;
            w.first_head = unit % units_a_sequence_ * plan_.heads;
            w.first_token = (plan_.num_row_tiles - 1 - at / units) * tile_tokens_;
            w.seqlen_q = p_.seqlen_q;
        }
        w.seqlen_k = SequenceSlice::seqlen_k(p_, w.batch);
        if (p_.cu_seqlens_k) w.k_begin = p_.cu_seqlens_k[w.batch];
        w.prefix_len = SequenceSlice::prefix_len(p_, w.batch, w.seqlen_k);
        return w;
    }

    // Asks for another item, which `advance` makes the current one.
    __device__ void request() {
        if (threadIdx.x % 32 == 0) drawn_ = atomicAdd(plan_.counter, 1);
    }
    __device__ void advance() { index_ = num_clusters() + __shfl_sync(~0u, drawn_, 0); }

    // Call it when there is no more work. Every cluster that had work draws one number past the end, so that
    // as many numbers are drawn as there are items. The last cluster to draw resets the counter.
    __device__ void finish() {
        const int32_t drawn = index_ - num_clusters();
        int32_t end = end_;
        if (Config::kSplits && !by_length()) end += max(end_ - plan_.num_whole, 0) * (plan_.num_splits - 1);
        if (drawn >= 0 && drawn == end - 1 && threadIdx.x % 32 == 0) *plan_.counter = 0;
    }

  private:
    static constexpr bool kFew = Config::kFewRowTiles > 0;
    // Rounds, of one row tile of few rows per cluster, that are kept for the end.
    static constexpr int32_t kLateRounds = 2;

    __device__ bool by_length() const { return Config::kSplits && by_length_; }
    __device__ int32_t num_clusters() const { return static_cast<int32_t>(gridDim.x) / Config::kCtas; }

    // How many row tiles sequence b has over all heads, of few rows or of many.
    __device__ int32_t count_row_tiles(int32_t b, bool few) const {
        if (b >= p_.batch) return 0;
        const int32_t length = p_.cu_seqlens_q ? p_.served_queries(b) : p_.seqlen_q;
        const int32_t whole = length / tile_tokens_, rest = length - whole * tile_tokens_;
        const bool few_rest = is_few_rows<Config>(rest * plan_.heads);
        return units_a_sequence_ * (few ? rest > 0 && few_rest : whole + (rest > 0 && !few_rest));
    }
    // How many tiles of keys a row tile of sequence b visits at most.
    __device__ int32_t count_key_tiles(int32_t b) const {
        int64_t keys = SequenceSlice::seqlen_k(p_, b);
        if (p_.window_left >= 0 && p_.window_right >= 0 && !p_.prefix_lens)
            keys = min(keys, int64_t{p_.window_left} + p_.window_right + tile_tokens_);
        return static_cast<int32_t>((keys + Config::kKeys - 1) / Config::kKeys);
    }
    // Decides whether the lengths of the sequences, where they are unlike, order the row tiles, and whether
    // they are cut by them, and into splits of how many tiles of keys. They are cut where the longest one
    // would take much longer than an even share of all work: where lengths are alike, plan.num_splits takes
    // care. More splits cost more together and take longer to combine, but the last one ends earlier; two for
    // each cluster fit well. Whatever their number, splits take as long as some eight tiles more.
    __device__ void cut_by_length() {
        int32_t row_tiles = 0, longest = 0;
        float all = 0.0f;
        for (int32_t b = threadIdx.x % 32; b < p_.batch; b += 32) {
            const int32_t own = count_row_tiles(b, false);
            if (own == 0) continue;
            const int32_t key_tiles = count_key_tiles(b);
            row_tiles += own;
            longest = max(longest, key_tiles);
            all += static_cast<float>(own) * key_tiles;
        }
        row_tiles = __reduce_add_sync(~0u, row_tiles);
        longest = __reduce_max_sync(~0u, longest);
        all = warp_sum(all);
        if (longest == 0) return;
        // Approximate functions: the exact ones are calls, for which registers of consumers would spill.
        const float share = __fdividef(all, num_clusters());
        const float square = fmaxf(3.0f * share, 0.65f * longest);
        const float split_tiles = fmaxf(square * rsqrtf(square), 0.54f * share);
        by_length_ = longest * static_cast<float>(row_tiles) > 1.5f * all && longest > 8;
        if (!by_length_) return;
        const bool is_cut =
            longest > fmaxf(1.25f * share, 1.5f * split_tiles) && longest > fmaxf(share, split_tiles) + 8.0f;
        splits_a_key_tile_ = is_cut ? __fdividef(1.0f, split_tiles) : 0.0f;
        // A row tile that is cut has at most 4/3 as many splits as it has times `split_tiles`, since 1.5
        // rounds to 2. So there are at most 4/3 / 0.54 = 2.5 for each cluster: fewer than
        // kMostSm90SplitsACta.
        for (int32_t b = threadIdx.x % 32; b < p_.batch; b += 32) {
            const int32_t own = count_row_tiles(b, false), splits = splits_of(b);
            if (own == 0) continue;
            end_ += own * splits;
            if (splits == 1) longest_whole_ = max(longest_whole_, count_key_tiles(b));
        }
        end_ = __reduce_add_sync(~0u, end_);
        longest_whole_ = __reduce_max_sync(~0u, longest_whole_);
        orders_ = longest_whole_ > 0.25f * share;
    }
    // How many splits each row tile of sequence b has.
    __device__ int32_t splits_of(int32_t b) const {
        if (!by_length()) return 1;
        return min(max(__float2int_rn(count_key_tiles(b) * splits_a_key_tile_), 1), kMaxSm90Splits);
    }
    // By length, splits are handed out first, and then whole row tiles: the long ones before the short ones,
    // if they are long, in bands, each of which has row tiles of up to 0.7 times the length of the band
    // before. (To look for the next sequence of a band takes time, too.)
    static constexpr int32_t kBands = 7;
    __device__ int32_t band_of(int32_t b, int32_t splits) const {
        if (splits > 1 || !orders_) return splits == 1;
        const float ratio = __fdividef(longest_whole_, count_key_tiles(b));  // may be infinite
        return 1 + static_cast<int32_t>(fminf(2.0f * __log2f(ratio), kBands - 2));
    }
    // How many items of work sequence b is; by length, if it is in the current band.
    __device__ int32_t count_items(int32_t b, bool few) const {
        const int32_t row_tiles = count_row_tiles(b, few);
        if (row_tiles == 0 || !by_length()) return row_tiles;
        const int32_t splits = splits_of(b);
        return band_of(b, splits) == band_ ? row_tiles * splits : 0;
    }
    __device__ void count_row_tiles() {
        int32_t few = 0, many = 0;
        for (int32_t b = threadIdx.x % 32; b < p_.batch; b += 32) {
            few += count_row_tiles(b, true);
            many += count_row_tiles(b, false);
        }
        num_many_ = __reduce_add_sync(~0u, many);
        few = __reduce_add_sync(~0u, few);
        end_ = num_many_ + few;
        const int32_t early = max(few - kLateRounds * num_clusters(), 0);
        few_rate_ = max(static_cast<int32_t>(65536.0f * early / max(num_many_ + early, 1)) - 1, 0);
    }
    // Row tiles of few rows wait for memory, and those of many rows for the tensor cores. So the former are
    // handed out among the latter, except for some that fill the end, since they take less time. Returns how
    // many of the first `index` row tiles have few rows.
    __device__ int32_t num_few_before(int32_t index) const {
        return max(static_cast<int32_t>(int64_t{index} * few_rate_ >> 16), index - num_many_);
    }

    // Moves on to the sequence that holds item `index`, counted among the items of few rows or among those of
    // many; batch_ is -1 past the last one. Lane 1 keeps the place among those of few rows, lane 0 the place
    // among those of many.
    __device__ void find_sequence(bool few, int32_t index) {
        int32_t batch = __shfl_sync(~0u, batch_, few);
        int32_t before = __shfl_sync(~0u, before_, few);
        int32_t sequence_items = __shfl_sync(~0u, sequence_items_, few);
        if (batch >= 0 && index < before + sequence_items) return;
        before += sequence_items;
        for (int32_t base = batch + 1;; base += 32) {
            if (base >= p_.batch) {
                batch = -1;
                if (!by_length() || index >= end_ || ++band_ >= kBands) break;
                base = 0;  // once more, for the next band
            }
            const int32_t items = count_items(base + threadIdx.x % 32, few);
            const int32_t end = inclusive_sum(items);
            const uint32_t past = __ballot_sync(~0u, index < before + end);
            if (past) {
                const int32_t owner = __ffs(past) - 1;
                batch = base + owner;
                sequence_items = __shfl_sync(~0u, items, owner);
                before += __shfl_sync(~0u, end - items, owner);
                break;
            }
            before += __shfl_sync(~0u, end, 31);
        }
        if (batch < 0 && !kFew && !by_length()) end_ = before;
        if (threadIdx.x % 32 == few) {
            batch_ = batch;
            before_ = before;
            sequence_items_ = sequence_items;
        }
    }

    const AttentionParams& p_;
    const Sm90Launch& plan_;
    const int32_t tile_tokens_, units_a_sequence_;
    int32_t index_;
    int32_t drawn_ = 0;
    int32_t end_ = 0;  // items in all, once known
    // Whether row tiles are handed out by the lengths of their sequences, and then how many splits a tile of
    // keys is worth (0: none is cut), how many tiles of keys a row tile that is not cut visits at most,
    // whether these go by bands, and the current band.
    bool by_length_ = false;
    float splits_a_key_tile_ = 0.0f;
    int32_t longest_whole_ = 0;
    bool orders_ = false;
    int32_t band_ = 0;
    // For packed queries: how many row tiles have many rows, and how many in 2^16 row tiles have few. For
    // this lane's kind of items (row tiles, or by length also splits): the current sequence, the number of
    // its items over all heads, and the number of items before it.
    int32_t num_many_ = 0, few_rate_ = 0;
    int32_t batch_ = -1, sequence_items_ = 0, before_ = 0;
};

}  // namespace octavo::cuda
