#include "emu.h"
#include "checks/checks.h"
#include "cuda/linear/plan.h"
#include "cuda/linear/output.h"
#include "cuda/sm90_linear/flat.cuh"
#include "cuda/sm90_linear/wide.cuh"
#include "cuda/sm90_linear/plan.h"
#include <octavo/linear.h>
#include <random>
using namespace octavo; using namespace octavo::cuda;
static std::mt19937 gen(7);
static int pick(std::initializer_list<int> v) { return v.begin()[gen() % v.size()]; }
using bf = __nv_bfloat16;
static uint16_t bits(float f) { bf x = __float2bfloat16_rn(f); uint16_t u; memcpy(&u, &x, 2); return u; }
static float num(uint16_t u) { bf x; memcpy(&x, &u, 2); return (float)x; }
static CUtensorMap map_of(const void* base, int64_t rows, int64_t halves, int64_t stride, int64_t depth, int32_t tile_rows, int32_t panels, bool stages) {
    const int32_t box = tile_rows / halves; EmuMap m;
    if (!stages) m = {(const uint16_t*)base, {depth, rows, halves, 1, 1}, {stride, rows * stride, 64, 64}, {64, box, (int)halves, 1, 1}};
    else m = {(const uint16_t*)base, {64, rows, halves, depth / 64, 1}, {stride, rows * stride, 64, 64}, {64, box, (int)halves, panels, 1}};
    CUtensorMap out; memcpy(&out, &m, sizeof(m)); return out;
}
template <class Config> static void flat(const Sm90LinearLaunch& a, const Sm90LinearPlan& plan) { emu_run(plan.num_ctas, plan.tile.splits, Config::kThreads, [&] { sm90_flat_kernel<bf, Config>(a); }); }
template <class Config> static void wide(const Sm90LinearLaunch& a, const Sm90LinearPlan& plan) { emu_run(plan.num_ctas, plan.tile.splits, Config::kThreads, [&] { sm90_wide_kernel<bf, Config>(a); }); }
static bool launch(const Sm90LinearLaunch& a, const Sm90LinearPlan& plan) {
    const auto t = plan.tile;
#define F(W, X, P) if (t.kernel == Sm90LinearKernel::flat && t.w_rows == W && t.x_rows == X) { if (plan.normalises) flat<FlatConfig<W, X, P, true>>(a, plan); else flat<FlatConfig<W, X, P, false>>(a, plan); return true; }
    F(16, 8, 4) F(16, 16, 4) F(48, 8, 4) F(48, 16, 4) F(96, 8, 2) F(96, 16, 2) F(64, 16, 2) F(112, 8, 2) F(32, 16, 4)
#define W(R, X) if (t.kernel == Sm90LinearKernel::wide && t.w_rows == R && t.x_rows == X) { wide<WideConfig<R, X>>(a, plan); return true; }
    W(64, 16) W(80, 32) W(96, 64) W(176, 16) W(176, 64) W(256, 128) W(112, 128)
    return false;
}
int main(int argc, char** argv) {
    const int count = atoi(argv[1]); int done = 0; double worst = 0; int by[2][5] = {};
    const Gpu* gpu = find_gpu("h100");
    for (int n = 0; done < count; ++n) {
        struct K { Sm90LinearKernel k; int w, x; };
        static const K kernels[] = {{Sm90LinearKernel::flat, 16, 8}, {Sm90LinearKernel::flat, 16, 16}, {Sm90LinearKernel::flat, 48, 8}, {Sm90LinearKernel::flat, 48, 16}, {Sm90LinearKernel::flat, 96, 8}, {Sm90LinearKernel::flat, 96, 16}, {Sm90LinearKernel::flat, 64, 16}, {Sm90LinearKernel::flat, 112, 8}, {Sm90LinearKernel::flat, 32, 16},
            {Sm90LinearKernel::wide, 64, 16}, {Sm90LinearKernel::wide, 80, 32}, {Sm90LinearKernel::wide, 96, 64}, {Sm90LinearKernel::wide, 176, 16}, {Sm90LinearKernel::wide, 176, 64}, {Sm90LinearKernel::wide, 256, 128}, {Sm90LinearKernel::wide, 112, 128}};
        const K k = kernels[gen() % 16];
        const bool is_flat = k.k == Sm90LinearKernel::flat;
        const bool norm = is_flat && gen() % 4 != 0;
        const int act = pick({0, 0, 1, 3, 3});
        const bool gated = act == 3, bias = gen() % 4 == 0, residual = gen() % 2;
        const int64_t depth = pick({8, 64, 136, 200, 256, 576, 1000, 1024}), rows = std::max(1, k.x - pick({0, 1, 3, 7}) + pick({0, 0, 0, k.x}));
        int64_t width = k.w * pick({1, 2}) / (gated ? 2 : 1) + pick({0, 8, -8, -5, 16}); if (width < 1) width = 8;
        const int64_t w_rows = gated ? 2 * width : width, row = depth + 8 * pick({0, 1}), out_row = width + pick({0, 8, 3});
        const Sm90LinearTile tile{k.k, k.w, k.x, pick({1, 1, 2, 4, 8}), pick({1, 2})};
        const auto plan = plan_sm90_linear({rows, w_rows, depth}, DType::bfloat16, *gpu, tile, norm);
        if (!plan || (!is_flat && (double)rows * w_rows * depth > 3e8)) continue;
        std::normal_distribution<float> d;
        auto make = [&](int64_t r, int64_t c, int64_t stride, float s) { std::vector<uint16_t> v(r * stride, 0x7fff); for (int64_t i = 0; i < r; ++i) for (int64_t j = 0; j < c; ++j) v[i * stride + j] = bits(d(gen) * s); return v; };
        auto x = make(rows, depth, row, 1), w = make(w_rows, depth, row, 1 / std::sqrt((float)depth)), b = make(1, w_rows, w_rows, 1), r = make(rows, width, out_row, 1), g = make(1, depth, depth, 1);
        std::vector<uint16_t> out(rows * out_row, 0x7fff);
        Sm90LinearLaunch a{}; const LinearStage stage = plan->stage(); const int64_t halves = gated ? 2 : 1;
        a.copies_stages = depth % 64 == 0;
        a.w = map_of(w.data(), width, halves, row, depth, tile.w_rows, stage.panels, a.copies_stages);
        a.x = map_of(x.data(), rows, 1, row, depth, tile.x_rows, stage.panels, a.copies_stages);
        a.static_weight = gen() % 2; a.steps = plan->steps; a.splits = tile.splits; a.x_tiles = plan->x_tiles; a.num_tiles = plan->w_tiles * plan->x_tiles; a.w_tiles = plan->w_tiles;
        a.column_groups = (int)ceil_divide(width, 8); a.stages = plan->stages; a.stage_bytes = stage.bytes(); a.panels = stage.panels;
        LinearParams p{}; p.dtype = DType::bfloat16; if (act == 1) p.activation = Activation::silu; if (act == 3) p.activation = Activation::silu_gate;
        p.num_rows = rows; p.width = width; p.depth = depth; if (bias) p.bias = b.data(); const bool in_place = residual && gen() % 2;
        if (in_place) out = r;
        if (residual) p.residual = in_place ? out.data() : r.data(); p.out = out.data(); p.residual_rows.strides[0] = out_row; p.out_rows.strides[0] = out_row;
        a.output = output_of(p);
        if (norm) { a.norm_weight = map_of(g.data(), 1, 1, depth, depth, 1, stage.panels, a.copies_stages); a.norm_offset = plan->norm_offset; a.norm_eps = 1e-3f; a.depth = (int)depth; }
        if (!launch(a, *plan)) { printf("no kernel\n"); return 1; }
        for (int64_t i = 0; i < rows; ++i) {
            double mean = 0; for (int64_t j = 0; j < depth; ++j) mean += std::pow(num(x[i * row + j]), 2) / depth;
            const double f = norm ? 1 / std::sqrt(mean + 1e-3) : 1;
            auto sum = [&](int64_t c) { double s = 0; for (int64_t j = 0; j < depth; ++j) s += num(x[i * row + j]) * f * (norm ? num(g[j]) : 1) * num(w[c * row + j]); return s + (bias ? num(b[c]) : 0); };
            auto silu = [](double s) { return s / (1 + std::exp(-s)); };
            for (int64_t c = 0; c < out_row; ++c) {
                const uint16_t got = out[i * out_row + c];
                if (c >= width) { if (got != 0x7fff) { printf("gap written\n"); return 1; } continue; }
                double want = gated ? silu(sum(c)) * sum(c + width) : act == 1 ? silu(sum(c)) : sum(c);
                if (residual) want += num(r[i * out_row + c]);
                const double error = std::fabs(num(got) - want), allowed = std::fabs(want) / (norm ? 50 : 200) + (norm ? 0.03 : 1e-4);
                if (!(error <= allowed)) { printf("case %d: %s row %ld column %ld: got %g want %g (depth %ld width %ld act %d bias %d residual %d norm %d rows %ld in pairs %d)\n", n, describe(*plan).to_string().c_str(), i, c, num(got), want, depth, width, act, bias, residual, norm, rows, a.output.in_pairs); return 1; }
                worst = std::max(worst, error / allowed);
            }
        }
        ++done; by[is_flat][norm ? 4 : act]++;
    }
    printf("%d cases, worst %.2f of what is allowed; wide plain %d silu %d gate %d; flat plain %d silu %d gate %d norm %d\n", done, worst, by[0][0], by[0][1], by[0][3], by[1][0], by[1][1], by[1][3], by[1][4]);
}
