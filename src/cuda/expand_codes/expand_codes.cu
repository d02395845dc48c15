// Converts the codes of a batch's keys and values to numbers of the queries' type, [slot, KV head, token,
// head_dim] in the workspace, which sm90_attention then reads as pages of one sequence each. A number is
// scale x code (+ minimum) in float32, rounded once. Page: docs/kernels/quantised_prefill.md.
//
// grid: num_turns CTAs for each (slot, KV head), which take turns at the runs of its tokens; a CTA owns the
// rows of a run at a time. Heads are innermost, since those of one token may be neighbours in memory. Four
// threads share a row (eight above head dim 128) and take eight codes at a time, so that one page and one
// scale serve all of a thread's codes, and a warp loads and stores whole sectors of 32 bytes (for int4, two
// loads take one sector). All loads are in flight before the first one is used. Memory bounds the kernel, but
// the instructions are not free: if every eight codes needed a page of their own, they would take two thirds
// as long as the memory.
#include "common/codes.h"
#include "cuda/attention/run.h"
#include "cuda/expand_codes/plan.h"
#include "cuda/launch.cuh"
#include "cuda/ptx/grid_dependency.h"
#include "cuda/tile/code_pages.cuh"
#include "cuda/tile/code_pairs.cuh"
#include "cuda/types.h"
#include "cuda/workspace.h"

namespace octavo::cuda {
namespace {

// How the launch finds its data and cuts its work.
struct ExpandLaunch {
    void *keys, *values;
    int32_t* page_table;  // the table that sm90_attention reads: each sequence's page is its slot
    int32_t room;
    int32_t pieces;  // in a row
    FastDivide num_turns, num_kv_heads, page_size;
    // Whether the next kernel starts only when all kernels before this one are complete: then the one behind
    // it may run beside it without a wait of its own.
    int32_t holds_next;
};

// Converts a byte n to float32, by its bits: it makes 2^23 + n, from which it subtracts `offset`.
template <uint32_t kSelector>
__device__ __forceinline__ float float_of_byte(uint32_t bytes, float offset) {
    return __uint_as_float(__byte_perm(bytes, 0x4b000000u, kSelector)) - offset;
}

// Eight codes of a type, and their conversion to numbers.
template <DType kType>
struct EightCodes {  // of a float8 type
    uint2 words;

    template <class T>
    __device__ uint4 numbers(uint32_t scale) const {
        return make_uint4(pair<T, 0>(words.x, scale), pair<T, 1>(words.x, scale), pair<T, 0>(words.y, scale),
                          pair<T, 1>(words.y, scale));
    }

  private:
    template <class T, int kPair>
    __device__ static uint32_t pair(uint32_t codes, uint32_t scale) {
        uint32_t halves;
        if constexpr (kType == DType::float8_e4m3fn) {
            halves = float8_pair<__NV_E4M3>(codes >> 16 * kPair);
        } else {
            halves = select_bytes<kPair == 0 ? 0x1404u : 0x3424u>(codes);  // codes are upper bytes of float16
        }
        const float2 numbers = unpack<float16>(halves);
        return pack<T>(numbers.x * float_of_bits(scale), numbers.y * float_of_bits(scale));
    }
};

template <>
struct EightCodes<DType::int8> {
    uint2 words;

    template <class T>
    __device__ uint4 numbers(uint32_t scale) const {
        const uint32_t low = words.x ^ 0x80808080u, high = words.y ^ 0x80808080u;  // bytes n + 128
        return make_uint4(pair<T, 0x7440, 0x7441>(low, scale), pair<T, 0x7442, 0x7443>(low, scale),
                          pair<T, 0x7440, 0x7441>(high, scale), pair<T, 0x7442, 0x7443>(high, scale));
    }

  private:
    template <class T, uint32_t kFirst, uint32_t kSecond>
    __device__ static uint32_t pair(uint32_t bytes, uint32_t scale) {
        constexpr float kOffset = 0x1p23f + 128.0f;
        return pack<T>(float_of_byte<kFirst>(bytes, kOffset) * float_of_bits(scale),
                       float_of_byte<kSecond>(bytes, kOffset) * float_of_bits(scale));
    }
};

template <>
struct EightCodes<DType::int4> {
    uint32_t words;

