// Arrays in memory of the host, for tests of the operators.
#pragma once

#include <octavo/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <random>
#include <vector>

namespace octavo {

using Floats = std::vector<float>;

inline Floats random_floats(std::mt19937& random, int64_t size) {
    std::normal_distribution<float> normal;
    Floats values(static_cast<size_t>(size));
    for (float& value : values) value = normal(random);
    return values;
}

inline TensorView view(Floats& values, std::initializer_list<int64_t> shape) {
    return TensorView(values.data(), DType::float32, shape);
}

inline TensorView view(std::vector<int32_t>& values, std::initializer_list<int64_t> shape) {
    return TensorView(values.data(), DType::int32, shape);
}

}  // namespace octavo
