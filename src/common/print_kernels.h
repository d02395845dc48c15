// With OCTAVO_PRINT_KERNELS=1 in the environment, what runs is printed on stderr.
#pragma once

#include <octavo/explain.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#include <string_view>

namespace octavo {

inline bool prints_kernels() {
    static const bool prints = [] {
        const char* const value = std::getenv("OCTAVO_PRINT_KERNELS");
        return value && std::string_view(value) != "" && std::string_view(value) != "0";
    }();
    return prints;
}

// Prints what runs, in one line, unless that has been printed before.
inline void print_kernel(Explanation explanation) {
    static std::mutex& mutex = *new std::mutex;  // calls may outlive static objects
    static std::set<std::string>& printed = *new std::set<std::string>;
    explanation.why_not.clear();
    const std::string line = "octavo: " + explanation.to_string() + "\n";
    const std::lock_guard<std::mutex> lock(mutex);
    if (printed.insert(line).second) std::fputs(line.c_str(), stderr);
}

}  // namespace octavo
