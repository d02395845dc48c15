// Neighbours in a row, loaded or stored at once.
#pragma once

namespace octavo::cuda {

template <class T, int kWide>
struct alignas(kWide * sizeof(T)) Columns {
    T at[kWide];
};

}  // namespace octavo::cuda
