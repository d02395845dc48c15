// Every row of operators/schema.h means one argument: its name is that of its member in both structs.
#include "operators/schema.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <utility>

namespace octavo {
namespace {

// "q" for &AttentionArgs::q, from what the compiler calls this function: "... member =
// &octavo::AttentionArgs::q]".
template <auto member>
std::string name_of() {
    std::string_view text = __PRETTY_FUNCTION__;
    text.remove_prefix(text.find("member = "));
    text = text.substr(0, text.find_first_of(";)]"));
    text.remove_prefix(text.rfind(':') + 1);
    return std::string(text);
}

TEST(Schema, MemberNamesAreFound) {
    EXPECT_EQ(name_of<&AttentionArgs::softcap>(), "softcap");
    EXPECT_EQ(name_of<&octavo_append_kv_args::k_pages>(), "k_pages");
}

template <class Operator, size_t... I>
void expect_names(std::index_sequence<I...>) {
    auto expect_name = [](auto index) {
        constexpr auto argument = std::get<decltype(index)::value>(Operator::kArguments);
        EXPECT_EQ(name_of<argument.member>(), argument.name);
        if constexpr (argument.c_member != nullptr) {
            EXPECT_EQ(name_of<argument.c_member>(), argument.name);
        }
    };
    (expect_name(std::integral_constant<size_t, I>{}), ...);
}

TEST(Schema, NamesAreThoseOfTheMembers) {
    schema::for_each_operator([](auto op) {
        using Operator = decltype(op);
        SCOPED_TRACE(Operator::kName);
        expect_names<Operator>(std::make_index_sequence<schema::kNumArguments<Operator>>());
    });
}

}  // namespace
}  // namespace octavo
