#include "emu.h"
namespace octavo::cuda { alignas(1024) char shared[kSharedSize]; }
std::vector<Cta> ctas; std::vector<Fiber> fibers; int cur, loaded_cta = -1, threads_per_cta, cluster_arrived; ucontext_t scheduler; long emu_progress;
Dim emu_block, emu_grid, emu_thread;
static const std::function<void()>* body;
static void entry() { (*body)(); fibers[cur].done = true; swapcontext(&fibers[cur].context, &scheduler); }
void emu_run(int num_ctas, int cluster, int threads, const std::function<void()>& kernel) {
    body = &kernel; threads_per_cta = threads; emu_grid.x = num_ctas;
    for (int first = 0; first < num_ctas; first += cluster) {
        ctas.assign(cluster, {}); fibers.clear(); fibers.resize(cluster * threads); cluster_arrived = 0; loaded_cta = -1;
        for (auto& c : ctas) { c.memory.resize(kSharedSize); for (size_t i = 0; i + 1 < c.memory.size(); i += 2) { c.memory[i] = (char)0xff; c.memory[i + 1] = 0x7f; } }
        for (size_t i = 0; i < fibers.size(); ++i) {
            Fiber& f = fibers[i]; f.cta = i / threads; f.thread = i % threads; f.stack.resize(64 << 10);
            getcontext(&f.context); f.context.uc_stack.ss_sp = f.stack.data(); f.context.uc_stack.ss_size = f.stack.size(); f.context.uc_link = nullptr;
            makecontext(&f.context, entry, 0);
        }
        for (;;) {
            bool all = true, moved = false;
            for (int c = 0; c < cluster; ++c) {
                // to this CTA's memory
                if (loaded_cta != c) { if (loaded_cta >= 0) memcpy(ctas[loaded_cta].memory.data(), octavo::cuda::shared, kSharedSize); memcpy(octavo::cuda::shared, ctas[c].memory.data(), kSharedSize); loaded_cta = c; }
                for (bool again = true; again;) {
                    again = false;
                    for (int t = 0; t < threads; ++t) {
                        const int i = c * threads + t; Fiber& f = fibers[i];
                        if (f.done) continue;
                        cur = i; emu_block.x = first + c; emu_thread.x = t;
                        if (f.ready && !f.ready()) continue;
                        f.ready = nullptr; again = moved = true;
                        swapcontext(&scheduler, &f.context);
                    }
                }
                for (int t = 0; t < threads; ++t) all = all && fibers[c * threads + t].done;
            }
            if (all) break;
            if (!moved) { printf("deadlock\n"); for (auto& f : fibers) if (!f.done) { printf("cta %d thread %d waits\n", f.cta, f.thread); break; } exit(1); }
        }
    }
}
