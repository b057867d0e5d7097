// The attention of chunk_attend.cuh for all devices.

#include "tensor.cuh"
#include "chunk_attend.cuh"

// QK norm, rotary, row append. One warp a head; heads: HK GROUP queries, HK keys.
extern "C" __global__ void __launch_bounds__(256)
qk_rows(const elem* mixed, const i64* count, const i64* position, const float* qk_norm, float eps,
        const float* cosine, const float* sine, elem* q, elem* k_rows, elem* v_rows) {
    constexpr int EACH = (D + 31) / 32, TURNED = (ROTARY + 31) / 32;  // values of a lane
    start_next();
    const int lane = threadIdx.x % 32, head = blockIdx.x * 8 + threadIdx.x / 32;
    const int t = blockIdx.y;
    const bool live = head < HK * (GROUP + 1) && t < *count;
    const i64 at = live ? *position + t : 0;  // nothing in this fold has moved it yet
    const bool key = head >= HK * GROUP;
    const int kv = head - HK * GROUP;
    const elem* row = mixed + (i64)t * WIDTH;
    const elem* x = row + (key ? (2 * HK * GROUP + kv) * D : 2 * head * D);
    float factor[EACH], by[TURNED], across[TURNED], y[EACH], other[TURNED], sum = 0.0f;
    auto partner = [](int d) { return d < ROTARY / 2 ? d + ROTARY / 2 : d - ROTARY / 2; };
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        factor[i] = live && lane + 32 * i < D ? qk_norm[head * D + lane + 32 * i] : 0.0f;
#pragma unroll
    for (int i = 0; i < TURNED; ++i) {
        const int d = lane + 32 * i;
        const bool here = live && d < ROTARY;
        by[i] = here ? cosine[at * ROTARY + d] : 0.0f;
        across[i] = here ? sine[at * ROTARY + d] * qk_norm[head * D + partner(d)] : 0.0f;
    }
    wait_inputs();
    if (!live) return;
    elem value[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int d = lane + 32 * i;
        y[i] = d < D ? to_float(x[d]) : 0.0f;
        value[i] = key && d < D ? row[(2 * HK * GROUP + HK + kv) * D + d] : from_float(0.0f);
    }
#pragma unroll
    for (int i = 0; i < TURNED; ++i)
        other[i] = lane + 32 * i < ROTARY ? to_float(x[partner(lane + 32 * i)]) : 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) sum = fmaf(y[i], y[i], sum);
    const float scale = rsqrtf(warp_sum(sum) / D + eps);
    elem* out = key ? k_rows + (at * HK + kv) * D
                    : q + ((i64)(head / GROUP) * PACKED + t * GROUP + head % GROUP) * D;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int d = lane + 32 * i;
        float z = y[i] * factor[i] * scale;
        if (i < TURNED && d < ROTARY) z = z * by[i] + other[i] * scale * across[i];
        if (d < D) out[d] = from_float(z);
        if (key && d < D) v_rows[(at * HK + kv) * D + d] = value[i];
    }
}

#if ELEMENT == 16
#define TILE 64
#define PITCH (D + 8)  // elements; keeps 16-byte rows on different banks

// TILE rows, zeros behind the live ones. Nearly all tiles are whole: then an address a thread is
// all there is to compute.
template <int STRIDE>
DEVICE void load_rows(elem* to, const elem* rows, i64 first, int live) {
    constexpr int STEP = 128 / (D / 8);  // rows that all threads copy at once
    const int r = threadIdx.x / (D / 8), c = threadIdx.x % (D / 8) * 8;
    const elem* from = rows + (first + r) * STRIDE + c;
    to += r * PITCH + c;
    if (live >= TILE)
#pragma unroll
        for (int i = 0; i < TILE; i += STEP) copy_async(to + i * PITCH, from + i * STRIDE, true);
    else
#pragma unroll
        for (int i = 0; i < TILE; i += STEP)
            copy_async(to + i * PITCH, r + i < live ? from + i * STRIDE : rows, r + i < live);
}

