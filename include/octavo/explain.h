// Which kernel a call would run, and why not another one.
#pragma once

#include <octavo/attention.h>
#include <octavo/latent_attention.h>
#include <octavo/linear.h>
#include <octavo/paged_attention.h>
#include <octavo/rms_norm.h>

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace octavo {

using PlanValue = std::variant<bool, int64_t, std::string>;

struct Explanation {
    std::string kernel;   // "split_kv_decode<bfloat16, head_dim 128, 8 rows>"; "none": no query
    std::string summary;  // how the kernel cuts the work: "8 KV heads x 1 sequence x 6 splits, ..."
    std::string file;     // the file with the kernel, from the root of the repository
    std::vector<std::pair<std::string, PlanValue>> plan;  // what was decided, by name
    // The other kernels that compute the same operator, each with the reason why it does not run, a sentence.
    std::vector<std::pair<std::string, std::string>> why_not;

    // The kernel, its work and its file in one line; then a line for each entry of why_not.
    std::string to_string() const;
};

// What a call with these arguments would run, on the device of its arrays, or on another one by name: "cpu",
// one of explainable_gpus(), or "cuda:0", a GPU of this machine. No GPU is needed for a name, and no values:
// the arrays may be on the device meta, at any address, null included, in which case the device must be
// named. Throws what the call would.
//
// With OCTAVO_PRINT_KERNELS=1 in the environment every call writes to stderr what it launches, in lines like
// the first of this, but those that have been written before.
Explanation explain(const AttentionArgs& args, const std::string& device = {});
Explanation explain(const PagedAttentionArgs& args, const std::string& device = {});
Explanation explain(const AppendKvArgs& args, const std::string& device = {});
Explanation explain(const CopyPagesArgs& args, const std::string& device = {});
Explanation explain(const MergeStatesArgs& args, const std::string& device = {});
Explanation explain(const AttentionBackwardArgs& args, const std::string& device = {});
Explanation explain(const LinearArgs& args, const std::string& device = {});
Explanation explain(const RmsNormArgs& args, const std::string& device = {});
Explanation explain(const LatentAttentionArgs& args, const std::string& device = {});

// Products ("h100") and architectures ("sm_90"), each of which stands for its first product in this list.
std::vector<std::string> explainable_gpus();

}  // namespace octavo
