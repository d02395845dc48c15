#include "cuda/attention/run.h"
#include "cuda/types.h"

#include <array>
#include <iterator>
#include <utility>

namespace octavo::cuda {

// Each row of kDecodeTiles has one for each type and each kind of codes, compiled from instance.cu.in.
template <class T, int kHeadDim, int kRowTiles, Codes kCodes>
void launch_stream_k_decode(const AttentionParams&, const StreamKPlan&, cudaStream_t);
template <class T, int kHeadDim, int kRowTiles, Codes kCodes>
void launch_split_kv_decode(const AttentionParams&, const SplitKvPlan&, Beside, cudaStream_t);

namespace {

struct Launches {
    void (*stream_k)(const AttentionParams&, const StreamKPlan&, cudaStream_t);
    void (*split_kv)(const AttentionParams&, const SplitKvPlan&, Beside, cudaStream_t);
};

template <class T, size_t kRow, Codes kCodes>
constexpr Launches launches_of_row() {
    constexpr DecodeTiles kTiles = kDecodeTiles[kRow];
    if constexpr (kCodes == Codes::none || kTiles.has_codes) {
        return {launch_stream_k_decode<T, kTiles.head_dim, kTiles.row_tiles, kCodes>,
                launch_split_kv_decode<T, kTiles.head_dim, kTiles.row_tiles, kCodes>};
    }
    return {};
}

using Table = std::array<Launches, std::size(kDecodeTiles)>;
template <class T, Codes kCodes, size_t... kRows>
constexpr Table launches(std::index_sequence<kRows...>) {
    return {launches_of_row<T, kRows, kCodes>()...};
}
template <class T, Codes kCodes = Codes::none>
constexpr Table kLaunches = launches<T, kCodes>(std::make_index_sequence<std::size(kDecodeTiles)>());

template <class Plan>
const Launches& launches_of(const Plan& plan) {
    auto table = [&plan]() -> const Table& {
        switch (plan.codes) {
            case Codes::none: break;
            case Codes::e4m3: return kLaunches<AnyFloat16, Codes::e4m3>;
            case Codes::e5m2: return kLaunches<AnyFloat16, Codes::e5m2>;
            case Codes::int8: return kLaunches<AnyFloat16, Codes::int8>;
            case Codes::int4: return kLaunches<AnyFloat16, Codes::int4>;
            case Codes::int8_int4: return kLaunches<AnyFloat16, Codes::int8_int4>;
        }
        return plan.dtype == DType::float16 ? kLaunches<float16> : kLaunches<bfloat16>;
    };
    return table()[plan.row];
}

}  // namespace

void run(const AttentionParams& p, const SplitKvPlan& plan, cudaStream_t stream, Beside beside) {
    launches_of(plan).split_kv(with_group_parts(p, plan.group_parts), plan, beside, stream);
}

void run(const AttentionParams& p, const StreamKPlan& plan, cudaStream_t stream) {
    launches_of(plan).stream_k(with_group_parts(p, plan.group_parts), plan, stream);
}

}  // namespace octavo::cuda
