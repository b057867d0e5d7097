// One token of gated attention: QK norm, rotary, row append, flash decode, output gate.
//
// Rows are split by a fixed size, so the result depends on the position alone. A block has one
// split of SPLIT rows and one KV head with its GROUP query heads; the last block of a KV head to
// finish joins the splits in their order. mixed: fp32, per query head D queries and D gates, then
// HK keys, then HK values. Blocks behind the live rows leave at once.

#define ROW_CHUNKS (D / VEC)               // 16-byte vectors of a row
#define LANES (ROW_CHUNKS < 8 ? ROW_CHUNKS : 8)  // lanes that share a row's score
#define PER_LANE (ROW_CHUNKS / LANES)
#define SLOTS (256 / ROW_CHUNKS)           // rows that the value pass takes at once

DEVICE void norm_rotate(const float* x, const float* factor, float eps, const float* cosine,
                        const float* sine, float* out, int lane) {
    // One warp: out[D] = rotary(rms_norm(x) * factor); the sign of the swap lies in sine.
    float sum = 0.0f;
    for (int d = lane; d < D; d += 32) sum = fmaf(x[d], x[d], sum);
    const float scale = rsqrtf(warp_sum(sum) / D + eps);
    for (int d = lane; d < D; d += 32) {
        float y = x[d] * factor[d] * scale;
        if (d < ROTARY) {
            const int other = d < ROTARY / 2 ? d + ROTARY / 2 : d - ROTARY / 2;
            y = y * cosine[d] + x[other] * factor[other] * scale * sine[d];
        }
        out[d] = y;
    }
}

