// The attention of chunk_attend.cuh for compute capability 9.0 (sm_90a) and bfloat16 heads of 256.
//
// Two warpgroups hold 64 query rows each; a third one copies keys and values, two tiles ahead. The
// scores of a tile are multiplied right before the values of the last one, and its softmax runs
// beside the latter; what one warpgroup does not multiply, the other may.

#include "tensor.cuh"
#include "wgmma.cuh"
#include "chunk_attend.cuh"

#define ROWS 128            // query rows of a block
#define PANEL (KEYS * 128)  // bytes of 64 values of the keys of a tile

// A tile, by four warps, a row each at a time; zeros behind the live rows.
DEVICE void load_tile(elem* to, const elem* rows, i64 first, i64 end) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const elem* from = rows + (first + warp) * (HK * D) + lane * 8;
    const int turn = swizzled<KEYS>(warp + 4, lane) - swizzled<KEYS>(warp, lane);
    const int live = (int)min((i64)KEYS, end - first);
    to += swizzled<KEYS>(warp, lane);
    if (live == KEYS)
#pragma unroll
        for (int r = 0; r < KEYS; r += 4)
            copy_async(to + r / 8 * 512 + r % 8 / 4 * turn, from + r * (HK * D), true);
    else
        for (int r = 0; r < KEYS; r += 4)
            copy_async(to + r / 8 * 512 + r % 8 / 4 * turn,
                       warp + r < live ? from + r * (HK * D) : rows, warp + r < live);
}

extern "C" __global__ void __launch_bounds__(384)
attend_rows(const elem* q, const elem* k_rows, const elem* v_rows, const i64* count,
            const i64* position, float* partial, float* marks) {
    extern __shared__ float4 shared[];
    elem* qs = (elem*)((char*)shared + (-shared_at(shared) & 1023));
    elem* ks = qs + ROWS * D;       // two tiles
    elem* vs = ks + 2 * KEYS * D;
    u64* q_there = (u64*)(vs + 2 * KEYS * D);
    u64 *k_there = q_there + 1, *v_there = k_there + 2;
    u64 *k_free = v_there + 2, *v_free = k_free + 2;
    start_next();
    if (threadIdx.x == 0) {
        barrier_open(q_there, 256);
        for (int i = 0; i < 4; ++i) barrier_open(k_there + i, 128);
        for (int i = 0; i < 4; ++i) barrier_open(k_free + i, 8);
    }
    __syncthreads();
    const int kv = blockIdx.y, first = blockIdx.x * ROWS, live = (int)*count;
    const i64 at = *position, split = split_at(at);  // nothing in this fold has moved it yet
    const i64 begin = blockIdx.z * split;
    const i64 end = min(at + min(live, (first + ROWS - 1) / GROUP + 1), begin + split);
    if (first >= live * GROUP || begin >= end) {
        wait_inputs();
        return;
    }
    const int tiles = (int)((end - begin + KEYS - 1) / KEYS);
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp >= 8) {
        keep_registers<40>();
        bool waits = true;  // for rows of this fold
        for (int i = 0; i <= tiles; ++i) {
            if (waits && (i == tiles - 1 || begin + (i + 1) * KEYS > at)) {
                wait_inputs();
                waits = false;
            }
            if (i < tiles) {
                if (i >= 2) barrier_pass(k_free + i % 2, i / 2 - 1 & 1);
                load_tile(ks + i % 2 * (KEYS * D), k_rows + kv * D, begin + i * KEYS, end);
                barrier_reach_copied(k_there + i % 2);
            }
            if (i >= 1) {
                const int j = i - 1;
                if (j >= 2) barrier_pass(v_free + j % 2, j / 2 - 1 & 1);
                load_tile(vs + j % 2 * (KEYS * D), v_rows + kv * D, begin + j * KEYS, end);
                barrier_reach_copied(v_there + j % 2);
            }
        }
        commit();
        arrive<0>();
        return;
    }
    take_registers<232>();
    wait_inputs();
    const int block = warp / 4 * 64;  // of the rows
    qs += block * D;
    for (int r = warp % 4; r < 64; r += 4) {
        const bool there = first + block + r < PACKED;
        copy_async(qs + swizzled<64>(r, lane),
                   q + ((i64)kv * PACKED + (there ? first + block + r : 0)) * D + lane * 8, there);
    }
    barrier_reach_copied(q_there);
    float o[D / 2], s[KEYS / 2], top[2] = {-INFINITE, -INFINITE}, sum[2] = {0.0f, 0.0f}, shrink[2];
    u32 p[KEYS / 16][4];
