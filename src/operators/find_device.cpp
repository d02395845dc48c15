#include "operators/find_device.h"

#include "common/fail.h"
#include "cuda/backend.h"

#include <octavo/error.h>

#include <algorithm>

namespace octavo {

const cuda::Gpu* find_device(const char* op, const std::string& device) {
    if (device == "cpu") return nullptr;
    if (const cuda::Gpu* gpu = cuda::find_gpu(device)) return gpu;
    const std::string own = "cuda:", index = device.substr(std::min(own.size(), device.size()));
    if (device == own + index && !index.empty() && index.size() < 4 &&
        index.find_first_not_of("0123456789") == std::string::npos) {
        std::string why_none;
        const size_t count = cuda::gpu_info(&why_none).size(), ordinal = std::stoul(index);
        if (count == 0) fail<DeviceError>(op, "there is no ", device, " here: ", why_none);
        if (ordinal >= count)
            fail<ValueError>(op, "there is no ", device, " among the ", count, " GPUs here");
        return &cuda::gpu_of(static_cast<int32_t>(ordinal));
    }
    std::string names;
    for (const std::string& name : cuda::gpu_names()) names += name + ", ";
    fail<ValueError>(op, "device must be one of cpu, ", names,
                     "or a GPU of this machine, such as cuda:0; got ", device);
}

}  // namespace octavo
