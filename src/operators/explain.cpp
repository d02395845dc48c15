#include <octavo/explain.h>

#include "common/fail.h"
#include "cpu/backend.h"
#include "cuda/backend.h"
#include "operators/find_device.h"
#include "operators/schema.h"

namespace octavo {
namespace {

TensorView* view_of(TensorView& array) { return &array; }
TensorView* view_of(std::optional<TensorView>& array) { return array ? &*array : nullptr; }

// Moves the arrays to the device `meta`. Each array without an address gets one, far from all others.
template <class Operator>
void move_to_meta(typename Operator::Args& args) {
    uintptr_t address = 0;
    schema::for_each_argument<Operator>([&](const auto& argument) {
        if constexpr (std::decay_t<decltype(argument)>::kIsArray) {
            address += uintptr_t{1} << 52;
            TensorView* const array = view_of(args.*argument.member);
            if (!array) return;
            array->device = {DeviceType::meta, 0};
            if (!array->data) array->data = reinterpret_cast<void*>(address);
        }
    });
}

template <class Operator>
bool has_meta_arrays(typename Operator::Args& args) {
    bool found = false;
    schema::for_each_argument<Operator>([&](const auto& argument) {
        if constexpr (std::decay_t<decltype(argument)>::kIsArray) {
            const TensorView* const array = view_of(args.*argument.member);
            found = found || (array && array->device.type == DeviceType::meta);
        }
    });
    return found;
}

template <class Operator>
Explanation explain_call(typename Operator::Args args, const std::string& device) {
    if (device.empty()) {
        if (has_meta_arrays<Operator>(args))
            fail<ValueError>(Operator::kName, "explain needs a device for arrays that have shapes alone");
        const auto params = Operator::kCheck(args);
        if (params.device.type == DeviceType::cpu) return cpu::explain(params);
        return cuda::explain(params, cuda::gpu_of(params.device.index));
    }
    const cuda::Gpu* const gpu = find_device(Operator::kName, device);
    move_to_meta<Operator>(args);
    const auto params = Operator::kCheck(args);
    if (!gpu) return cpu::explain(params);
    const std::string why_not = why_refused_on_cuda(params);
    if (!why_not.empty()) fail<TypeError>(Operator::kName, why_not);
    return cuda::explain(params, *gpu);
}

}  // namespace

Explanation explain(const AttentionArgs& args, const std::string& device) {
    return explain_call<schema::Attention>(args, device);
}
Explanation explain(const PagedAttentionArgs& args, const std::string& device) {
    return explain_call<schema::PagedAttention>(args, device);
}
Explanation explain(const AppendKvArgs& args, const std::string& device) {
    return explain_call<schema::AppendKv>(args, device);
}
Explanation explain(const CopyPagesArgs& args, const std::string& device) {
    return explain_call<schema::CopyPages>(args, device);
}
Explanation explain(const MergeStatesArgs& args, const std::string& device) {
    return explain_call<schema::MergeStates>(args, device);
}
Explanation explain(const AttentionBackwardArgs& args, const std::string& device) {
    return explain_call<schema::AttentionBackward>(args, device);
}

Explanation explain(const LinearArgs& args, const std::string& device) {
    if (args.plan && device == "cpu")
        fail<ValueError>("linear", "plan is for a GPU; device is cpu, where one kernel computes all");
    return explain_call<schema::Linear>(args, device);
}

Explanation explain(const RmsNormArgs& args, const std::string& device) {
    return explain_call<schema::RmsNorm>(args, device);
}

Explanation explain(const LatentAttentionArgs& args, const std::string& device) {
    return explain_call<schema::LatentAttention>(args, device);
}

std::vector<std::string> explainable_gpus() { return cuda::gpu_names(); }

std::string Explanation::to_string() const {
    std::string text = kernel + ": " + summary;
    if (!file.empty()) text += " (" + file + ")";
    for (const auto& [other, reason] : why_not) text += "\n  not " + other + ": " + reason;
    return text;
}

}  // namespace octavo
