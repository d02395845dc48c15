#include <octavo/explain.h>

namespace octavo {

std::string Explanation::to_string() const {
    std::string text = kernel + ": " + summary;
    if (!file.empty()) text += " (" + file + ")";
    for (const auto& [other, reason] : why_not) text += "\n  not " + other + ": " + reason;
    return text;
}

}  // namespace octavo