extern "C" __global__ void __launch_bounds__(256)
attend(const float* mixed, elem* k_rows, elem* v_rows, const i64* position, const float* qk_norm,
       float eps, const float* cosine, const float* sine, float* partial, float* marks,
       u32* tickets, float* out) {
    extern __shared__ float4 shared[];
    float* qs = (float*)shared;             // [GROUP][D]
    float* scores = qs + GROUP * D;         // [GROUP][SPLIT]
    float* values = scores + GROUP * SPLIT; // [SLOTS][GROUP][D]
    __shared__ float stats[2][GROUP];
    __shared__ u32 ticket;
    const int kv = blockIdx.y, tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    start_next();
    wait_inputs();
    const int at = (int)*position, length = at + 1;
    const int first = blockIdx.x * SPLIT, splits = (length + SPLIT - 1) / SPLIT;
    if (first >= length) return;
    const int rows = min(SPLIT, length - first);
    const float* cos_at = cosine + (i64)at * ROTARY;
    const float* sin_at = sine + (i64)at * ROTARY;
    for (int g = warp; g < GROUP; g += 8) {
        const int head = kv * GROUP + g;
        norm_rotate(mixed + head * 2 * D, qk_norm + head * D, eps, cos_at, sin_at, qs + g * D, lane);
    }
    if (at < first + rows) {  // the split that holds the new row
        float* fresh = values;
        if (warp == 7) {
            norm_rotate(mixed + (HK * GROUP * 2 + kv) * D, qk_norm + (HK * GROUP + kv) * D, eps,
                        cos_at, sin_at, fresh, lane);
            __syncwarp();
            for (int d = lane; d < D; d += 32)
                k_rows[((i64)at * HK + kv) * D + d] = from_float(fresh[d]);
        }
        for (int d = tid; d < D; d += 256)
            v_rows[((i64)at * HK + kv) * D + d] =
                from_float(mixed[(HK * GROUP * 2 + HK + kv) * D + d]);
    }
    __syncthreads();
    // Scores: LANES lanes a row.
    const float scale = rsqrtf((float)D);
    const int part = lane % LANES, sub = lane / LANES, many = 32 / LANES;
    for (int base = warp * many; base < rows; base += 8 * many) {
        const int r = base + sub;
        float dot[GROUP];
#pragma unroll
        for (int g = 0; g < GROUP; ++g) dot[g] = 0.0f;
        if (r < rows) {
            const elem* row = k_rows + ((i64)(first + r) * HK + kv) * D;
            uint4 raw[PER_LANE];
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i)
                raw[i] = *(const uint4*)(row + (i * LANES + part) * VEC);
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) {
                float w[VEC];
                widen(raw[i], w);
#pragma unroll
                for (int g = 0; g < GROUP; ++g) {
                    const float4* q4 = (const float4*)(qs + g * D + (i * LANES + part) * VEC);
#pragma unroll
                    for (int j = 0; j < VEC / 4; ++j) {
                        const float4 q = q4[j];
                        dot[g] = fmaf(w[4 * j], q.x, dot[g]);
                        dot[g] = fmaf(w[4 * j + 1], q.y, dot[g]);
                        dot[g] = fmaf(w[4 * j + 2], q.z, dot[g]);
                        dot[g] = fmaf(w[4 * j + 3], q.w, dot[g]);
                    }
                }
            }
        }
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
#pragma unroll
            for (int offset = LANES / 2; offset; offset >>= 1)
                dot[g] += __shfl_xor_sync(0xffffffffu, dot[g], offset);
            if (part == 0 && r < rows) scores[g * SPLIT + r] = dot[g] * scale;
        }
    }
    __syncthreads();
    for (int g = warp; g < GROUP; g += 8) {
        float top = -INFINITE, sum = 0.0f;
        for (int r = lane; r < rows; r += 32) top = fmaxf(top, scores[g * SPLIT + r]);
        top = warp_max(top);
        for (int r = lane; r < rows; r += 32) {
            const float e = __expf(scores[g * SPLIT + r] - top);
            scores[g * SPLIT + r] = e;
            sum += e;
        }
        sum = warp_sum(sum);
        if (lane == 0) { stats[0][g] = top; stats[1][g] = sum; }
    }
    __syncthreads();
    {
        const int chunk = tid % ROW_CHUNKS, slot = tid / ROW_CHUNKS;
        float acc[GROUP][VEC];
#pragma unroll
        for (int g = 0; g < GROUP; ++g)
#pragma unroll
            for (int i = 0; i < VEC; ++i) acc[g][i] = 0.0f;
        const elem* column = v_rows + ((i64)first * HK + kv) * D + chunk * VEC;
#pragma unroll 4
        for (int r = slot; r < rows; r += SLOTS) {
            float w[VEC];
            widen(*(const uint4*)(column + (i64)r * HK * D), w);
#pragma unroll
            for (int g = 0; g < GROUP; ++g) {
                const float p = scores[g * SPLIT + r];
#pragma unroll
                for (int i = 0; i < VEC; ++i) acc[g][i] = fmaf(p, w[i], acc[g][i]);
            }
        }
#pragma unroll
        for (int g = 0; g < GROUP; ++g)
#pragma unroll
            for (int i = 0; i < VEC; ++i)
                values[(slot * GROUP + g) * D + chunk * VEC + i] = acc[g][i];
    }
    __syncthreads();
    float* mine = partial + ((i64)kv * gridDim.x + blockIdx.x) * GROUP * D;
    for (int i = tid; i < GROUP * D; i += 256) {
        float sum = 0.0f;
        for (int slot = 0; slot < SLOTS; ++slot) sum += values[slot * GROUP * D + i];
        mine[i] = sum;
    }
    float* mark = marks + ((i64)kv * gridDim.x + blockIdx.x) * GROUP * 2;
    if (tid < GROUP) { mark[2 * tid] = stats[0][tid]; mark[2 * tid + 1] = stats[1][tid]; }
    __threadfence();
    __syncthreads();
    if (tid == 0) ticket = atomicAdd(tickets + kv, 1u);
    __syncthreads();
    if (ticket != splits - 1) return;
    __threadfence();
    if (tid == 0) tickets[kv] = 0;
    const volatile float* seen = marks + (i64)kv * gridDim.x * GROUP * 2;
    const float* all = partial + (i64)kv * gridDim.x * GROUP * D;
    for (int i = tid; i < GROUP * D; i += 256) {
        const int g = i / D, d = i % D, head = kv * GROUP + g;
        float top = -INFINITE, sum = 0.0f, value = 0.0f;
        for (int s = 0; s < splits; ++s) top = fmaxf(top, seen[(s * GROUP + g) * 2]);
#pragma unroll 8
        for (int s = 0; s < splits; ++s) {
            const float share = __expf(seen[(s * GROUP + g) * 2] - top);
            sum = fmaf(seen[(s * GROUP + g) * 2 + 1], share, sum);
            value = fmaf(__ldcg(all + (i64)s * GROUP * D + i), share, value);
        }
        out[head * D + d] = value / sum * sigmoid(mixed[head * 2 * D + D + d]);
    }
}
