// The forward kernel by itself, with every row of its table, where other kernels would be picked too.
#include "dense_call.h"
#include "paged_call.h"

#include <octavo/attention.h>
#include <octavo/paged_attention.h>

namespace octavo {
namespace {

// `body(gpu)` for this GPU and for one with so little shared memory that other rows of the table serve.
template <class Body>
void for_each_shared_memory(Body body) {
    cuda::Gpu gpu = cuda::gpu_of(0);
    for (const int64_t shared_bytes : {int64_t{99} << 10, gpu.shared_bytes_per_block}) {
        SCOPED_TRACE(shared_bytes);
        gpu.shared_bytes_per_block = shared_bytes;
        body(gpu);
    }
}

class CudaForwardTest : public ::testing::TestWithParam<unsigned> {};

TEST_P(CudaForwardTest, DenseAndPackedAgreeWithTheCpu) {
    Random random(GetParam());
    const int64_t head_dim = random.pick({16, 64, 72, 96, 120, 128, 128, 160, 256, 264, 512, 512});
    const int64_t value_dim = random.one_in(3) ? random.pick({8, 40, 64, 128, 200, 256, 320, 512}) : head_dim;
    const int64_t gap = random.pick({0, 0, 0, 3, 4});  // some rows lie off every 16-byte boundary
    DenseCall call(random, GetParam(), head_dim, value_dim, gap);
    call.symmetric_alibi = random.one_in(2);
    call.run_on_cpu();
    for_each_shared_memory([&](const cuda::Gpu& gpu) {
        call.expect_right([&](const AttentionArgs& args) {
            const AttentionParams params = check_attention(args);
            cuda::run(params, cuda::plan_sm80_attention(params, gpu), nullptr);
        });
    });
}

TEST_P(CudaForwardTest, PagedAgreesWithTheCpu) {
    Random random(GetParam());
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t num_kv_heads = random.pick({1, 2}), group_size = random.pick({1, 3, 4, 8});
    const int64_t head_dim = random.pick({64, 96, 128, 128, 160, 256, 320, 512});
    // Decode rows and chunks in one batch.
    const std::vector<int32_t> lengths_q{1, 200, 1, 64, 130, 0}, lengths_k{700, 270, 1, 64, 390, 5};
    Cache cache(random, lengths_k, random.pick({1, 8, 17, 16, 256}), num_kv_heads, head_dim, dtype);
    PagedCall call(random, cache, lengths_q, num_kv_heads * group_size, dtype);
    pick_masks(random, call.options);
    if (random.one_in(2)) call.options.num_splits = random.pick({1, 3, 7});
    call.with_alibi = random.one_in(3);
    call.symmetric_alibi = random.one_in(2);
    call.run_on_cpu();
    for_each_shared_memory([&](const cuda::Gpu& gpu) {
        auto plan_of = [&gpu](const AttentionParams& p, const cuda::Gpu&, std::string*) {
            return std::optional(cuda::plan_sm80_attention(p, gpu));
        };
        call.expect_right([&](const PagedAttentionArgs& args) { run_by(plan_of, args); });
    });
}

INSTANTIATE_TEST_SUITE_P(Seeds, CudaForwardTest, ::testing::Range(0u, 64u));

}  // namespace
}  // namespace octavo
