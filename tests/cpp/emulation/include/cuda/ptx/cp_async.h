#pragma once
#include "emu.h"
namespace octavo::cuda::ptx {
inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(static_cast<const char*>(p) - octavo::cuda::shared) + kBase; }
}
