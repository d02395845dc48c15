// What the tests of the page allocator share.
#pragma once

#include <octavo/page_allocator.h>

#include <gtest/gtest.h>

#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

namespace octavo {

// Everything that can be seen of an allocator without changing it.
inline std::string dump(const PageAllocator& allocator, const std::vector<Sequence>& sequences) {
    std::ostringstream text;
    for (size_t i = 0; i < sequences.size(); ++i) {
        text << i << ": " << allocator.length(sequences[i]) << " tokens, pages";
        for (int32_t page : allocator.pages(sequences[i])) text << ' ' << page;
        text << '\n';
    }
    PageAllocatorStats stats = allocator.stats();
    text << stats.num_sequences << " sequences, " << stats.num_used_pages << " used, "
         << stats.num_shared_pages << " shared, " << stats.num_free_pages << " free, " << stats.num_tokens
         << " tokens, " << stats.num_stored_tokens << " stored, " << stats.waste_percent << " % waste";
    return text.str();
}

// How many random calls a test makes: OCTAVO_RANDOM_CALLS in the environment, else what CI has time for.
inline int64_t num_random_calls(int64_t otherwise) {
    const char* wanted = std::getenv("OCTAVO_RANDOM_CALLS");
    return wanted ? std::atoll(wanted) : otherwise;
}

// Whether a test of random calls recounts everything after this one: after each of the first ones, and often
// enough later on.
inline bool is_checked(int64_t call) { return call < 20000 || call % 16 == 0; }

// The message of the Exception that `call` throws.
template <class Exception, class Call>
std::string message_of(const Call& call) {
    try {
        call();
    } catch (const Exception& error) {
        return error.what();
    }
    ADD_FAILURE() << "nothing was thrown";
    return "";
}

// Throws if a page is both read and written, or written twice.
inline void check_copies(const std::vector<PageCopy>& copies) {
    for (size_t i = 0; i < copies.size(); ++i) {
        for (size_t j = 0; j < copies.size(); ++j) {
            if (copies[i].from == copies[j].to) throw Error("a page is both read and written");
            if (i != j && copies[i].to == copies[j].to) throw Error("a page is written twice");
        }
    }
}

}  // namespace octavo
