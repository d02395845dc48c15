// Calls of attention on random problems, dense or packed, on the CPU and on the GPU. Results and the gaps
// between rows hold NaN.
#pragma once

#include "checks/checks.h"
#include "cuda_testing.h"

#include <octavo/attention.h>

#include <algorithm>
#include <optional>
#include <vector>

namespace octavo {

// One call; `args` are those of the device that set() was last called for.
class DenseCall {
  public:
    // Rows of q and k have head_dim numbers, those of v and of results value_dim; between them are so many
    // elements more.
    DenseCall(Random& random, unsigned seed, int64_t head_dim, int64_t value_dim, int64_t gap)
        : head_dim(head_dim),
          value_dim(value_dim),
          row(head_dim + gap),
          value_row(value_dim + gap),
          dtype(random.pick({DType::float16, DType::bfloat16})),
          num_kv_heads(random.pick({1, 2})),
          num_q_heads(num_kv_heads * random.pick({1, 3, 4, 7, 40})),
          packed(random.one_in(2)),
          lengths_q(packed ? random.pick<std::vector<int32_t>>({{70, 193, 0, 1}, {257, 1, 0, 300}})
                           : std::vector<int32_t>(2, random.pick({1, 64, 200, 333}))),
          lengths_k(packed ? random.pick<std::vector<int32_t>>({{70, 450, 40, 129}, {257, 31, 7, 300}})
                           : std::vector<int32_t>(2, random.pick({1, 64, 200, 450}))),
          cu_seqlens_q(cumulative(lengths_q)),
          cu_seqlens_k(cumulative(lengths_k)),
          total_q(cu_seqlens_q.host.back()),
          total_k(cu_seqlens_k.host.back()),
          q(random.normal(total_q * num_q_heads * row, dtype)),
          k(random.normal(total_k * num_kv_heads * row, dtype)),
          v(random.normal(total_k * num_kv_heads * value_row, dtype)),
          out(nans(total_q * num_q_heads * value_row, dtype)),
          lse(std::vector<float>(total_q * num_q_heads, NAN)),
          slopes(slopes_for(num_q_heads)),
          sinks(sinks_for(num_q_heads)),
          prefix_lens(std::vector<int32_t>(lengths_q.size(), 0)) {
        for (int32_t& prefix : prefix_lens.host) prefix = random.pick({0, 3, 140});
        prefix_lens.upload(prefix_lens.host);
        pick_masks(random, args);
        if (random.one_in(8)) args.softmax_scale = random.pick({-0.1, 0.0});
        if (random.one_in(3)) {
            args.dropout_p = random.pick({0.1, 0.5});
            args.dropout_seed = seed + (int64_t{1} << 40);
            args.dropout_offset = (int64_t{1} << 32) - 3;
        }
        with_sinks = q.host[0] % 3 == 0;
        with_alibi = random.one_in(3);
        with_prefix = random.one_in(4);
        with_blocks = random.one_in(3);
        args.block_size = random.pick({64, 128});
        mask_heads_ = random.pick<int64_t>({1, num_q_heads});
        blocks_.set(random.blocks(mask_heads_ * num_blocks(total_q) * num_blocks(total_k)));
    }

    int64_t batch() const { return static_cast<int64_t>(lengths_q.size()); }

    // `on`: kOnHost or kOnGpu.
    template <class On>
    void set(On on) {
        auto tokens_of = [&](auto& mirror, int64_t total, int64_t heads, int64_t columns, int64_t stride) {
            TensorView tokens = packed ? on(mirror, dtype, {total, heads, stride})
                                       : on(mirror, dtype, {batch(), total / batch(), heads, stride});
            tokens.shape[tokens.ndim - 1] = columns;
            return tokens;
        };
        args.q = tokens_of(q, total_q, num_q_heads, head_dim, row);
        args.out = tokens_of(out, total_q, num_q_heads, value_dim, value_row);
        args.k = tokens_of(k, total_k, num_kv_heads, head_dim, row);
        args.v = tokens_of(v, total_k, num_kv_heads, value_dim, value_row);
        args.lse = packed ? on(lse, DType::float32, {total_q, num_q_heads})
                          : on(lse, DType::float32, {batch(), total_q / batch(), num_q_heads});
        if (packed) {
            args.cu_seqlens_q = on(cu_seqlens_q, DType::int32, {batch() + 1});
            args.cu_seqlens_k = on(cu_seqlens_k, DType::int32, {batch() + 1});
        }
        if (with_alibi) args.alibi_slopes = on(slopes, DType::float32, {num_q_heads});
        args.alibi_symmetric = with_alibi && symmetric_alibi;
        if (with_sinks) args.sinks = on(sinks, DType::float32, {num_q_heads});
        if (with_blocks) {
            args.block_mask =
                on(blocks_, DType::uint8, {mask_heads_, num_blocks(total_q), num_blocks(total_k)});
        }
        if (with_prefix) args.prefix_lens = on(prefix_lens, DType::int32, {batch()});
        if (ranges) {
            const int64_t count = static_cast<int64_t>(ranges->host.size()) / 2 / batch();
            args.bidirectional_ranges = on(*ranges, DType::int32, {batch(), count, 2});
        }
    }

    void run_on_cpu() {
        set(kOnHost);
        attention(args);
    }
    // After run_on_cpu(): that run(args), on the GPU, gives the same, and leaves the gaps as they are.
    template <class Run>
    void expect_right(Run run) {
        set(kOnGpu);
        out.upload(nans(out.host.size(), dtype));
        lse.upload(std::vector<float>(lse.host.size(), NAN));
        run(args);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        expect_rows_close(out.fetch(), out.host, dtype, value_dim, value_row);
        expect_close(lse.fetch(), lse.host);
    }

    const int64_t head_dim, value_dim, row, value_row;
    const DType dtype;
    const int64_t num_kv_heads, num_q_heads;
    const bool packed;
    const std::vector<int32_t> lengths_q, lengths_k;
    Mirror<int32_t> cu_seqlens_q, cu_seqlens_k;
    const int64_t total_q, total_k;
    Mirror<uint16_t> q, k, v, out;
    Mirror<float> lse, slopes, sinks;
    Mirror<int32_t> prefix_lens;
    bool with_sinks, with_alibi, with_prefix, with_blocks;
    bool symmetric_alibi = false;
    std::optional<Mirror<int32_t>> ranges;  // see random_ranges(); without a block mask
    AttentionArgs args;

  private:
    int64_t num_blocks(int64_t total) const {
        return ((packed ? total : total / batch()) + args.block_size - 1) / args.block_size;
    }

    int64_t mask_heads_;
    // Room for the blocks of every size.
    Mirror<uint8_t> blocks_{std::vector<uint8_t>(size_t{1} << 16)};
};

}  // namespace octavo
