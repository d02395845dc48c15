// The gradients of attention on the CPU: which thread computes what. The arithmetic is in backward_tile.inl.
#include "cpu/backend.h"
#include "cpu/kernels.h"
#include "cpu/thread_pool.h"

#include <octavo/build_info.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <memory>
#include <vector>

namespace octavo::cpu {
namespace {

BackwardScratch& thread_scratch() {
    thread_local std::unique_ptr<BackwardScratch> scratch;
    if (!scratch) scratch = std::make_unique<BackwardScratch>();
    return *scratch;
}

int32_t tiles_of(int32_t count, int32_t tile_size) { return (count + tile_size - 1) / tile_size; }

// One sequence of the batch; what its gradients take is cut along its rows and keys alone.
struct Sequence {
    RowTile rows;         // all of the first KV head
    int64_t first_row;    // among the rows of all sequences, which lie [num_kv_heads, rows of a KV head]
    int64_t first_block;  // its first block of keys, among those of all sequences
    int32_t num_row_tiles, num_key_blocks;

    // The tile of the same rows of another KV head.
    RowTile rows_of(int32_t kv_head) const {
        RowTile all = rows;
        all.kv_head = kv_head;
        return all;
    }
    RowTile row_tile(int32_t kv_head, int32_t i) const {
        RowTile tile = rows_of(kv_head);
        tile.first_row = i * kTileRows;
        tile.num_rows = std::min(kTileRows, rows.num_rows - tile.first_row);
        return tile;
    }
};

// Two ways lead to the same bits, since both add up each gradient in the same order, that of tiles of keys or
// of rows:
//
// * A thread takes a whole KV head of a sequence. For each block of keys it passes over the tiles of rows,
//   and adds to dk, dv and dq: five products. dq is a buffer in float32, of the heads under way alone.
// * Where there are too few heads for all threads, blocks of keys give dk and dv, and tiles of rows give dq,
//   each by itself: seven products.
class Backward {
  public:
    explicit Backward(const AttentionBackwardParams& params) : p_(params) {
        sequences_.reserve(p_.batch);
        int64_t num_blocks = 0;
        for (int32_t b = 0; b < p_.batch; ++b) {
            Sequence& sequence = sequences_.emplace_back();
            RowTile& rows = sequence.rows;
            rows.sequence = RangedSlice::make(p_, b);
            rows.batch_index = b;
            rows.group_size = p_.group_size();
            rows.num_rows = rows.sequence.seqlen_q * rows.group_size;
            sequence.num_row_tiles = tiles_of(rows.num_rows, kTileRows);
            sequence.num_key_blocks = tiles_of(rows.sequence.see.seqlen_k, block_keys_);
            sequence.first_row = num_rows_;
            sequence.first_block = num_blocks;
            num_rows_ += int64_t{rows.num_rows} * p_.num_kv_heads;
            num_blocks += sequence.num_key_blocks;
        }
        terms_.reset(new float[(p_.dsinks ? 3 : 2) * num_rows_]);
        if (p_.dalibi_slopes) dslopes_.resize(num_blocks * p_.num_q_heads);
    }

    void run() {
        for_items([](const Sequence& s) { return s.num_row_tiles; },
                  [this](const Sequence& s, int32_t kv_head, int32_t i) {
                      const RowTile tile = s.row_tile(kv_head, i);
                      kernels_.prepare(p_, tile, terms_of(s, tile));
                  });
        if (takes_whole_heads()) {
            for_items([](const Sequence&) { return 1; },
                      [this](const Sequence& s, int32_t kv_head, int32_t) { whole_head(s, kv_head); });
        } else {
            // The first blocks of keys and the last tiles of rows see most under a causal mask: they go
            // first.
            for_items([](const Sequence& s) { return s.num_key_blocks + s.num_row_tiles; },
                      [this](const Sequence& s, int32_t kv_head, int32_t i) {
                          if (i < s.num_key_blocks) return key_block(s, kv_head, i, nullptr);
                          row_tile(s, s.row_tile(kv_head, s.num_key_blocks + s.num_row_tiles - 1 - i));
                      });
        }
        if (p_.dalibi_slopes) add_up_slopes();
        if (p_.dsinks) add_up_sinks();
        clear_padding(padding_of(p_));
    }

