// Calls of paged_attention on random problems, on the CPU and on the GPU, there by the kernel that would be
// chosen or by another one. Unused pages, unused slots and outputs hold NaN, unused entries of the page table
// huge ids.
#pragma once

#include "checks/checks.h"
#include "cuda/attention/run.h"
#include "cuda/backend.h"
#include "cuda_testing.h"
#include "explain_testing.h"

#include <octavo/paged_attention.h>

#include <array>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

namespace octavo {

// Lengths for sequences of `seqlen_q` queries each: a length counts their tokens too, so that it is 0, for
// padding, or at least their number.
inline std::vector<int32_t> at_least(std::vector<int32_t> lengths, int32_t seqlen_q) {
    for (int32_t& length : lengths) {
        if (length > 0) length = std::max(length, seqlen_q);
    }
    return lengths;
}

// Numbers of queries: mostly sequences with one query; drafts, whole row tiles and ends of row tiles of any
// length among them.
inline std::vector<int32_t> mixed_lengths_q(Random& random) {
    std::vector<int32_t> lengths(50, 1);
    for (int32_t length : {2, 3, 4, 5, 9, 32, 128, 129, 0, 230, 193, 64}) lengths.push_back(length);
    std::shuffle(lengths.begin(), lengths.end(), random.engine());
    return lengths;
}

inline std::vector<int32_t> longer(Random& random, std::vector<int32_t> lengths) {
    for (int32_t& length : lengths) length += random.pick({0, 1, 15, 127, 128, 300, 615});
    return lengths;
}

// A batch in which every CTA of sm90_attention first meets row tiles without keys (of padding: 16 queries,
// with four heads a block of 64 rows), then row tiles of few rows. With eight KV heads the scheduler is
// quick, so that one warpgroup could get ahead of another.
struct FewRowsBehindPadding {
    static constexpr int32_t kKvHeads = 8, kGroupSize = 4;
    std::vector<int32_t> lengths_q, lengths_k;

    explicit FewRowsBehindPadding(int32_t num_sms) {
        lengths_q.assign(cuda::ceil_divide(6 * num_sms, kKvHeads), 16);
        lengths_k.assign(lengths_q.size(), 0);
        lengths_q.resize(lengths_q.size() + cuda::ceil_divide(2 * num_sms, kKvHeads), 1);
        lengths_k.resize(lengths_q.size(), 150);
    }
};

// A paged cache of random lengths on shuffled pages.
struct Cache {
    // `value_dim`: the head dim of values; 0: head_dim.
    Cache(Random& random, std::vector<int32_t> lengths, int64_t page_size, int64_t num_kv_heads,
          int64_t head_dim, DType dtype, int64_t value_dim = 0)
        : lengths(std::move(lengths)),
          page_size(page_size),
          num_kv_heads(num_kv_heads),
          head_dim(head_dim),
          head_dim_v(value_dim > 0 ? value_dim : head_dim) {
        batch = static_cast<int64_t>(this->lengths.size());
        int64_t used = 0;
        max_pages = 1;
        for (int32_t length : this->lengths) {
            const int64_t pages = (length + page_size - 1) / page_size;
            used += pages;
            max_pages = std::max(max_pages, pages + 1);
        }
        num_pages = used + 5;
        std::vector<int32_t> ids(num_pages);
        std::iota(ids.begin(), ids.end(), 0);
        std::shuffle(ids.begin(), ids.end(), random.engine());
        table.assign(batch * max_pages, kNoPage);
        const int64_t k_slot = num_kv_heads * head_dim, v_slot = num_kv_heads * head_dim_v;
        k = nans(num_pages * page_size * k_slot, dtype);
        v = nans(num_pages * page_size * v_slot, dtype);
        size_t next = 0;
        for (int64_t b = 0; b < batch; ++b) {
            for (int64_t position = 0; position < this->lengths[b]; ++position) {
                int32_t& page = table[b * max_pages + position / page_size];
                if (position % page_size == 0) page = ids[next++];
                const int64_t slot = page * page_size + position % page_size;
                const auto new_k = random.normal(k_slot, dtype), new_v = random.normal(v_slot, dtype);
                std::copy(new_k.begin(), new_k.end(), k.begin() + slot * k_slot);
                std::copy(new_v.begin(), new_v.end(), v.begin() + slot * v_slot);
            }
        }
    }

