// One token of gated attention: QK norm, rotary, row append, flash decode, output gate.
//
// Rows are split by a fixed size, so the result depends on the position alone. A block has one
// split of SPLIT rows and one KV head with its GROUP query heads; a second kernel joins the splits
// in their order. Keys and values of earlier tokens are asked for before this token's projections
// are there. mixed: fp32, per query head D queries and D gates, then HK keys, then HK values.
// Blocks behind the live rows leave at once.

#define ROW_CHUNKS (D / VEC)                     // 16-byte vectors of a row
#define LANES (ROW_CHUNKS < 8 ? ROW_CHUNKS : 8)  // lanes that share a row's score
#define PER_LANE (ROW_CHUNKS / LANES)
#define MANY (32 / LANES)                        // rows a warp scores at once
#define TURNS ((SPLIT + 8 * MANY - 1) / (8 * MANY))
#define SLOTS (256 / ROW_CHUNKS)                 // rows that the value pass takes at once
#define JOINED 1024                              // splits whose shares are kept at once
#define DEPTH ((SPLIT + SLOTS - 1) / SLOTS)

DEVICE void norm_rotate(const float* x, const float* factor, float eps, const float* cosine,
                        const float* sine, float* out, int lane) {
    // One warp: out[D] = rotary(rms_norm(x) * factor); the sign of the swap lies in sine.
    constexpr int EACH = (D + 31) / 32;
    float y[EACH], f[EACH], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int d = lane + 32 * i;
        y[i] = d < D ? x[d] : 0.0f;
        f[i] = d < D ? factor[d] : 0.0f;
        sum = fmaf(y[i], y[i], sum);
    }
    const float scale = rsqrtf(warp_sum(sum) / D + eps);
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (lane + 32 * i < D) out[lane + 32 * i] = y[i] * f[i] * scale;
    __syncwarp();
    for (int d = lane; d < ROTARY / 2; d += 32) {
        const int e = d + ROTARY / 2;
        const float a = out[d], b = out[e];
        out[d] = a * cosine[d] + b * sine[d];
        out[e] = b * cosine[e] + a * sine[e];
    }
}

extern "C" __global__ void __launch_bounds__(256)
attend(const float* mixed, elem* k_rows, elem* v_rows, const i64* position, const float* qk_norm,
       float eps, const float* cosine, const float* sine, float* partial, float* marks,
       const char* ahead, i64 ahead_bytes) {
    extern __shared__ float4 shared[];
    float* qs = (float*)shared;             // [GROUP][D]
    float* scores = qs + GROUP * D;         // [GROUP][SPLIT]
    float* values = scores + GROUP * SPLIT; // [SLOTS][GROUP][D]
    const int kv = blockIdx.y, tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    start_next();
    ask_ahead(ahead, ahead_bytes, (i64)(blockIdx.y * gridDim.x + blockIdx.x) * 256 + tid,
              (i64)gridDim.x * gridDim.y * 256);
    const int at = (int)*position, length = at + 1;  // nothing in this fold has moved it yet
    const int first = blockIdx.x * SPLIT;
    if (first >= length) return;  // block 0 always stays, and waits for all
    const int rows = min(SPLIT, length - first);
    const int part = lane % LANES, sub = lane / LANES;
    uint4 raw[TURNS][PER_LANE];
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const int r = (turn * 8 + warp) * MANY + sub;
        const elem* row = k_rows + ((i64)(first + r) * HK + kv) * D;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
            raw[turn][i] = r < rows && first + r < at
                ? *(const uint4*)(row + (i * LANES + part) * VEC) : make_uint4(0, 0, 0, 0);
    }
    for (int i = tid; i < rows * (int)(D * sizeof(elem)) / 64; i += 256) {
        const int per = D * sizeof(elem) / 64;
        const char* line = (const char*)(v_rows + ((i64)(first + i / per) * HK + kv) * D);
        ask_ahead(line + i % per * 64, 1, 0, 1);
    }
    wait_inputs();
    const float* cos_at = cosine + (i64)at * ROTARY;
    const float* sin_at = sine + (i64)at * ROTARY;
    for (int g = warp; g < GROUP; g += 8) {
        const int head = kv * GROUP + g;
        norm_rotate(mixed + head * 2 * D, qk_norm + head * D, eps, cos_at, sin_at, qs + g * D, lane);
    }
    const bool owner = at < first + rows;  // the split that holds the new row
    if (owner) {
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
    const float scale = rsqrtf((float)D);
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const int r = (turn * 8 + warp) * MANY + sub;
        if (owner && first + r == at) {
            const elem* row = k_rows + ((i64)at * HK + kv) * D;
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i)
                raw[turn][i] = *(const uint4*)(row + (i * LANES + part) * VEC);
        }
        float dot[GROUP];
