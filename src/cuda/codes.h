// The kinds of codes in pages that kernels have instances for.
#pragma once

#include <octavo/tensor.h>

#include <cstdint>
#include <optional>
#include <string>

namespace octavo::cuda {

// `none` means keys and values of 16 bits, of the type of the queries.
enum class Codes : uint8_t { none, e4m3, e5m2, int8, int4, int8_int4 };

constexpr Codes kAllCodes[] = {Codes::e4m3, Codes::e5m2, Codes::int8, Codes::int4, Codes::int8_int4};

constexpr DType type_of_keys(Codes codes) {
    switch (codes) {
        case Codes::none: break;
        case Codes::e4m3: return DType::float8_e4m3fn;
        case Codes::e5m2: return DType::float8_e5m2;
        case Codes::int8: return DType::int8;
        case Codes::int4: return DType::int4;
        case Codes::int8_int4: return DType::int8;
    }
    return DType::float16;
}
constexpr DType type_of_values(Codes codes) {
    return codes == Codes::int8_int4 ? DType::int4 : type_of_keys(codes);
}

constexpr int bits_of(DType type) { return type == DType::int4 ? 4 : 8 * static_cast<int>(size_of(type)); }
constexpr int bits_of_keys(Codes codes) { return bits_of(type_of_keys(codes)); }
constexpr int bits_of_values(Codes codes) { return bits_of(type_of_values(codes)); }

// A name for what the pages hold, for queries of a type: "float16", "int8", "int8 and int4".
inline std::string name_of(DType queries, Codes codes) {
    if (codes == Codes::none) return to_string(queries);
    const DType keys = type_of_keys(codes), values = type_of_values(codes);
    return to_string(keys) + (keys == values ? "" : " and " + to_string(values));
}

// Returns the kind for pages of these types; nothing where no instance reads them.
constexpr std::optional<Codes> codes_of(DType keys, DType values) {
    if (!is_code(keys)) return Codes::none;
    for (Codes codes : kAllCodes) {
        if (type_of_keys(codes) == keys && type_of_values(codes) == values) return codes;
    }
    return std::nullopt;
}

}  // namespace octavo::cuda
