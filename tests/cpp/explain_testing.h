// What tests ask of explanations, on GPUs and for shapes alone.
#pragma once

#include <octavo/explain.h>

#include <cstdint>
#include <string>
#include <variant>

namespace octavo {

// The kernel without the instance: "split_kv_decode".
inline std::string kind_of(const Explanation& explanation) {
    return explanation.kernel.substr(0, explanation.kernel.find('<'));
}

// A field of the plan, as a text.
inline std::string field(const Explanation& explanation, const std::string& name) {
    struct Text {
        std::string operator()(bool x) const { return x ? "true" : "false"; }
        std::string operator()(int64_t x) const { return std::to_string(x); }
        std::string operator()(const std::string& x) const { return x; }
    };
    for (const auto& [key, value] : explanation.plan) {
        if (key == name) return std::visit(Text{}, value);
    }
    return "no " + name;
}

}  // namespace octavo