#pragma unroll
    for (int n = 0; n < D / 2; ++n) o[n] = 0.0f;
    const int row = first + block + warp % 4 * 16 + lane / 4;  // and row + 8
    const float scale = rsqrtf((float)D) * 1.44269504f;
    const u64 queries = described(shared_at(qs), 16);
    const u64 keys = described(shared_at(ks), 16), values = described(shared_at(vs), PANEL);

    auto multiply_keys = [&](int i) {
        barrier_pass(k_there + i % 2, i / 2 & 1);
        show_products();
        begin_products();
        const u64 tile = keys + i % 2 * (KEYS * D / 8);
#pragma unroll
        for (int d = 0; d < D / 16; ++d)
            multiply_rows(s, queries + d / 4 * (64 * 8) + d % 4 * 2,
                          tile + d / 4 * (PANEL / 16) + d % 4 * 2, d > 0);
        commit_products();
    };
    auto multiply_values = [&](int i) {
        barrier_pass(v_there + i % 2, i / 2 & 1);
        show_products();
        begin_products();
        const u64 tile = values + i % 2 * (KEYS * D / 8);
#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k) multiply_turned(o, p[k], tile + k * 128);
        commit_products();
    };
    // Online, in base 2: s becomes what values are weighted with.
    auto soften = [&](int i) {
        const i64 base = begin + i * KEYS;
#pragma unroll
        for (int n = 0; n < KEYS / 2; ++n) pin(s[n]);
        // Most tiles lie before all queries of the block.
        if (base + KEYS > end || base + KEYS > at + first / GROUP + 1) {
            const int reach[2] = {(int)(min(at + row / GROUP + 1, end) - base),
                                  (int)(min(at + (row + 8) / GROUP + 1, end) - base)};
#pragma unroll
            for (int n = 0; n < KEYS / 2; ++n)
                if (n / 4 * 8 + lane % 4 * 2 + n % 2 >= reach[n / 2 % 2]) s[n] = -INFINITE;
        }
        float peak[2] = {-INFINITE, -INFINITE}, shift[2], line[2] = {0.0f, 0.0f};
#pragma unroll
        for (int n = 0; n < KEYS / 2; ++n) peak[n / 2 % 2] = fmaxf(peak[n / 2 % 2], s[n]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            peak[half] = fmaxf(peak[half], __shfl_xor_sync(0xffffffffu, peak[half], 1));
            peak[half] = fmaxf(peak[half], __shfl_xor_sync(0xffffffffu, peak[half], 2));
            peak[half] = fmaxf(peak[half] * scale, top[half]);
            shift[half] = peak[half] == -INFINITE ? 0.0f : peak[half];
            shrink[half] = fast_exp2(top[half] - shift[half]);
            top[half] = peak[half];
        }
#pragma unroll
        for (int n = 0; n < KEYS / 2; ++n) {
            s[n] = fast_exp2(fmaf(s[n], scale, -shift[n / 2 % 2]));
            line[n / 2 % 2] += s[n];
            pin(s[n]);  // now, while values are multiplied
        }
        sum[0] = sum[0] * shrink[0] + line[0];
        sum[1] = sum[1] * shrink[1] + line[1];
    };
    auto pin_values = [&] {
#pragma unroll
        for (int n = 0; n < D / 2; ++n) pin(o[n]);
    };
    auto pack = [&] {
#pragma unroll
        for (int n = 0; n < KEYS / 4; ++n) {
            p[n / 4][n % 4] = pack_bf16(s[2 * n], s[2 * n + 1]);
            pin_bits(p[n / 4][n % 4]);
        }
    };

    barrier_pass(q_there, 0);
    multiply_keys(0);
    finish_products<0>();
    if (lane == 0) barrier_reach(k_free);
    soften(0);
    for (int i = 1;; ++i) {
        finish_products<0>();  // a new round keeps ptxas from waiting before it softens
        pin_values();
        if (i > 1 && lane == 0) barrier_reach(v_free + i % 2);
        if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f))  // seldom, later on
#pragma unroll
            for (int n = 0; n < D / 2; ++n) o[n] *= shrink[n / 2 % 2];
        pack();
        if (i == tiles) break;
        multiply_keys(i);
        multiply_values(i - 1);
        finish_products<1>();
        if (lane == 0) barrier_reach(k_free + i % 2);
        soften(i);
    }
    multiply_values(tiles - 1);
    finish_products<0>();
    pin_values();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int mine = row + 8 * half;
        float line = sum[half];
        line += __shfl_xor_sync(0xffffffffu, line, 1);
        line += __shfl_xor_sync(0xffffffffu, line, 2);
        if (mine >= live * GROUP) continue;
        const i64 place = ((i64)blockIdx.z * HK + kv) * PACKED + mine;
        if (lane % 4 == 0) *(float2*)(marks + 2 * place) = make_float2(top[half], line);
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
            *(float2*)(partial + place * D + n * 8 + lane % 4 * 2) =
                make_float2(o[4 * n + 2 * half], o[4 * n + 2 * half + 1]);
    }
}
