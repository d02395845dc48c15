// Attention forward on the CPU: which thread computes what. The arithmetic is in forward_tile.inl.
#include "common/online_softmax.h"
#include "cpu/backend.h"
#include "cpu/forward_tile.h"
#include "cpu/isa.h"
#include "cpu/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <memory>
#include <optional>
#include <vector>

namespace octavo::cpu {
namespace {

const TileKernels& kernels() {
    switch (isa()) {
#if defined(__x86_64__)
        case Isa::avx512: return avx512::kKernels;
        case Isa::avx2: return avx2::kKernels;
#endif
        default: return baseline::kKernels;
    }
}

TileScratch& thread_scratch() {
    thread_local std::unique_ptr<TileScratch> scratch;
    if (!scratch) scratch = std::make_unique<TileScratch>();
    return *scratch;
}

// Below this many key tiles, a run is not worth its merge.
constexpr int32_t kMinTilesPerSplit = 8;
constexpr int32_t kMaxChosenSplits = 64;

// How one sequence is cut: its rows into tiles, the keys of each into `num_splits` runs. The runs of a single
// row tile (decode) are worked on at once; those of several, one after the other in one item. Either way they
// are merged in order. The cuts follow from the sequence alone, and so do the bits of its result.
struct SequencePlan {
    RowTile first_tile;  // of the first KV head
    int32_t num_rows;    // of one KV head: seqlen_q * group_size
    int32_t num_row_tiles;
    int32_t num_splits;
    int64_t first_item;     // among the items of all sequences: [row tiles or splits, num_kv_heads]
    int64_t first_partial;  // likewise; only with parallel splits: [num_kv_heads, num_splits]

    bool parallel_splits() const { return num_row_tiles == 1 && num_splits > 1; }
    int64_t items_per_head() const { return parallel_splits() ? num_splits : num_row_tiles; }
};

SequencePlan make_plan(const ForwardParams& p, int32_t b) {
    SequencePlan plan{};
    RowTile& tile = plan.first_tile;
    tile.sequence = SequenceSlice::make(p, b);
    tile.batch_index = b;
    tile.group_size = p.group_size();
    plan.num_rows = tile.sequence.seqlen_q * tile.group_size;
    plan.num_row_tiles = (plan.num_rows + kTileRows - 1) / kTileRows;
    plan.num_splits = std::max(1, p.num_splits);
    tile.num_rows = std::min(plan.num_rows, kTileRows);
    if (plan.num_row_tiles == 1) {
        const int32_t num_key_tiles = tile.key_tiles().count;
        if (p.num_splits == 0)
            plan.num_splits = std::min(num_key_tiles / kMinTilesPerSplit, kMaxChosenSplits);
        plan.num_splits = std::clamp(plan.num_splits, 1, std::max(1, num_key_tiles));
    }
    return plan;
}

// The results of splits that are worked on at once.
class Partials {
  public:
    Partials(int64_t count, int64_t max_rows, int head_dim)
        : out_size_(max_rows * row_stride(head_dim)),
          size_(out_size_ + max_rows),
          data_(new float[count * size_]),
          num_finished_(new std::atomic<int32_t>[count]()) {}

    Partial operator[](int64_t i) const { return {&data_[i * size_], &data_[i * size_ + out_size_]}; }

    // Notes one more finished split of the row tile whose partials start at `first`; whether it was the last.
    bool finish(int64_t first, int32_t num_splits) {
        return num_finished_[first].fetch_add(1, std::memory_order_acq_rel) + 1 == num_splits;
    }

  private:
    int64_t out_size_, size_;
    std::unique_ptr<float[]> data_;
    std::unique_ptr<std::atomic<int32_t>[]> num_finished_;
};

class Forward {
  public:
    explicit Forward(const ForwardParams& params) : p_(params) {
        plans_.reserve(p_.batch);
        int64_t num_partials = 0;
        int32_t max_rows = 0;
        for (int32_t b = 0; b < p_.batch; ++b) {
            SequencePlan& plan = plans_.emplace_back(make_plan(p_, b));
            const int64_t num_items = plan.items_per_head() * p_.num_kv_heads;
            plan.first_item = num_items_;
            plan.first_partial = num_partials;
            num_items_ += num_items;
            if (plan.parallel_splits()) {
                num_partials += num_items;
                max_rows = std::max(max_rows, plan.num_rows);
            }
        }
        if (num_partials > 0) partials_.emplace(num_partials, max_rows, p_.head_dim);
    }

    void run() {
        parallel_for(num_items_, [this](int64_t item) { run_item(item); });
    }

  private:
    // Heads vary fastest: threads that run together read the same tokens. Of the row tiles, the last, which
    // see most under a causal mask, go first.
    void run_item(int64_t item) {
        const SequencePlan& plan =
            *std::prev(std::upper_bound(plans_.begin(), plans_.end(), item,
                                        [](int64_t i, const SequencePlan& s) { return i < s.first_item; }));
        const auto part = static_cast<int32_t>((item - plan.first_item) / p_.num_kv_heads);
        RowTile tile = plan.first_tile;
        tile.kv_head = static_cast<int32_t>((item - plan.first_item) % p_.num_kv_heads);

        if (plan.parallel_splits()) {
            const int64_t first = plan.first_partial + int64_t{tile.kv_head} * plan.num_splits;
            attend(tile, part, plan.num_splits, (*partials_)[first + part]);
            if (!partials_->finish(first, plan.num_splits)) return;
            for (int32_t s = 1; s < plan.num_splits; ++s)
                merge(tile, (*partials_)[first], (*partials_)[first + s]);
            kernels_.store(p_, tile, (*partials_)[first]);
            return;
        }
        tile.first_row = (plan.num_row_tiles - 1 - part) * kTileRows;
        tile.num_rows = std::min(kTileRows, plan.num_rows - tile.first_row);
        TileScratch& scratch = thread_scratch();
        Partial result{scratch.out[0], scratch.lse[0]}, next{scratch.out[1], scratch.lse[1]};
        attend(tile, 0, plan.num_splits, result);
        for (int32_t s = 1; s < plan.num_splits; ++s) {
            attend(tile, s, plan.num_splits, next);
            merge(tile, result, next);
        }
        kernels_.store(p_, tile, result);
    }

    void attend(const RowTile& tile, int64_t split, int32_t num_splits, Partial result) const {
        const int64_t count = tile.key_tiles().count;
        kernels_.attend(p_, tile, static_cast<int32_t>(count * split / num_splits),
                        static_cast<int32_t>(count * (split + 1) / num_splits), thread_scratch(), result);
    }

    void merge(const RowTile& tile, Partial into, Partial other) const {
        const int stride = row_stride(p_.head_dim);
        for (int r = 0; r < tile.num_rows; ++r) {
            const MergeWeights weights = MergeWeights::make(into.lse[r], other.lse[r]);
            float* a = into.out + r * stride;
            const float* b = other.out + r * stride;
            for (int d = 0; d < p_.head_dim; ++d) a[d] = weights.a * a[d] + weights.b * b[d];
            into.lse[r] = weights.lse;
        }
    }

    const ForwardParams& p_;
    const TileKernels& kernels_ = kernels();
    std::vector<SequencePlan> plans_;
    int64_t num_items_ = 0;
    std::optional<Partials> partials_;
};

}  // namespace

void forward(const ForwardParams& params) { Forward(params).run(); }

}  // namespace octavo::cpu