// Four warps, each 16 query rows against TILE keys at a time (online softmax in base 2).
extern "C" __global__ void __launch_bounds__(128)
attend_rows(const elem* q, const elem* k_rows, const elem* v_rows, const i64* count,
            const i64* position, float* partial, float* marks) {
    extern __shared__ float4 shared[];
    elem* qs = (elem*)shared;
    elem* ks = qs + TILE * PITCH;
    elem* vs = ks + TILE * PITCH;
    start_next();
    wait_inputs();
    const int kv = blockIdx.y, first = blockIdx.x * TILE, live = (int)*count;
    if (first >= live * GROUP) return;
    const i64 at = *position, split = split_at(at);
    const i64 begin = blockIdx.z * split;
    const i64 end = min(at + min(live, (first + TILE - 1) / GROUP + 1), begin + split);
    if (begin >= end) return;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const elem* keys = k_rows + kv * D;
    const elem* values = v_rows + kv * D;
    load_rows<D>(qs, q + (i64)kv * PACKED * D, first, min(TILE, PACKED - first));
    load_rows<HK * D>(ks, keys, begin, (int)min((i64)TILE, end - begin));
    commit();
    float o[D / 8][4], top[2] = {-INFINITE, -INFINITE}, sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < D / 8; ++n) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
    const int row = first + warp * 16 + lane / 4;  // and row + 8
    const float scale = rsqrtf((float)D) * 1.44269504f;
    for (i64 base = begin; base < end; base += TILE) {
        load_rows<HK * D>(vs, values, base, (int)min((i64)TILE, end - base));
        commit();
        arrive<1>();
        __syncthreads();
        float s[TILE / 8][4];
#pragma unroll
        for (int n = 0; n < TILE / 8; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll 4
        for (int d = 0; d < D; d += 16) {
            u32 a[4];
            matrices(a, qs + (warp * 16 + lane % 16) * PITCH + d + lane / 16 * 8);
#pragma unroll
            for (int n = 0; n < TILE / 16; ++n) {
                u32 b[4];
                matrices(b, ks + (n * 16 + lane % 8 + lane / 16 * 8) * PITCH + d
                            + lane / 8 % 2 * 8);
                multiply(s[2 * n], a, b[0], b[1]);
                multiply(s[2 * n + 1], a, b[2], b[3]);
            }
        }
        __syncthreads();
        if (base + TILE < end)
            load_rows<HK * D>(ks, keys, base + TILE, (int)min((i64)TILE, end - base - TILE));
        commit();
        // Most spans lie before all queries of the block.
        const bool whole = base + TILE <= end && base + TILE <= at + first / GROUP + 1;
        u32 p[TILE / 8][2];
        float shrink[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int reach = (int)(min(at + (row + 8 * half) / GROUP + 1, end) - base);
            float peak = -INFINITE;
#pragma unroll
            for (int n = 0; n < TILE / 8; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& x = s[n][2 * half + i];
                    if (!whole && n * 8 + lane % 4 * 2 + i >= reach) x = -INFINITE;
                    peak = fmaxf(peak, x);
                }
            peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 1));
            peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 2));
            peak = fmaxf(peak * scale, top[half]);
            const float shift = peak == -INFINITE ? 0.0f : peak;
            float line = 0.0f;
#pragma unroll
            for (int n = 0; n < TILE / 8; ++n) {
                const float x = fast_exp2(fmaf(s[n][2 * half], scale, -shift));
                const float y = fast_exp2(fmaf(s[n][2 * half + 1], scale, -shift));
                line += x + y;
                p[n][half] = pack_bf16(x, y);
            }
            shrink[half] = fast_exp2(top[half] - shift);
            top[half] = peak;
            sum[half] = sum[half] * shrink[half] + line;
        }
        if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f))  // seldom, later on
#pragma unroll
            for (int n = 0; n < D / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) o[n][i] *= shrink[i / 2];
        arrive<1>();
        __syncthreads();
#pragma unroll
        for (int k = 0; k < TILE / 16; ++k) {
            const u32 a[4] = {p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1]};