    template <class T>
    __device__ uint4 numbers(uint32_t word) const {
        const float2 scale = unpack<float16>(word);  // x is the scale, y the minimum
        const uint32_t even = words & 0x0f0f0f0fu, odd = words >> 4 & 0x0f0f0f0fu;
        auto number = [scale](float n) { return fmaf(n, scale.x, scale.y); };
        constexpr float kOffset = 0x1p23f;
        return make_uint4(pack<T>(number(float_of_byte<0x7440>(even, kOffset)),
                                  number(float_of_byte<0x7440>(odd, kOffset))),
                          pack<T>(number(float_of_byte<0x7441>(even, kOffset)),
                                  number(float_of_byte<0x7441>(odd, kOffset))),
                          pack<T>(number(float_of_byte<0x7442>(even, kOffset)),
                                  number(float_of_byte<0x7442>(odd, kOffset))),
                          pack<T>(number(float_of_byte<0x7443>(even, kOffset)),
                                  number(float_of_byte<0x7443>(odd, kOffset))));
    }
};

__device__ __forceinline__ void load_past_l1(const uint8_t* from, uint2& words) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(words.x), "=r"(words.y)
                 : "l"(from));
}
__device__ __forceinline__ void load_past_l1(const uint8_t* from, uint32_t& word) {
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(word) : "l"(from));
}

// The pieces of one row that a thread takes; kLanes threads share the row.
template <DType kType, int kLanes>
class RowPieces {
  public:
    // `place`: where the key lies, as CodePages takes it.
    template <class Place>
    __device__ void load(const CodePages& pages, const Place& place, int32_t lane, int32_t pieces) {
        constexpr auto kBytes = static_cast<int32_t>(sizeof EightCodes<kType>::words);
        const uint8_t* const first =
            pages.codes + static_cast<size_t>(pages.strides(place)) * 16 + lane * kBytes;
        scale_ = pages.scales ? pages.scales[pages.scale_strides(place)] : bits_of_float(1.0f);
#pragma unroll
        for (int i = 0; i < kExpandPasses; ++i) {
            if (lane + i * kLanes < pieces) load_past_l1(first + i * kLanes * kBytes, codes_[i].words);
        }
    }
    // `first`: where the numbers of the row's first piece go.
    template <class T>
    __device__ void store(uint4* first, int32_t lane, int32_t pieces) const {
#pragma unroll
        for (int i = 0; i < kExpandPasses; ++i) {
            if (lane + i * kLanes < pieces) first[lane + i * kLanes] = codes_[i].template numbers<T>(scale_);
        }
    }

  private:
    EightCodes<kType> codes_[kExpandPasses];
    uint32_t scale_;
};

// The sequence whose numbers a slot holds; -1: none. Slots hold those that the launch serves, in order, or
// all sequences of the batch. All lanes of a warp call together.
__device__ __forceinline__ int32_t sequence_of_slot(const AttentionParams& p, int32_t slot) {
    if (p.most_queries == 0) return slot;
    for (int32_t first = 0; first < p.batch; first += 32) {
        const int32_t b = first + static_cast<int32_t>(threadIdx.x % 32);
        const uint32_t served = __ballot_sync(~0u, b < p.batch && p.served_queries(b) > 0);
        const int32_t count = __popc(served);
        if (slot < count) return first + static_cast<int32_t>(__fns(served, 0, slot + 1));
        slot -= count;
    }
    return -1;
}

template <class T, DType kKeys, DType kValues, int kLanes>
__global__ void __launch_bounds__(kExpandThreads, 5)
    expand_codes_kernel(const __grid_constant__ AttentionParams p,
                        const __grid_constant__ ExpandLaunch plan) {
    if (!plan.holds_next) ptx::launch_dependents();
    constexpr int32_t kRunTokens = kExpandThreads / kLanes;
    const int32_t index = static_cast<int32_t>(blockIdx.x);
    const int32_t turn = plan.num_kv_heads.quotient(index);
    const int32_t kv_head = index - turn * p.num_kv_heads;
    const int32_t slot = plan.num_turns.quotient(turn);
    const int32_t thread = static_cast<int32_t>(threadIdx.x), lane = thread % kLanes;
    int32_t token = plan.num_turns.remainder(turn) * kRunTokens + thread / kLanes;
    ptx::wait_for_previous_grid();
    if (plan.holds_next) ptx::launch_dependents();

    const int32_t batch = sequence_of_slot(p, slot);
    if (batch < 0) return;
    if (token == 0 && kv_head == 0 && lane == 0) plan.page_table[batch] = slot;
    const SequenceSlice sequence = SequenceSlice::make(p, batch);
    if (sequence.seqlen_q == 0) return;
    const int32_t seqlen_k = sequence.see.seqlen_k;
    // Keys between the prefix and the first query's window may lie in pages that no longer belong to the
    // sequence.
    const int32_t prefix_len = sequence.see.prefix_len;
    const int32_t window_begin = sequence.see.window_begin(sequence.q_pos(0));
    const IndexArray page_ids = p.page_table.from(batch * p.page_table_stride);
    // The offset counts pieces: in kMaxExpandedBytes there are few enough of them for 32 bits.
    const int32_t first_piece = (slot * p.num_kv_heads + kv_head) * plan.room * plan.pieces;
    for (; token < seqlen_k; token += kRunTokens * static_cast<int32_t>(plan.num_turns.divisor)) {
        if (token >= prefix_len && token < window_begin) continue;
        struct {
            uint32_t page, slot, kv_head;
        } place;
        const int32_t column = plan.page_size.quotient(token);
        place.page = page_ids[column];
        place.slot = token - column * p.page_size;
        place.kv_head = kv_head;
        RowPieces<kKeys, kLanes> k;
        RowPieces<kValues, kLanes> v;
        k.load(CodePages::keys(p), place, lane, plan.pieces);
        v.load(CodePages::values(p), place, lane, plan.pieces);
        const int32_t row = first_piece + token * plan.pieces;
        k.template store<T>(static_cast<uint4*>(plan.keys) + row, lane, plan.pieces);
        v.template store<T>(static_cast<uint4*>(plan.values) + row, lane, plan.pieces);
    }
}