    // A cache of sequences that begin with the same pages, of `prefix` keys. `own` has the number of keys of
    // each behind them, or -1 for padding, a sequence of length 0. Padding names no page, but the first row
    // of the table always has the prefix.
    static Cache with_shared_prefix(Random& random, int32_t prefix, const std::vector<int32_t>& own,
                                    int64_t page_size, int64_t num_kv_heads, int64_t head_dim, DType dtype,
                                    int64_t value_dim = 0) {
        std::vector<int32_t> lengths{prefix};
        for (int32_t length : own) lengths.push_back(std::max(length, 0));
        Cache cache(random, lengths, page_size, num_kv_heads, head_dim, dtype, value_dim);
        const std::vector<int32_t> apart = cache.table;
        const int64_t columns = cache.max_pages, num_shared = prefix / page_size;
        cache.batch = static_cast<int64_t>(own.size());
        cache.max_pages += num_shared;
        cache.table.assign(cache.batch * cache.max_pages, kNoPage);
        cache.lengths.clear();
        for (int64_t b = 0; b < cache.batch; ++b) {
            const auto row = cache.table.begin() + b * cache.max_pages;
            if (b == 0 || own[b] >= 0) std::copy_n(apart.begin(), num_shared, row);
            std::copy_n(apart.begin() + (b + 1) * columns, columns, row + num_shared);
            cache.lengths.push_back(own[b] < 0 ? 0 : prefix + own[b]);
        }
        return cache;
    }

    // Gives the table this many columns.
    void widen(int64_t columns) {
        std::vector<int32_t> wide(batch * columns, kNoPage);
        for (int64_t b = 0; b < batch; ++b)
            std::copy_n(table.begin() + b * max_pages, max_pages, wide.begin() + b * columns);
        table = wide;
        max_pages = columns;
    }

    static constexpr int32_t kNoPage = 1 << 30;
    std::vector<int32_t> lengths, table;
    int64_t page_size, num_kv_heads, head_dim, head_dim_v;
    int64_t batch = 0, max_pages = 0, num_pages = 0;
    std::vector<uint16_t> k, v;
};

// So many entries of the first axis, from `begin` on.
inline void cut(TensorView& view, int64_t begin, int64_t count) {
    view.data = static_cast<char*>(view.data) + begin * view.strides[0] * size_of(view.dtype);
    view.shape[0] = count;
}

// Some sequences of a batch. Packed tokens stay where they are.
inline PagedAttentionArgs sequences(PagedAttentionArgs args, int64_t first, int64_t count) {
    cut(args.page_table, first, count);
    cut(args.seq_lens, first, count);
    if (args.prefix_lens) cut(*args.prefix_lens, first, count);
    if (args.bidirectional_ranges) cut(*args.bidirectional_ranges, first, count);
    if (args.chosen_pages) cut(*args.chosen_pages, first, count);
    if (args.cu_seqlens_q) {
        cut(*args.cu_seqlens_q, first, count + 1);
        return args;
    }
    cut(args.q, first, count);
    cut(args.out, first, count);
    if (args.lse) cut(*args.lse, first, count);
    if (args.tree_mask) cut(*args.tree_mask, first, count);
    return args;
}

// A call by the kernel that `plan_of` makes plans for, (const AttentionParams&, const cuda::Gpu&,
// std::string*) to an optional plan, whatever would be chosen; in as many launches as the batch takes.
template <class PlanOf>
void run_by(PlanOf plan_of, const PagedAttentionArgs& args) {
    const int64_t batch = args.page_table.shape[0];
    for (int64_t first = 0; first < batch;) {
        AttentionParams params = check_paged_attention(sequences(args, first, batch - first));
        std::string why_not;
        const auto plan = plan_of(params, cuda::gpu_of(0), &why_not);
        ASSERT_TRUE(plan) << why_not;
        params.batch = plan->num_sequences;
        cuda::run(params, *plan, static_cast<cudaStream_t>(args.stream));
        first += plan->num_sequences;
    }
}

// Random queries over a cache, with outputs full of NaN, for either device.
struct PagedCall {
    PagedCall(Random& random, const Cache& cache, const std::vector<int32_t>& lengths_q, int64_t num_q_heads,
              DType dtype)
        : dtype(dtype),
          batch(cache.batch),
          num_q_heads(num_q_heads),
          head_dim(cache.head_dim),
          head_dim_v(cache.head_dim_v),
          begins(cumulative(lengths_q)),
          pages_shape{cache.num_pages, cache.page_size, cache.num_kv_heads, cache.head_dim},
          max_pages(cache.max_pages),
          cu_seqlens_q(begins),
          table(cache.table),
          lengths(cache.lengths),
          q(random.normal(total_q() * num_q_heads * head_dim, dtype)),
          k(cache.k),
          v(cache.v),
          out(nans(total_q() * num_q_heads * head_dim_v, dtype)),
          lse(std::vector<float>(total_q() * num_q_heads, NAN)),
          slopes(slopes_for(num_q_heads)),
          sinks(sinks_for(num_q_heads)) {
        with_sinks = !q.host.empty() && q.host[0] % 4 == 0;  // at random, too
    }