#pragma unroll
            for (int n = 0; n < D / 16; ++n) {
                u32 b[4];
                matrices_turned(b, vs + (k * 16 + lane % 16) * PITCH + n * 16 + lane / 16 * 8);
                multiply(o[2 * n], a, b[0], b[1]);
                multiply(o[2 * n + 1], a, b[2], b[3]);
            }
        }
        __syncthreads();
    }
    arrive<0>();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int mine = row + 8 * half;
        float line = sum[half];
        line += __shfl_xor_sync(0xffffffffu, line, 1);
        line += __shfl_xor_sync(0xffffffffu, line, 2);
        if (mine >= live * GROUP) continue;
        const i64 place = ((i64)blockIdx.z * HK + kv) * PACKED + mine;
        if (lane % 4 == 0) { marks[2 * place] = top[half]; marks[2 * place + 1] = line; }
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
            *(float2*)(partial + place * D + n * 8 + lane % 4 * 2) =
                make_float2(o[n][2 * half], o[n][2 * half + 1]);
    }
}

#else
// fp32: 16 query rows against KEYS keys, 32, at a time, no tensor cores: exact rather than fast.
#define TILE 16

extern "C" __global__ void __launch_bounds__(256)
attend_rows(const elem* q, const elem* k_rows, const elem* v_rows, const i64* count,
            const i64* position, float* partial, float* marks) {
    extern __shared__ float4 shared[];
    float* qs = (float*)shared;            // [TILE][D]
    float* ks = qs + TILE * D;             // [KEYS][D + 1]
    float* vs = ks + KEYS * (D + 1);       // [KEYS][D]
    float* s = vs + KEYS * D;              // [TILE][KEYS + 1]
    start_next();
    wait_inputs();
    const int kv = blockIdx.y, first = blockIdx.x * TILE, live = (int)*count;
    if (first >= live * GROUP) return;
    const i64 at = *position, split = split_at(at);
    const i64 begin = blockIdx.z * split;
    const i64 end = min(at + min(live, (first + TILE - 1) / GROUP + 1), begin + split);
    if (begin >= end) return;
    const int tid = threadIdx.x, r = tid / 16, c = tid % 16, row = first + r;
    for (int i = tid; i < TILE * D; i += 256)
        qs[i] = first + i / D < live * GROUP ? q[((i64)kv * PACKED + first) * D + i] : 0.0f;
    float o[(D + 15) / 16] = {}, top = -INFINITE, sum = 0.0f;
    const i64 reach = at + row / GROUP;
    const float scale = rsqrtf((float)D) * 1.44269504f;
    for (i64 base = begin; base < end; base += KEYS) {
        __syncthreads();
        for (int i = tid; i < KEYS * D; i += 256) {
            const int key = i / D, d = i % D;
            const bool here = base + key < end;
            ks[key * (D + 1) + d] = here ? k_rows[((base + key) * HK + kv) * D + d] : 0.0f;
            vs[i] = here ? v_rows[((base + key) * HK + kv) * D + d] : 0.0f;
        }
        __syncthreads();
        float x[2], peak = top;
        for (int i = 0; i < 2; ++i) {
            const int key = c + 16 * i;
            float dot = 0.0f;
            for (int d = 0; d < D; ++d) dot = fmaf(qs[r * D + d], ks[key * (D + 1) + d], dot);
            x[i] = base + key <= reach && base + key < end ? dot * scale : -INFINITE;
            peak = fmaxf(peak, x[i]);
        }
        for (int offset = 8; offset; offset >>= 1)
            peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, offset));
        const float shift = peak == -INFINITE ? 0.0f : peak, shrink = exp2f(top - shift);
        float line = 0.0f;
        for (int i = 0; i < 2; ++i) {
            const float p = exp2f(x[i] - shift);
            s[r * (KEYS + 1) + c + 16 * i] = p;
            line += p;
        }
        for (int offset = 8; offset; offset >>= 1)
            line += __shfl_xor_sync(0xffffffffu, line, offset);
        top = peak;
        sum = sum * shrink + line;
        __syncwarp();
        for (int i = 0; i < (D + 15) / 16; ++i) {
            const int d = c + 16 * i;
            float y = o[i] * shrink;
            if (d < D)
                for (int key = 0; key < KEYS; ++key)
                    y = fmaf(s[r * (KEYS + 1) + key], vs[key * D + d], y);
            o[i] = y;
        }
    }
    if (row >= live * GROUP) return;
    const i64 place = ((i64)blockIdx.z * HK + kv) * PACKED + row;
    if (c == 0) { marks[2 * place] = top; marks[2 * place + 1] = sum; }
    for (int i = 0; i < (D + 15) / 16; ++i)
        if (c + 16 * i < D) partial[place * D + c + 16 * i] = o[i];
}
#endif

