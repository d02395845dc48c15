// From checked parameters to the instance that serves them, and how it cuts the work.
#include "common/fail.h"
#include "cuda/alignment.h"
#include "cuda/backend.h"
#include "cuda/decode/decode.h"
#include "cuda/runtime.h"
#include "cuda/shared_prefix/shared_prefix.h"
#include "cuda/sm80_attention/kernel.cuh"
#include "cuda/sm80_attention/sm80_attention.h"
#include "cuda/sm80_attention/tiles.h"
#include "cuda/sm90_attention/sm90_attention.h"
#include "cuda/workspace.h"

#include <algorithm>
#include <set>
#include <string>

namespace octavo::cuda {

template <class T, int kHeadDim, int kStages>
void launch_sm80_attention(const AttentionParams& params, const Sm80Launch& plan, cudaStream_t stream);

namespace {

struct Instance {
    DType dtype;
    int32_t head_dim, stages;
    int32_t rows, keys;
    void (*launch)(const AttentionParams&, const Sm80Launch&, cudaStream_t);
};

// Every instance compiled, by rising head dim and stages; CMake writes the list that it compiles.
constexpr Instance kInstances[] = {
#define OCTAVO_SM80_INSTANCE(type, head_dim, stages) \
    {dtype_of<type>(),                               \
     head_dim,                                       \
     stages,                                         \
     Sm80Config<head_dim, stages>::kRows,            \
     Sm80Config<head_dim, stages>::kKeys,            \
     launch_sm80_attention<type, head_dim, stages>},
#include "sm80_instances.inc"
#undef OCTAVO_SM80_INSTANCE
};

std::string name_of(const Instance& instance) {
    return "sm80_attention<" + to_string(instance.dtype) + ", " + std::to_string(instance.head_dim) + ", " +
           std::to_string(instance.stages) + (instance.stages == 1 ? " stage>" : " stages>");
}

// Of the smallest head dim that holds the problem's (the columns between are zeros in shared memory), what
// has the most stages that there is room for.
const Instance& choose_instance(const AttentionParams& p, size_t shared_bytes) {
    const Instance* best = nullptr;
    for (const Instance& instance : kInstances) {
        if (instance.dtype != p.dtype || instance.head_dim < p.head_dim) continue;
        if (best && instance.head_dim != best->head_dim) break;
        if (!best || shared_bytes >= sm80_shared_bytes(instance.stages)) best = &instance;
    }
    if (best) return *best;
    std::set<std::string> dtypes;
    int32_t most = 0;
    for (const Instance& instance : kInstances) {
        dtypes.insert(to_string(instance.dtype));
        most = std::max(most, instance.head_dim);
    }
    std::string names;
    for (const std::string& dtype : dtypes) names += (names.empty() ? "" : " and ") + dtype;
    fail<TypeError>(p.op, "no CUDA kernel for ", to_string(p.dtype), ", head_dim ", p.head_dim,
                    "; there are some for ", names, ", head_dim up to ", most);
}

// Row tiles over the batch. What a packed batch holds is known on the device only: a bound.
int64_t bound_row_tiles(const AttentionParams& p, int32_t rows) {
    const int64_t group_size = p.group_size();
    const int64_t by_batch = p.batch * ((p.seqlen_q * group_size + rows - 1) / rows);
    if (!p.cu_seqlens_q) return by_batch;
    return std::min(by_batch, p.total_q * group_size / rows + p.batch);
}

// Enough splits that the CTAs fill the device twice, as long as each has a few tiles of keys to walk. Dense
// and packed attention never splits: a sequence's bits then do not depend on its batch.
int32_t choose_num_splits(const AttentionParams& p, const Instance& instance, int64_t num_row_tiles) {
    if (!p.paged() || p.batch_invariant) return 1;
    constexpr int64_t kCtasPerSm = 2, kMinTiles = 4, kMaxSplits = 128;
    const int64_t ctas = num_row_tiles * p.num_kv_heads;
    const int64_t tiles = (p.seqlen_k + instance.keys - 1) / instance.keys;
    const int64_t wanted = kCtasPerSm * num_sms(p.device.index) / std::max<int64_t>(ctas, 1);
    return static_cast<int32_t>(std::clamp<int64_t>(std::min(wanted, tiles / kMinTiles), 1, kMaxSplits));
}

}  // namespace

std::vector<std::string> instances() {
    std::vector<std::string> names;
    for (const Instance& instance : kInstances) names.push_back(name_of(instance));
    for (const std::string& name : decode_instances()) names.push_back(name);
    for (const std::string& name : sm90_attention_instances()) names.push_back(name);
    return names;
}

void attention(const AttentionParams& p, void* stream) {
    choose_instance(p, 0);  // fails before any device is asked
    if (p.total_q == 0 || p.batch == 0) return;
    const DeviceGuard guard(p.device.index);
    if (p.shared_prefix_len > 0) return shared_prefix_attention(p, static_cast<cudaStream_t>(stream));
    if (decode_serves(p)) return decode(p, static_cast<cudaStream_t>(stream));
    if (sm90_attention_serves(p)) return sm90_attention(p, static_cast<cudaStream_t>(stream));
    sm80_attention(p, shared_bytes_per_block(p.device.index), static_cast<cudaStream_t>(stream));
}

void sm80_attention(const AttentionParams& p, size_t shared_bytes, cudaStream_t stream) {
    const Instance& instance = choose_instance(p, shared_bytes);
    const int64_t num_row_tiles = bound_row_tiles(p, instance.rows);
    if (num_row_tiles == 0) return;
    constexpr int64_t kMaxGridX = (int64_t{1} << 31) - 1, kMaxGridY = 65535;
    if (num_row_tiles > kMaxGridX) {
        fail<ValueError>(p.op, "the batch has ", num_row_tiles, " tiles of ", instance.rows,
                         " queries; one launch takes at most ", kMaxGridX);
    }
    if (p.num_kv_heads > kMaxGridY) {
        fail<ValueError>(p.op, "num_kv_heads (", p.num_kv_heads, ") must be at most ", kMaxGridY, " on CUDA");
    }

    Sm80Launch plan{};
    plan.num_row_tiles = static_cast<int32_t>(num_row_tiles);
    plan.num_splits = p.num_splits > 0 ? p.num_splits : choose_num_splits(p, instance, num_row_tiles);
    plan.group_size = FastDivide::by(p.group_size());
    plan.sequence_tiles = FastDivide::by(
        static_cast<uint32_t>((int64_t{p.seqlen_q} * p.group_size() + instance.rows - 1) / instance.rows));
    plan.page_size = FastDivide::by(std::max(p.page_size, 1));
    plan.q_aligned = aligned(p.q, 16, {p.q_batch_stride, p.q_token_stride, p.q_head_stride}, p.dtype);
    plan.k_aligned = aligned(p.k, 16, {p.k_outer_stride, p.k_token_stride, p.k_head_stride}, p.dtype);
    plan.v_aligned = aligned(p.v, 16, {p.v_outer_stride, p.v_token_stride, p.v_head_stride}, p.dtype);
    plan.out_aligned =
        aligned(p.out, 16, {p.out_batch_stride, p.out_token_stride, p.out_head_stride}, p.dtype);
    const int64_t partial_rows = plan.num_splits > 1 ? plan.num_splits * p.total_q * p.num_q_heads : 0;
    const Workspace workspace(p.device.index, partial_rows * (p.head_dim + 1) * sizeof(float), stream);
    plan.partial_out = workspace.floats();
    plan.partial_lse = plan.partial_out + partial_rows * p.head_dim;
    instance.launch(p, plan, stream);
}

}  // namespace octavo::cuda
