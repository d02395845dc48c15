// Which kernel a call would run, and why not another one.
#pragma once

#include <octavo/attention.h>
#include <octavo/paged_attention.h>

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace octavo {

using PlanValue = std::variant<bool, int64_t, std::string>;

struct Explanation {
    std::string kernel;   // "split_kv_decode<bfloat16, head_dim 128, 8 rows>"
    std::string summary;  // how the kernel cuts the work: "8 KV heads x 1 sequence x 6 splits, ..."
    std::string file;     // that holds the kernel, from the root of the repository
    std::vector<std::pair<std::string, PlanValue>> plan;  // what was decided, by name
    // The other kernels that compute the same operator, each with the reason why it does not run, a sentence.
    std::vector<std::pair<std::string, std::string>> why_not;

    // The kernel, its work and its file in one line; then a line for each entry of why_not.
    std::string to_string() const;
};

}  // namespace octavo