// Join the splits of every row and apply the output gate: out [SIZE][HK GROUP][D]. Four values of
// a head are a thread's; where splits are many (SHARED) or heads small, JOINERS threads share the
// splits among them. A head has whole warps, a block HEADS heads of a token.
#define JOINERS (D * SHARED < 128 ? 128 / D : SHARED)
#define HEADS (1024 / (D * JOINERS))

extern "C" __global__ void __launch_bounds__(256)
join_rows(const float* partial, const float* marks, const elem* mixed, const i64* count,
          const i64* position, elem* out) {
    constexpr int EACH = (MOST + JOINERS - 1) / JOINERS;  // splits of a thread
    __shared__ float shares[HEADS][MOST];
    __shared__ float4 parts[JOINERS][HEADS][D / 4];
    start_next();
    const int slot = threadIdx.x / (D / 4 * JOINERS), joiner = threadIdx.x / (D / 4) % JOINERS;
    const int head = blockIdx.x * HEADS + slot, t = blockIdx.y;
    const int lane = threadIdx.x % 32, d = threadIdx.x % (D / 4) * 4;
    const bool here = head < HK * GROUP;
    const i64 at = *position;  // nothing in this fold has moved it yet
    const int splits = here ? (int)(at + t) / split_at(at) + 1 : 0;
    const bool live = t < *count;
    wait_inputs();
    elem* to = out + ((i64)t * HK * GROUP + head) * D + d;
    if (!live) {  // never computed: keep the product behind it finite
        if (here && joiner == 0) to[0] = to[1] = to[2] = to[3] = from_float(0.0f);
        return;
    }
    const i64 pitch = (i64)HK * PACKED;
    const i64 place = (i64)(head / GROUP) * PACKED + t * GROUP + head % GROUP;
    float4 x[EACH], y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int s = joiner + i * JOINERS;
        x[i] = s < splits ? *(const float4*)(partial + (s * pitch + place) * D + d) : y;
    }
    float gate[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        gate[i] = here ? to_float(mixed[(i64)t * WIDTH + 2 * head * D + D + d + i]) : 0.0f;
    if (threadIdx.x % (D / 4 * JOINERS) < 32) {
        float2 mark[(MOST + 31) / 32];  // the highest score of a split, and its sum
        float top = -INFINITE, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < MOST; i += 32) {
            mark[i / 32] = lane + i < splits ? ((const float2*)marks)[place + (lane + i) * pitch]
                                             : make_float2(-INFINITE, 0.0f);
            top = fmaxf(top, mark[i / 32].x);
        }
        top = warp_max(top);
#pragma unroll
        for (int i = 0; i < MOST; i += 32) sum += mark[i / 32].y * exp2f(mark[i / 32].x - top);
        sum = warp_sum(sum);
#pragma unroll
        for (int i = 0; i < MOST; i += 32)
            if (lane + i < MOST) shares[slot][lane + i] = exp2f(mark[i / 32].x - top) / sum;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int s = joiner + i * JOINERS;
        const float share = s < splits ? shares[slot][s] : 0.0f;
        y.x = fmaf(x[i].x, share, y.x);
        y.y = fmaf(x[i].y, share, y.y);
        y.z = fmaf(x[i].z, share, y.z);
        y.w = fmaf(x[i].w, share, y.w);
    }
    if (JOINERS > 1) {
        if (joiner) parts[joiner][slot][d / 4] = y;
        __syncthreads();
        if (joiner) return;
        for (int i = 1; i < JOINERS; ++i) {
            const float4 part = parts[i][slot][d / 4];
            y.x += part.x;
            y.y += part.y;
            y.z += part.z;
            y.w += part.w;
        }
    }
    if (!here) return;
    to[0] = from_float(y.x * sigmoid(gate[0]));
    to[1] = from_float(y.y * sigmoid(gate[1]));
    to[2] = from_float(y.z * sigmoid(gate[2]));
    to[3] = from_float(y.w * sigmoid(gate[3]));
}