    // The same number of queries for each sequence: packed if they are more than one, and the bound is given.
    PagedCall(Random& random, const Cache& cache, int32_t seqlen_q, int64_t num_q_heads, DType dtype)
        : PagedCall(random, cache, std::vector<int32_t>(cache.batch, seqlen_q), num_q_heads, dtype) {
        packed = seqlen_q > 1;
        if (packed) options.max_seqlen_q = seqlen_q;
    }

    int64_t total_q() const { return begins.back(); }
    int32_t num_queries(int64_t sequence) const { return begins[sequence + 1] - begins[sequence]; }
    int64_t page_size() const { return pages_shape[1]; }
    int64_t num_kv_heads() const { return pages_shape[2]; }

    // `view`: kOnHost or kOnGpu.
    template <class View>
    PagedAttentionArgs arguments(View view) {
        const auto [num_pages, page_size, num_kv_heads, head_dim] = pages_shape;
        PagedAttentionArgs args = options;
        args.q = view(q, dtype, {total_q(), num_q_heads, head_dim});
        args.out = view(out, dtype, {total_q(), num_q_heads, head_dim_v});
        if (with_lse) args.lse = view(lse, DType::float32, {total_q(), num_q_heads});
        args.k_pages = view(k, dtype, {num_pages, page_size, num_kv_heads, head_dim});
        args.v_pages = view(v, dtype, {num_pages, page_size, num_kv_heads, head_dim_v});
        args.page_table = view(table, DType::int32, {batch, max_pages});
        args.seq_lens = view(lengths, DType::int32, {batch});
        if (packed) args.cu_seqlens_q = view(cu_seqlens_q, DType::int32, {batch + 1});
        if (prefix_lens) args.prefix_lens = view(*prefix_lens, DType::int32, {batch});
        if (ranges) {
            const int64_t count = static_cast<int64_t>(ranges->host.size()) / 2 / batch;
            args.bidirectional_ranges = view(*ranges, DType::int32, {batch, count, 2});
        }
        if (with_alibi) args.alibi_slopes = view(slopes, DType::float32, {num_q_heads});
        args.alibi_symmetric = with_alibi && symmetric_alibi;
        if (with_sinks) args.sinks = view(sinks, DType::float32, {num_q_heads});
        if (tree_words) args.tree_mask = view(*tree_words, DType::int32, {total_q(), 2});
        if (phi_of_heads) args.softmax_phi_array = view(*phi_of_heads, DType::float32, {num_q_heads});
        if (chosen_pages && chosen_of_heads) {
            args.chosen_pages = view(*chosen_pages, DType::int32, {batch, num_kv_heads, num_chosen});
        } else if (chosen_pages) {
            args.chosen_pages = view(*chosen_pages, DType::int32, {batch, num_chosen});
        }
        return args;
    }
    PagedAttentionArgs on_gpu() { return arguments(kOnGpu); }
    Explanation explained() { return explain(on_gpu()); }