#pragma unroll
        for (int g = 0; g < GROUP; ++g) dot[g] = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            float w[VEC];
            widen(raw[turn][i], w);
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
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
#pragma unroll
            for (int offset = LANES / 2; offset; offset >>= 1)
                dot[g] += __shfl_xor_sync(0xffffffffu, dot[g], offset);
            if (part == 0 && r < rows) scores[g * SPLIT + r] = dot[g] * scale;
        }
    }
    __syncthreads();
    const i64 place = (i64)kv * gridDim.x + blockIdx.x;
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
        if (lane == 0) {
            marks[(place * GROUP + g) * 2] = top;
            marks[(place * GROUP + g) * 2 + 1] = sum;
        }
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
        constexpr int BATCH = DEPTH < 8 ? DEPTH : 8;
        for (int base = 0; base < DEPTH; base += BATCH) {
            uint4 v[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const int r = slot + (base + b) * SLOTS;
                v[b] = r < rows ? *(const uint4*)(column + (i64)r * HK * D)
                                : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const int r = slot + (base + b) * SLOTS;
                float w[VEC];
                widen(v[b], w);
#pragma unroll
                for (int g = 0; g < GROUP; ++g) {
                    const float p = r < rows ? scores[g * SPLIT + r] : 0.0f;
#pragma unroll
                    for (int i = 0; i < VEC; ++i) acc[g][i] = fmaf(p, w[i], acc[g][i]);
                }
            }
        }
#pragma unroll
        for (int g = 0; g < GROUP; ++g)
#pragma unroll
            for (int i = 0; i < VEC; ++i)
                values[(slot * GROUP + g) * D + chunk * VEC + i] = acc[g][i];
    }
    __syncthreads();
    for (int i = tid; i < GROUP * D; i += 256) {
        float sum = 0.0f;
#pragma unroll
        for (int slot = 0; slot < SLOTS; ++slot) sum += values[slot * GROUP * D + i];
        partial[place * GROUP * D + i] = sum;
    }
}

// Join the splits of one query head and apply the output gate. splits: of the whole capacity.
extern "C" __global__ void __launch_bounds__(256)
join(const float* mixed, const i64* position, const float* partial, const float* marks, int splits,
     float* out) {
    __shared__ float shares[JOINED];
    __shared__ float sums[8], tops[8];
    __shared__ float parts[256];
    const int head = blockIdx.x, kv = head / GROUP, g = head % GROUP, tid = threadIdx.x;
    const int lane = tid % 32, warp = tid / 32;
    start_next();
    const int used = (int)*position / SPLIT + 1;
    wait_inputs();
    const float* mark = marks + ((i64)kv * splits * GROUP + g) * 2;
    const float* from = partial + ((i64)kv * splits * GROUP + g) * D;
    float top = -INFINITE;
    for (int s = tid; s < used; s += 256) top = fmaxf(top, mark[(i64)s * GROUP * 2]);
    top = warp_max(top);
    if (lane == 0) tops[warp] = top;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < 8; ++w) top = fmaxf(top, tops[w]);
    constexpr int WIDE = D < 256 ? D : 256, SIDES = 256 / WIDE;  // sides: splits taken at once
    const int side = tid / WIDE;
    float sum = 0.0f, value[(D + 255) / 256] = {};
    for (int base = 0; base < used; base += JOINED) {
        const int count = min(JOINED, used - base);
        __syncthreads();
        for (int s = tid; s < count; s += 256) {
            const float share = __expf(mark[(i64)(base + s) * GROUP * 2] - top);
            shares[s] = share;
            sum = fmaf(mark[(i64)(base + s) * GROUP * 2 + 1], share, sum);
        }
        __syncthreads();
#pragma unroll 16
        for (int s = side; s < count; s += SIDES)
#pragma unroll
            for (int j = 0; j < (D + 255) / 256; ++j)
                value[j] = fmaf(from[(i64)(base + s) * GROUP * D + tid % WIDE + 256 * j],
                                shares[s], value[j]);
    }
    sum = warp_sum(sum);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (int w = 0; w < 8; ++w) sum += sums[w];
#pragma unroll
    for (int j = 0; j < (D + 255) / 256; ++j) {
        __syncthreads();
        parts[tid] = value[j];
        __syncthreads();
        if (side == 0) {
            float y = 0.0f;
            for (int s = 0; s < SIDES; ++s) y += parts[s * WIDE + tid];
            const int d = tid + 256 * j;
            out[head * D + d] = y / sum * sigmoid(mixed[head * 2 * D + D + d]);
        }
    }
}