template <class T, DType kKeys, DType kValues>
void expand(const AttentionParams& p, const ExpandedPlan& plan, const ExpandLaunch& arguments,
            cudaStream_t stream) {
    const LaunchShape shape{dim3(static_cast<unsigned>(plan.grid().size())), kExpandThreads, true};
    if (plan.lanes == kFewExpandLanes) {
        launch<expand_codes_kernel<T, kKeys, kValues, kFewExpandLanes>>(p.op, p.device.index, stream, shape,
                                                                        p, arguments);
    } else {
        launch<expand_codes_kernel<T, kKeys, kValues, kManyExpandLanes>>(p.op, p.device.index, stream, shape,
                                                                         p, arguments);
    }
}

template <class T>
void expand(const AttentionParams& p, const ExpandedPlan& plan, const ExpandLaunch& arguments,
            cudaStream_t stream) {
    switch (plan.codes) {
        case Codes::none: return;
        case Codes::e4m3:
            return expand<T, DType::float8_e4m3fn, DType::float8_e4m3fn>(p, plan, arguments, stream);
        case Codes::e5m2:
            return expand<T, DType::float8_e5m2, DType::float8_e5m2>(p, plan, arguments, stream);
        case Codes::int8: return expand<T, DType::int8, DType::int8>(p, plan, arguments, stream);
        case Codes::int4: return expand<T, DType::int4, DType::int4>(p, plan, arguments, stream);
        case Codes::int8_int4: return expand<T, DType::int8, DType::int4>(p, plan, arguments, stream);
    }
}

}  // namespace

void run(const AttentionParams& params, const ExpandedPlan& plan, cudaStream_t stream) {
    const AttentionParams p = plan.is_mixed() ? with_queries(params, plan.many_queries, INT32_MAX) : params;
    const Workspace workspace(p.device.index, plan.workspace_bytes(), stream, WorkspaceUser::expanded_codes);
    const AttentionParams expanded = over_expanded(p, plan.num_slots, plan.room, workspace.bytes());
    ExpandLaunch arguments{};
    arguments.keys = workspace.bytes();
    arguments.values = workspace.bytes() + plan.tensor_bytes;
    arguments.page_table = reinterpret_cast<int32_t*>(workspace.bytes() + 2 * plan.tensor_bytes);
    arguments.room = plan.room;
    arguments.pieces = plan.head_dim / kExpandColumns;
    arguments.num_turns = FastDivide::by(plan.num_turns);
    arguments.num_kv_heads = FastDivide::by(plan.num_kv_heads);
    arguments.page_size = FastDivide::by(p.page_size);
    arguments.holds_next = plan.sms_left > 0;
    if (p.dtype == DType::bfloat16) {
        expand<bfloat16>(p, plan, arguments, stream);
    } else {
        expand<float16>(p, plan, arguments, stream);
    }
    run(expanded, plan.attention, stream);
    if (plan.is_mixed()) {
        const AttentionParams few = with_queries(params, 1, plan.few_queries);
        if (const auto* split_kv = std::get_if<SplitKvPlan>(&*plan.few))
            run(few, *split_kv, stream, plan.sms_left > 0 ? Beside::numbers : Beside::nothing);
        else
            run(few, std::get<StreamKPlan>(*plan.few), stream);
        const AttentionParams between = with_queries(params, plan.few_queries + 1, plan.many_queries - 1);
        std::visit([&](const auto& plan) { run(between, plan, stream); }, *plan.between);
    }
}

}  // namespace octavo::cuda