    // Keys that all queries of a sequence see: none, a few, all, or more than there are.
    void pick_prefix_lens(Random& random) {
        std::vector<int32_t> values;
        for (int32_t length : lengths.host)
            values.push_back(random.pick({0, 3, 40, length / 3, length, length + 5}));
        prefix_lens.emplace(values);
    }
    // Each query sees its ancestors in a random tree, or all queries before it, or any at all. A sequence of
    // more than 64 queries has words, too, which nobody may look at.
    void pick_tree_mask(Random& random) {
        std::vector<int32_t> halves;
        for (int64_t b = 0; b < batch; ++b) {
            const int kind = random.pick({0, 0, 0, 1, 2});
            std::vector<uint64_t> words;
            for (int32_t i = 0; i < num_queries(b); ++i) {
                uint64_t word = random.engine()();
                word = word << 32 | static_cast<uint32_t>(random.engine()());
                if (kind < 2 && i < 64) {
                    const int64_t parent = kind == 1 ? i - 1 : random.up_to(i + 1) - 2;
                    word = uint64_t{1} << i | (parent < 0 ? 0 : words[parent]);
                }
                words.push_back(word);
                halves.push_back(static_cast<int32_t>(word));
                halves.push_back(static_cast<int32_t>(word >> 32));
            }
        }
        tree_words.emplace(halves);
    }
    // Some pages of each sequence, or of each of its KV heads: none, few, all. What is not chosen becomes
    // NaN, and pages that no head has chosen do not exist. To be called once.
    void pick_chosen_pages(Random& random) {
        chosen_of_heads = !random.one_in(4);
        const int64_t heads = chosen_of_heads ? num_kv_heads() : 1;
        num_chosen =
            std::max<int64_t>(random.one_in(3) ? max_pages / 4 : max_pages + random.pick({-1, 0, 3}), 1);
        std::vector<int32_t> lists(batch * heads * num_chosen, -1);
        auto is_in = [&](int64_t b, int64_t h, int32_t page) {
            const auto list = lists.begin() + (b * heads + (chosen_of_heads ? h : 0)) * num_chosen;
            return std::find(list, list + num_chosen, page) != list + num_chosen;
        };
        for (int64_t b = 0; b < batch; ++b) {
            const int64_t pages = (lengths.host[b] + page_size() - 1) / page_size();
            std::vector<int32_t> all(pages);
            std::iota(all.begin(), all.end(), 0);
            for (int64_t h = 0; h < heads; ++h) {
                const int64_t most = std::min(pages, num_chosen);
                const int64_t count =
                    random.pick({int64_t{0}, most, most, most / 2, std::min<int64_t>(most, 3)});
                std::shuffle(all.begin(), all.end(), random.engine());
                std::sort(all.begin(), all.begin() + count);
                std::copy_n(all.begin(), count, lists.begin() + (b * heads + h) * num_chosen);
            }
            for (int32_t page = 0; page < pages; ++page) {
                bool is_chosen = false;
                int32_t& id = table.host[b * max_pages + page];
                for (int64_t h = 0; h < num_kv_heads(); ++h) {
                    if (is_in(b, h, page)) {
                        is_chosen = true;
                        continue;
                    }
                    for (int64_t slot = 0; slot < page_size(); ++slot) {
                        const int64_t row = (id * page_size() + slot) * num_kv_heads() + h;
                        std::fill_n(k.host.begin() + row * head_dim, head_dim, to_bits(NAN, dtype));
                        std::fill_n(v.host.begin() + row * head_dim_v, head_dim_v, to_bits(NAN, dtype));
                    }
                }
                if (!is_chosen) id = Cache::kNoPage;
            }
            if (pages == 0) std::fill_n(lists.begin() + b * heads * num_chosen, heads * num_chosen, 1 << 30);
        }
        table.upload(table.host);
        k.upload(k.host);
        v.upload(v.host);
        chosen_pages.emplace(lists);
    }
    void poison_outputs() {
        out.upload(nans(out.host.size(), dtype));
        lse.upload(std::vector<float>(lse.host.size(), NAN));
        // Copies from pageable memory may still be under way, and streams of their own do not wait for them.
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }

