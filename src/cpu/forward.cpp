// Attention forward on the CPU: which thread computes what. The arithmetic is in forward_tile.inl.
#include "common/online_softmax.h"
#include "cpu/backend.h"
#include "cpu/kernels.h"
#include "cpu/thread_pool.h"

#include <octavo/build_info.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <memory>
#include <mutex>
#include <vector>

namespace octavo::cpu {
namespace {

TileScratch& thread_scratch() {
    thread_local std::unique_ptr<TileScratch> scratch;
    if (!scratch) scratch = std::make_unique<TileScratch>();
    return *scratch;
}

// Below this many key tiles, a run is not worth its merge.
constexpr int32_t kMinTilesPerSplit = 8;
constexpr int32_t kMaxChosenSplits = 64;

// With fewer items for each thread, heads are not worth keeping together: threads would wait for the last.
constexpr int64_t kItemsPerThread = 4;

// How one sequence is cut: its rows into tiles, the keys of each into `num_splits` runs. The runs of a single
// row tile (decode) are worked on at once; those of several, one after the other in one item. Either way they
// are merged in order. These cuts follow from the sequence alone, and so do the bits of its result.
//
// Where one tile holds the rows of several KV heads, an item takes several: the keys of all heads of a token
// lie side by side, and memory is read along them. How many depends on the threads; the bits do not.
struct SequencePlan {
    RowTile first_tile;  // of the first KV head
    int32_t num_rows;    // of one KV head: seqlen_q * group_size
    int32_t num_row_tiles;
    int32_t num_splits;
    int32_t num_head_runs;
    int64_t first_item;           // among the items of all sequences: [row tiles or splits, num_head_runs]
    int64_t first_split_results;  // likewise; only with parallel splits: [num_head_runs]

    bool parallel_splits() const { return num_row_tiles == 1 && num_splits > 1; }
    int64_t items_per_head_run() const { return parallel_splits() ? num_splits : num_row_tiles; }
};

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// `chosen`: of its KV heads where pages are chosen, or null.
SequencePlan make_plan(const AttentionParams& p, int32_t b, const ChosenKeys* chosen) {
    SequencePlan plan{};
    RowTile& tile = plan.first_tile;
    tile.sequence = RangedSlice::make(p, b);
    tile.batch_index = b;
    tile.group_size = p.group_size();
    plan.num_rows = tile.sequence.seqlen_q * tile.group_size;
    plan.num_row_tiles = static_cast<int32_t>(divide_up(plan.num_rows, kTileRows));
    plan.num_splits = std::max(1, p.num_splits);
    tile.num_rows = std::min(plan.num_rows, kTileRows);
    if (plan.num_row_tiles == 1) {
        int32_t num_key_tiles = 0;  // of the head that has most
        for (int32_t h = 0; h < (chosen ? p.num_kv_heads : 1); ++h) {
            if (chosen) tile.chosen = &chosen[h];
            num_key_tiles = std::max(num_key_tiles, tile.key_tiles().count);
        }
        if (p.num_splits == 0)
            plan.num_splits = std::min(num_key_tiles / kMinTilesPerSplit, kMaxChosenSplits);
        plan.num_splits = std::clamp(plan.num_splits, 1, std::max(1, num_key_tiles));
    }
    return plan;
}

// What the splits of one row tile leave for their merge, kept from the first that begins to the last that
// ends. Items begin in order, so that few tiles keep anything at a time, however big the batch is.
struct SplitResults {
    struct alignas(64) Line {  // of the cache: no vector lies in two of them
        float floats[16];
    };
    std::once_flag begun;
    std::unique_ptr<Line[]> partials;  // [num_splits], each of whole lines
    std::atomic<int32_t> num_finished{0};
};

class Forward {
  public:
    explicit Forward(const AttentionParams& params) : p_(params) {
        plans_.reserve(p_.batch);
        if (p_.chosen_pages) {
            chosen_.reserve(int64_t{p_.batch} * p_.num_kv_heads);
            for (int32_t b = 0; b < p_.batch; ++b)
                for (int32_t h = 0; h < p_.num_kv_heads; ++h) chosen_.push_back(ChosenKeys::make(p_, b, h));
        }
        int64_t num_items_per_head_run = 0, num_split_results = 0;
        for (int32_t b = 0; b < p_.batch; ++b) {
            plans_.push_back(make_plan(p_, b, chosen_of(b)));
            num_items_per_head_run += plans_.back().items_per_head_run();
        }
        const int64_t wanted_head_runs =
            num_items_per_head_run == 0
                ? 1
                : divide_up(kItemsPerThread * get_num_threads(), num_items_per_head_run);
        for (SequencePlan& plan : plans_) {
            plan.num_head_runs = num_head_runs(plan, wanted_head_runs);
            plan.first_item = num_items_;
            plan.first_split_results = num_split_results;
            num_items_ += plan.items_per_head_run() * plan.num_head_runs;
            if (plan.parallel_splits()) num_split_results += plan.num_head_runs;
        }
        if (num_split_results > 0) split_results_.reset(new SplitResults[num_split_results]);
    }

