// A program that unloads a library with Octavo inside, whose threads live on.
#include <gtest/gtest.h>

#include <dlfcn.h>

#include <chrono>
#include <thread>

namespace {

TEST(Plugin, MayBeUnloadedAndLoadedAgain) {
    for (int i = 0; i < 3; ++i) {
        void* plugin = dlopen(PLUGIN, RTLD_NOW | RTLD_LOCAL);
        ASSERT_TRUE(plugin) << dlerror();
        auto* run = reinterpret_cast<float (*)()>(dlsym(plugin, "run_on_four_threads"));
        ASSERT_TRUE(run) << dlerror();
        EXPECT_NEAR(run(), 1.0f, 1e-5f);
        EXPECT_EQ(dlclose(plugin), 0);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));  // threads fall asleep, or wake
    }
}

}  // namespace