  private:
    // Calls body(sequence, kv_head, i) for each i below count(sequence), in parallel. Heads vary fastest.
    template <class Count, class Body>
    void for_items(const Count& count, const Body& body) const {
        std::vector<int64_t> ends;
        ends.reserve(sequences_.size());
        int64_t num_items = 0;
        for (const Sequence& s : sequences_) {
            num_items += int64_t{count(s)} * p_.num_kv_heads;
            ends.push_back(num_items);
        }
        parallel_for(num_items, [&](int64_t item) {
            const auto end = std::upper_bound(ends.begin(), ends.end(), item);
            const int64_t first = end == ends.begin() ? 0 : *std::prev(end);
            body(sequences_[end - ends.begin()], static_cast<int32_t>((item - first) % p_.num_kv_heads),
                 static_cast<int32_t>((item - first) / p_.num_kv_heads));
        });
    }

    bool takes_whole_heads() const {
        double total = 0.0, longest = 0.0;  // in pairs of a tile of rows and a block of keys
        for (const Sequence& s : sequences_) {
            const double pairs = static_cast<double>(s.num_row_tiles) * s.num_key_blocks;
            total += pairs * p_.num_kv_heads;
            longest = std::max(longest, pairs);
        }
        const double num_threads = get_num_threads();
        const double num_heads = static_cast<double>(sequences_.size()) * p_.num_kv_heads;
        const double rounds = std::ceil(num_heads / num_threads);
        return 5.0 * std::max(longest, total * rounds / num_heads) <= 7.0 * total / num_threads;
    }

    RowTerms terms_of(const Sequence& s, const RowTile& tile) const {
        const RowTerms all{terms_.get(), terms_.get() + num_rows_,
                           p_.dsinks ? terms_.get() + 2 * num_rows_ : nullptr};
        return all.from(s.first_row + int64_t{tile.kv_head} * s.rows.num_rows + tile.first_row);
    }

    void whole_head(const Sequence& s, int32_t kv_head) {
        const RowTile rows = s.rows_of(kv_head);
        const std::unique_ptr<float[]> dq(new float[int64_t{rows.num_rows} * row_stride(p_.head_dim)]());
        for (int32_t i = 0; i < s.num_key_blocks; ++i) key_block(s, kv_head, i, dq.get());
        kernels_.store_query_gradients(p_, rows, dq.get());
    }

    void key_block(const Sequence& s, int32_t kv_head, int32_t i, float* dq) {
        const RowTile rows = s.rows_of(kv_head);
        double* const dslopes =
            dslopes_.empty() ? nullptr
                             : &dslopes_[(s.first_block + i) * p_.num_q_heads + kv_head * rows.group_size];
        kernels_.key_gradients(p_, rows, i * block_keys_, terms_of(s, rows), thread_scratch(), dq, dslopes);
    }

    void row_tile(const Sequence& s, const RowTile& tile) {
        BackwardScratch& scratch = thread_scratch();
        kernels_.query_gradients(p_, tile, terms_of(s, tile), scratch, scratch.dq);
        kernels_.store_query_gradients(p_, tile, scratch.dq);
    }

    void add_up_slopes() const {
        const int64_t stride = p_.dalibi_batch_stride;  // 0: the sum over all sequences
        for (int32_t head = 0; head < p_.num_q_heads; ++head) {
            double sum = 0.0;
            for (const Sequence& s : sequences_) {
                if (stride > 0) sum = 0.0;
                for (int32_t i = 0; i < s.num_key_blocks; ++i)
                    sum += dslopes_[(s.first_block + i) * p_.num_q_heads + head];
                if (stride > 0)
                    p_.dalibi_slopes[s.rows.batch_index * stride + head] = static_cast<float>(sum);
            }
            if (stride == 0) p_.dalibi_slopes[head] = static_cast<float>(sum);
        }
    }

    void add_up_sinks() const {
        parallel_for(p_.num_q_heads, [this](int64_t head) {
            const auto kv_head = static_cast<int32_t>(head / p_.group_size());
            double sum = 0.0;
            for (const Sequence& s : sequences_) {
                const RowTerms terms = terms_of(s, s.rows_of(kv_head));
                for (auto row = static_cast<int32_t>(head % p_.group_size()); row < s.rows.num_rows;
                     row += p_.group_size())
                    sum += terms.dsink[row];
            }
            p_.dsinks[head] = static_cast<float>(sum);
        });
    }

    const AttentionBackwardParams& p_;
    const BackwardKernels& kernels_ = kernels().backward;
    const int32_t block_keys_ = tiles_per_block(p_) * kTileKeys;
    std::vector<Sequence> sequences_;
    int64_t num_rows_ = 0;
    std::unique_ptr<float[]> terms_;  // [2 or 3, num_rows_]: RowTerms
    std::vector<double> dslopes_;     // [blocks of keys, num_q_heads]; empty unless asked for
};

}  // namespace

void attention_backward(const AttentionBackwardParams& params) { Backward(params).run(); }

}  // namespace octavo::cpu