    void run() {
        parallel_for(num_items_, [this](int64_t item) { run_item(item); });
    }

  private:
    // What is chosen for each KV head of a sequence; null: everything.
    const ChosenKeys* chosen_of(int32_t sequence) const {
        return chosen_.empty() ? nullptr : &chosen_[int64_t{sequence} * p_.num_kv_heads];
    }

    int32_t num_head_runs(const SequencePlan& plan, int64_t wanted) const {
        if (plan.num_row_tiles != 1 || p_.chosen_pages) return p_.num_kv_heads;
        const int64_t most_heads = kTileRows / plan.num_rows;
        const int64_t least = divide_up(p_.num_kv_heads, most_heads);
        return static_cast<int32_t>(std::clamp<int64_t>(wanted, least, p_.num_kv_heads));
    }

    // Heads vary fastest: threads that run together read the same tokens. Of the row tiles, the last, which
    // see most under a causal mask, go first.
    void run_item(int64_t item) {
        const SequencePlan& plan =
            *std::prev(std::upper_bound(plans_.begin(), plans_.end(), item,
                                        [](int64_t i, const SequencePlan& s) { return i < s.first_item; }));
        const auto part = static_cast<int32_t>((item - plan.first_item) / plan.num_head_runs);
        const int64_t head_run = (item - plan.first_item) % plan.num_head_runs;
        HeadRun heads{plan.first_tile, 0};
        heads.tile.kv_head = static_cast<int32_t>(p_.num_kv_heads * head_run / plan.num_head_runs);
        heads.count =
            static_cast<int32_t>(p_.num_kv_heads * (head_run + 1) / plan.num_head_runs) - heads.tile.kv_head;
        if (const ChosenKeys* chosen = chosen_of(heads.tile.batch_index))
            heads.tile.chosen = chosen + heads.tile.kv_head;

        if (plan.parallel_splits()) {
            return run_split(plan, heads, part, split_results_[plan.first_split_results + head_run]);
        }
        heads.tile.first_row = (plan.num_row_tiles - 1 - part) * kTileRows;
        heads.tile.num_rows = std::min(kTileRows, plan.num_rows - heads.tile.first_row);
        TileScratch& scratch = thread_scratch();
        Partial result{scratch.out[0], scratch.lse[0]}, next{scratch.out[1], scratch.lse[1]};
        attend(heads, 0, plan.num_splits, result);
        for (int32_t s = 1; s < plan.num_splits; ++s) {
            attend(heads, s, plan.num_splits, next);
            merge(heads, result, next);
        }
        kernels_.store(p_, heads, result);
    }

    void run_split(const SequencePlan& plan, const HeadRun& heads, int32_t split, SplitResults& results) {
        const int64_t out_size = int64_t{heads.num_rows()} * row_stride(p_.head_dim_v);
        const int64_t size = divide_up(out_size + heads.num_rows(), 16);  // in lines
        std::call_once(results.begun,
                       [&] { results.partials.reset(new SplitResults::Line[plan.num_splits * size]); });
        auto partial = [&](int64_t s) {
            float* out = results.partials[s * size].floats;
            return Partial{out, out + out_size};
        };
        attend(heads, split, plan.num_splits, partial(split));
        if (results.num_finished.fetch_add(1, std::memory_order_acq_rel) + 1 < plan.num_splits) return;
        for (int32_t s = 1; s < plan.num_splits; ++s) merge(heads, partial(0), partial(s));
        kernels_.store(p_, heads, partial(0));
        results.partials.reset();
    }

    void attend(const HeadRun& heads, int64_t split, int32_t num_splits, Partial result) const {
        const int64_t count = heads.tile.key_tiles().count;
        kernels_.attend(p_, heads, static_cast<int32_t>(count * split / num_splits),
                        static_cast<int32_t>(count * (split + 1) / num_splits), thread_scratch(), result);
    }

    void merge(const HeadRun& heads, Partial into, Partial other) const {
        const int stride = row_stride(p_.head_dim_v);
        for (int r = 0; r < heads.num_rows(); ++r) {
            const MergeWeights weights = MergeWeights::make(into.lse[r], other.lse[r]);
            float* a = into.out + r * stride;
            const float* b = other.out + r * stride;
            for (int d = 0; d < p_.head_dim_v; ++d) a[d] = weights.a * a[d] + weights.b * b[d];
            into.lse[r] = weights.lse;
        }
    }

    const AttentionParams& p_;
    const ForwardKernels& kernels_ = kernels().forward;
    std::vector<ChosenKeys> chosen_;  // [batch, num_kv_heads], where pages are chosen
    std::vector<SequencePlan> plans_;
    int64_t num_items_ = 0;
    std::unique_ptr<SplitResults[]> split_results_;
};

}  // namespace

void attention(const AttentionParams& params) {
    if (params.shared_prefix_len > 0) return shared_prefix_attention(params);
    Forward(params).run();
}

}  // namespace octavo::cpu