    // `run`: called with the arguments on the GPU.
    template <class Run>
    void run_on_gpu(Run run) {
        poison_outputs();
        run(on_gpu());
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << name();
    }
    void run_on_gpu() { run_on_gpu(paged_attention); }
    // Without the promise of a shared prefix, which changes no result.
    void run_on_cpu() {
        PagedAttentionArgs args = arguments(kOnHost);
        args.shared_prefix_len = 0;
        paged_attention(args);
    }

    struct Results {
        std::vector<uint16_t> out;
        std::vector<float> lse;

        friend bool operator==(const Results& a, const Results& b) {
            return a.out == b.out && a.lse == b.lse;
        }
    };
    // What the GPU gave.
    Results fetch() const { return {out.fetch(), with_lse ? lse.fetch() : std::vector<float>()}; }

    // In the last run on the CPU.
    void expect_what_the_cpu_gave(const Results& results) const {
        SCOPED_TRACE(name());
        expect_close(results.out, out.host, dtype);
        if (with_lse) expect_close(results.lse, lse.host);
    }
    void expect_what_the_cpu_gave() const { expect_what_the_cpu_gave(fetch()); }
    void expect_what_the_cpu_gives() {
        run_on_cpu();
        expect_what_the_cpu_gave();
    }
    // What the CPU gave, and the same twice: the second launch meets what the first one left behind. (Not in
    // shared memory: once on a small scale.)
    template <class Run>
    void expect_right(Run run) {
        run_on_gpu(run);
        if (is_small_scale()) return expect_what_the_cpu_gave();
        const Results first = fetch();
        run_on_gpu(run);
        ASSERT_TRUE(fetch() == first) << "other bits from call to call, " << name();
        expect_what_the_cpu_gave();
    }

    // Every `step`-th sequence has the bits that it has in the batch where it is called alone, whatever room
    // its own arrays have.
    void expect_the_same_alone(int64_t step = 1) {
        std::vector<int32_t> own_begins;
        for (int64_t b = 0; b < batch; ++b) {
            own_begins.push_back(0);
            own_begins.push_back(num_queries(b));
        }
        const Mirror<int32_t> all_begins(own_begins);
        run_on_gpu();
        const Results in_batch = fetch();
        poison_outputs();
        const PagedAttentionArgs args = on_gpu();
        for (int64_t b = 0; b < batch; b += step) {
            const bool has_room = b / step % 2 == 1;
            PagedAttentionArgs own = sequences(args, b, 1);
            if (!has_room) {
                const int64_t pages = (lengths.host[b] + page_size() - 1) / page_size();
                own.page_table.shape[1] = std::max(pages, int64_t{1});
            }
            if (packed) {
                own.cu_seqlens_q = all_begins.on_gpu(DType::int32, {2 * batch});
                cut(*own.cu_seqlens_q, 2 * b, 2);
                const int64_t room = std::min(*args.max_seqlen_q, total_q() - begins[b]);
                for (TensorView* tokens : {&own.q, &own.out, own.lse ? &*own.lse : nullptr,
                                           own.tree_mask ? &*own.tree_mask : nullptr}) {
                    if (tokens) cut(*tokens, begins[b], has_room ? room : num_queries(b));
                }
            }
            paged_attention(own);
        }
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << name();
        const Results alone = fetch();
        for (int64_t b = 0; b < batch; b += step) {
            auto first_other = [&](const auto& values, const auto& others, int64_t width) {
                for (int64_t i = begins[b] * width; i < begins[b + 1] * width; ++i) {
                    if (values[i] != others[i]) return i - begins[b] * width;
                }
                return int64_t{-1};
            };
            ASSERT_EQ(first_other(alone.out, in_batch.out, num_q_heads * head_dim_v), -1)
                << "element of the outputs of sequence " << b << ", " << name();
            if (!with_lse) continue;
            ASSERT_EQ(first_other(alone.lse, in_batch.lse, num_q_heads), -1)
                << "element of the LSEs of sequence " << b << ", " << name();
        }
    }

