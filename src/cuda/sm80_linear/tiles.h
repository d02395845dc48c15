// What sm80_linear is compiled for.
#pragma once

#include <cstdint>

namespace octavo::cuda {

constexpr int32_t kSm80LinearWRows = 32;
constexpr int32_t kSm80LinearXRows[] = {8, 16};
constexpr int32_t kSm80LinearStages = 2;

}  // namespace octavo::cuda
