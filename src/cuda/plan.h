// What the plans of all kernels have in common.
//
// A plan says which instance of a kernel works through a batch, how it cuts the work, and how much workspace
// it takes. It follows from the checked parameters and from the GPU alone, holds no pointer, and is made
// without CUDA, in every build. attention/run.cpp executes it.
#pragma once

#include <octavo/explain.h>

#include <cstdint>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>

namespace octavo::cuda {

// The types that attention has kernels for, in every instance that there is.
constexpr DType kAttentionTypes[] = {DType::bfloat16, DType::float16};

// Stands for workspace, as far as plans look at addresses: a multiple of 256 bytes with room below it.
inline void* const kSomeWorkspace = reinterpret_cast<void*>(uintptr_t{1} << 46);

struct Grid {
    int64_t x = 1, y = 1, z = 1;

    int64_t size() const { return x * y * z; }
};

// A count with its noun, which texts show as "1 split" or "6 splits".
struct Counted {
    int64_t count;
    const char* noun;
};
inline Counted counted(int64_t count, const char* noun) { return {count, noun}; }
std::ostream& operator<<(std::ostream& out, const Counted& counted);

// Puts the parts of a text together.
template <class... Parts>
std::string text_of(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    return text.str();
}
// "8 KV heads x 2 parts of the query heads", or without parts where there is one.
std::string text_of_heads(int64_t num_kv_heads, int32_t group_parts);

// Returned for a kernel that does not serve a call. Writes down the reason, a sentence about the kernel
// without its full stop, where the caller wants it. Most callers do not, since plans are made at every call.
template <class... Parts>
std::nullopt_t refuse(std::string* why_not, const Parts&... parts) {
    if (why_not) *why_not = text_of(parts...);
    return std::nullopt;
}

// The reason why a kernel does not serve a call that chooses pages.
constexpr const char* kReadsAllPages = "it reads all pages of a sequence, and chosen_pages is given";
// The reason why a kernel does not serve a call with bidirectional ranges.
constexpr const char* kHasNoRanges =
    "it has no instance for bidirectional_ranges, which let queries of this call see more keys";
// The reason why a kernel does not serve a call with symmetric ALiBi.
constexpr const char* kOneSidedAlibi =
    "its ALiBi has no absolute value, and with alibi_symmetric these queries may see keys past their own "
    "position";

inline int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace octavo::cuda