    std::string name() const {
        std::string text = "batch " + std::to_string(batch) + ", lengths";
        for (size_t i = 0; i < std::min<size_t>(lengths.host.size(), 16); ++i)
            text += " " + std::to_string(lengths.host[i]);
        auto add = [&text](const char* what, int64_t value) {
            text += std::string(", ") + what + " " + std::to_string(value);
        };
        add("queries", total_q());
        add("heads", num_q_heads);
        add("KV heads", num_kv_heads());
        add("head_dim", head_dim);
        add("head_dim_v", head_dim_v);
        add("page_size", page_size());
        add("columns", max_pages);
        add("causal", options.causal);
        add("window_left", options.window_left);
        add("window_right", options.window_right);
        if (options.attention_chunk > 0) add("attention_chunk", options.attention_chunk);
        if (options.batch_invariant) text += ", batch_invariant";
        if (prefix_lens) text += ", prefix_lens";
        if (ranges) text += ", bidirectional_ranges";
        if (tree_words) text += ", tree_mask";
        if (chosen_pages) add(chosen_of_heads ? "pages chosen of heads" : "chosen pages", num_chosen);
        if (with_alibi) text += symmetric_alibi ? ", symmetric ALiBi" : ", ALiBi";
        if (with_sinks) text += ", sinks";
        if (options.softmax_phi) text += ", softmax_phi " + std::to_string(*options.softmax_phi);
        if (phi_of_heads) text += ", softmax_phi of each head";
        return text + ", " + to_string(dtype);
    }

    PagedAttentionArgs options;  // without arrays
    bool packed = true, with_alibi = false, symmetric_alibi = false, with_sinks = false, with_lse = true;
    const DType dtype;
    const int64_t batch, num_q_heads, head_dim, head_dim_v;
    const std::vector<int32_t> begins;  // of each sequence's queries
    const std::array<int64_t, 4> pages_shape;
    const int64_t max_pages;
    Mirror<int32_t> cu_seqlens_q, table, lengths;
    Mirror<uint16_t> q, k, v, out;
    Mirror<float> lse, slopes, sinks;
    std::optional<Mirror<int32_t>> prefix_lens, tree_words;
    std::optional<Mirror<int32_t>> ranges;  // see random_ranges()
    std::optional<Mirror<float>> phi_of_heads;
    std::optional<Mirror<int32_t>> chosen_pages;  // [batch, KV heads or 1, num_chosen]
    int64_t num_chosen = 0;
    bool chosen_of_heads = false;
};

// The ways to decode: what would be chosen, the other kernel, and fixed splits.
struct DecodeWay {
    const char* name;
    void (*run)(const PagedAttentionArgs& args);
};
inline constexpr DecodeWay kDecodeWays[] = {
    {"as chosen", paged_attention},
    {"by stream_k_decode", [](const PagedAttentionArgs& args) { run_by(cuda::plan_stream_k, args); }},
    {"batch-invariant",
     [](const PagedAttentionArgs& args) {
         PagedAttentionArgs invariant = args;
         invariant.batch_invariant = true;
         paged_attention(invariant);
     }},
};

// What tells of the kernel that a call to decode reaches: "stream_k", or a policy of split_kv_decode.
inline std::string decode_policy(PagedCall& call) {
    const Explanation text = call.explained();
    return kind_of(text) == "split_kv_decode"   ? field(text, "policy")
           : kind_of(text) == "stream_k_decode" ? "stream_k"
                                                : text.kernel;
}

// In every way of decoding what the CPU gives.
inline void expect_every_decode_right(PagedCall& call) {
    const bool has_window = call.options.window_left >= 0 || call.options.attention_chunk > 0;
    if (call.prefix_lens && has_window) {
        EXPECT_EQ(decode_policy(call), "stream_k") << call.name();
    }
    call.options.batch_invariant = true;
    EXPECT_EQ(decode_policy(call), "fixed") << call.name();
    call.options.batch_invariant = false;
    call.run_on_cpu();
    for (const DecodeWay& way : kDecodeWays) {
        SCOPED_TRACE(way.name);
        call.expect_right(way.run);
        if (::testing::Test::HasFatalFailure()) return;
    }
}

}  // namespace octavo
