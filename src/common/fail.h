// Throws errors whose messages are put together from parts.
#pragma once

#include <octavo/error.h>

#include <sstream>

namespace octavo {

// fail<ValueError>("append_kv", "page_size (", 0, ") must be at least 1") throws
// "append_kv: page_size (0) must be at least 1".
template <class Exception, class... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
    std::ostringstream text;
    text << op << ": ";
    (text << ... << parts);
    throw Exception(text.str());
}

}  // namespace octavo
