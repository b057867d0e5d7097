// Gated attention of one token, or of TOKENS in a row: QK norm, rotary, row append, flash decode,
// output gate.
//
// Rows are split by a size that depends on the position alone, and so does the result: SPLIT, half
// of it for tokens before NEAR, where whole splits would leave multiprocessors idle. A block has one
// split and one KV head with its GROUP query heads; a second kernel joins the splits in their order. What does not depend on this token is on its way before its projections are
// there: keys in registers, values in shared memory. mixed: fp32, a token's queries and gates (D each
// a head), then HK keys, then HK values. Blocks behind the live rows leave at once. Of several
// tokens (*count are live) the rows are written by a kernel in front; one token's block does it.

#ifndef TOKENS
#define TOKENS 1
#endif
#define WIDTH ((2 * GROUP + 2) * HK * D)

#define ROW_CHUNKS (D / VEC)                     // 16-byte vectors of a row
#define LANES (ROW_CHUNKS < 8 ? ROW_CHUNKS : 8)  // lanes that share a row's score
#define PER_LANE (ROW_CHUNKS / LANES)
#define MANY (32 / LANES)                        // rows a warp scores at once
#define SLOTS (256 / ROW_CHUNKS)                 // rows that the value pass takes at once
#define EACH ((D + 31) / 32)                     // values of a head that a lane has
#define PAIRS ((ROTARY / 2 + 31) / 32)           // pairs of a head that a lane turns

// One warp: out[D] = rotary(rms_norm(x) * factor); the sign of the swap lies in the sine.
DEVICE void norm_rotate(const float* x, const float (&factor)[EACH], float eps,
                        const float (&turn)[PAIRS][4], float* out, int lane) {
    float y[EACH], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        y[i] = lane + 32 * i < D ? x[lane + 32 * i] : 0.0f;
        sum = fmaf(y[i], y[i], sum);
    }
    const float scale = rsqrtf(warp_sum(sum) / D + eps);
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (lane + 32 * i < D) out[lane + 32 * i] = y[i] * factor[i] * scale;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const int d = lane + 32 * i, e = d + ROTARY / 2;
        if (d >= ROTARY / 2) continue;
        const float a = out[d], b = out[e];
        out[d] = a * turn[i][0] + b * turn[i][1];
        out[e] = b * turn[i][2] + a * turn[i][3];
    }
}

struct Turn {  // what a lane needs to turn a head of its warp to a position
    float factor[EACH], by[PAIRS][4];
    DEVICE Turn(const float* norm, const float* cosine, const float* sine, int lane) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) factor[i] = lane + 32 * i < D ? norm[lane + 32 * i] : 0.0f;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const int d = lane + 32 * i, e = d + ROTARY / 2;
            const bool here = d < ROTARY / 2;
            by[i][0] = here ? cosine[d] : 0.0f;
            by[i][1] = here ? sine[d] : 0.0f;
            by[i][2] = here ? cosine[e] : 0.0f;
            by[i][3] = here ? sine[e] : 0.0f;
        }
    }
};

// One warp writes the key and value rows of a token and KV head.
DEVICE void append_row(const float* mixed, elem* k_rows, elem* v_rows, i64 at, int kv,
                       const Turn& turn, float eps, float* fresh, int lane) {
    norm_rotate(mixed + (HK * GROUP * 2 + kv) * D, turn.factor, eps, turn.by, fresh, lane);
    __syncwarp();
    for (int d = lane; d < D; d += 32) {
        k_rows[(at * HK + kv) * D + d] = from_float(fresh[d]);
        v_rows[(at * HK + kv) * D + d] = from_float(mixed[(HK * GROUP * 2 + HK + kv) * D + d]);
    }
}

extern "C" __global__ void __launch_bounds__(32)
append_rows(const float* mixed, elem* k_rows, elem* v_rows, const i64* position, const i64* count,
            const float* qk_norm, float eps, const float* cosine, const float* sine) {
    __shared__ float fresh[D];
    const int kv = blockIdx.x, t = blockIdx.y;
    start_next();
    const i64 at = *position + t;  // nothing in this fold has moved it yet
    const bool live = t < *count;
    const i64 place = live ? at : 0;
    const Turn turn(qk_norm + (HK * GROUP + kv) * D, cosine + place * ROTARY, sine + place * ROTARY,
                    threadIdx.x);
    wait_inputs();
    if (live)
        append_row(mixed + t * WIDTH, k_rows, v_rows, at, kv, turn, eps, fresh, threadIdx.x);
}

DEVICE int split_at(int at) { return at < NEAR ? SPLIT / 2 : SPLIT; }

// The block's part of token t, whose position is at; HERE: rows of a split.
template <int HERE>
DEVICE void attend_split(const float* mixed, elem* k_rows, elem* v_rows, int before, int t,
                         const float* qk_norm, float eps, const float* cosine, const float* sine,
                         float* partial, float* marks) {
    constexpr int TURNS = (HERE + 8 * MANY - 1) / (8 * MANY), DEPTH = (HERE + SLOTS - 1) / SLOTS;
    extern __shared__ float4 shared[];
    float* qs = (float*)shared;             // [GROUP][D]
    float* fresh = qs + GROUP * D;          // [D], the new key
    float* scores = fresh + D;              // [GROUP][HERE]
    elem* vs = (elem*)(scores + GROUP * HERE);  // [HERE][D]
    float* values = (float*)vs;             // [SLOTS][GROUP][D], once vs has been read
    const int kv = blockIdx.y, tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int at = before + t, length = at + 1, first = blockIdx.x * HERE;
    const int rows = min(HERE, length - first);
    const int part = lane % LANES, sub = lane / LANES;
    uint4 raw[TURNS][PER_LANE];
    auto keys = [&](int from, int to) {  // ask for the keys of rows [from, to) of this split
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            const int r = (turn * 8 + warp) * MANY + sub;
            const elem* row = k_rows + ((i64)(first + r) * HK + kv) * D;
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i)
                if (r >= from && r < to)
                    raw[turn][i] = *(const uint4*)(row + (i * LANES + part) * VEC);
        }
    };
    auto bring = [&](int from, int to) {  // and the values of all of them, zeros behind the live
        for (int i = from * ROW_CHUNKS + tid; i < to * ROW_CHUNKS; i += 256) {
            const int r = i / ROW_CHUNKS, c = i % ROW_CHUNKS * VEC;
            const elem* row = v_rows + ((i64)(first + (r < rows ? r : 0)) * HK + kv) * D;
            copy_async(vs + r * D + c, row + c, r < rows);
        }
    };
    const int old = max(0, min(rows, before - first));  // rows of earlier folds in this split
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn)
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) raw[turn][i] = make_uint4(0, 0, 0, 0);
    keys(0, old);
    bring(0, old);
    bring(rows, HERE);
    const bool owner = TOKENS == 1 && old < rows;  // writes the new row
    const Turn turn(qk_norm + (warp < GROUP ? kv * GROUP + warp : HK * GROUP + kv) * D,
                    cosine + (i64)at * ROTARY, sine + (i64)at * ROTARY, lane);
    mixed += t * WIDTH;
    wait_inputs();
    if (warp < GROUP)
        norm_rotate(mixed + (kv * GROUP + warp) * 2 * D, turn.factor, eps, turn.by, qs + warp * D,
                    lane);
    if (owner && warp == 7) {
        const Turn own(qk_norm + (HK * GROUP + kv) * D, cosine + (i64)at * ROTARY,
                       sine + (i64)at * ROTARY, lane);
        append_row(mixed, k_rows, v_rows, at, kv, GROUP < 8 ? turn : own, eps, fresh, lane);
    }
    __syncthreads();
    keys(old, rows);
    bring(old, rows);
    commit();
    const float scale = rsqrtf((float)D);
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const int r = (turn * 8 + warp) * MANY + sub;
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
            if (part == 0 && r < HERE) scores[g * HERE + r] = dot[g] * scale;
        }
    }
    __syncthreads();
    const i64 place = ((i64)t * HK + kv) * gridDim.x + blockIdx.x;
    if (warp < GROUP) {
        constexpr int LINES = (HERE + 31) / 32;
        float* line = scores + warp * HERE;
        float x[LINES], top = -INFINITE, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < LINES; ++i) {
            x[i] = lane + 32 * i < rows ? line[lane + 32 * i] : -INFINITE;
            top = fmaxf(top, x[i]);
        }
        top = warp_max(top);
#pragma unroll
        for (int i = 0; i < LINES; ++i) {
            x[i] = __expf(x[i] - top);  // 0 behind the live rows
            sum += x[i];
            if (lane + 32 * i < HERE) line[lane + 32 * i] = x[i];
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            marks[(place * GROUP + warp) * 2] = top;
            marks[(place * GROUP + warp) * 2 + 1] = sum;
        }
    }
    arrive<0>();
    __syncthreads();
    const int chunk = tid % ROW_CHUNKS, slot = tid / ROW_CHUNKS;
    float acc[GROUP][VEC];
#pragma unroll
    for (int g = 0; g < GROUP; ++g)
#pragma unroll
        for (int i = 0; i < VEC; ++i) acc[g][i] = 0.0f;
#pragma unroll 4
    for (int b = 0; b < DEPTH; ++b) {
        const int r = slot + b * SLOTS;
        if (HERE % SLOTS && r >= HERE) break;
        float w[VEC];
        widen(*(const uint4*)(vs + r * D + chunk * VEC), w);
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            const float p = scores[g * HERE + r];
#pragma unroll
            for (int i = 0; i < VEC; ++i) acc[g][i] = fmaf(p, w[i], acc[g][i]);
        }
    }
    __syncthreads();
#pragma unroll
    for (int g = 0; g < GROUP; ++g)
#pragma unroll
        for (int i = 0; i < VEC; ++i)
            values[(slot * GROUP + g) * D + chunk * VEC + i] = acc[g][i];
    __syncthreads();
    for (int i = tid; i < GROUP * D; i += 256) {
        float sum = 0.0f;
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) sum += values[s * GROUP * D + i];
        partial[place * GROUP * D + i] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(256)
attend(const float* mixed, elem* k_rows, elem* v_rows, const i64* position, const i64* count,
       const float* qk_norm, float eps, const float* cosine, const float* sine, float* partial,
       float* marks, const char* ahead, i64 ahead_bytes) {
    const int t = TOKENS > 1 ? blockIdx.z : 0;
    start_next();
    if (threadIdx.x == 0 && !t)
        ask_ahead(ahead, ahead_bytes, blockIdx.y * gridDim.x + blockIdx.x, gridDim.x * gridDim.y);
    const int before = (int)*position, at = before + t;  // nothing in this fold has moved it yet
    // Block 0 stays, and waits for all.
    if (blockIdx.x * split_at(at) > at || (TOKENS > 1 && t >= *count)) return;
    if (at < NEAR)
        attend_split<SPLIT / 2>(mixed, k_rows, v_rows, before, t, qk_norm, eps, cosine, sine,
                                partial, marks);
    else
        attend_split<SPLIT>(mixed, k_rows, v_rows, before, t, qk_norm, eps, cosine, sine, partial,
                            marks);
}

// Join the splits of one query head and apply the output gate. splits: of the whole capacity.
// SIDES threads share a value, each with every SIDES-th split.
#define SIDES (1024 / D)
#define EARLY 8      // splits of a thread that are asked for before their shares are known
#define JOINED 1024  // splits whose shares are kept at once

extern "C" __global__ void __launch_bounds__(SIDES * D)
join(const float* mixed, const i64* position, const i64* count, const float* partial,
     const float* marks, int splits, float* out) {
    __shared__ float shares[JOINED];
    __shared__ float sums[SIDES * D / 32], tops[SIDES * D / 32];
    __shared__ float parts[SIDES][D];
    const int head = blockIdx.x, kv = head / GROUP, g = head % GROUP, tid = threadIdx.x;
    const int lane = tid % 32, warp = tid / 32, d = tid % D, side = tid / D, t = blockIdx.y;
    start_next();
    const int at = (int)*position + t, used = (at < NEAR ? at / (SPLIT / 2) : at / SPLIT) + 1;
    wait_inputs();
    if (TOKENS > 1 && t >= *count) {  // never computed: keep the product behind it finite
        if (!side) out[(t * HK * GROUP + head) * D + d] = 0.0f;
        return;
    }
    const i64 place = ((i64)t * HK + kv) * splits * GROUP + g;
    const float* mark = marks + place * 2;
    const float* from = partial + place * D + d;
    const float gate = mixed[t * WIDTH + head * 2 * D + D + d];
    float early[EARLY];
#pragma unroll
    for (int i = 0; i < EARLY; ++i) {
        const int s = side + i * SIDES;
        early[i] = s < used ? from[(i64)s * GROUP * D] : 0.0f;
    }
    float top = -INFINITE;
    for (int s = tid; s < used; s += SIDES * D) top = fmaxf(top, mark[(i64)s * GROUP * 2]);
    top = warp_max(top);
    if (lane == 0) tops[warp] = top;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < SIDES * D / 32; ++w) top = fmaxf(top, tops[w]);
    float sum = 0.0f, value = 0.0f;
    for (int base = 0; base < used; base += JOINED) {
        const int count = min(JOINED, used - base);
        __syncthreads();
        for (int s = tid; s < count; s += SIDES * D) {
            const float share = __expf(mark[(i64)(base + s) * GROUP * 2] - top);
            shares[s] = share;
            sum = fmaf(mark[(i64)(base + s) * GROUP * 2 + 1], share, sum);
        }
        __syncthreads();
        if (base == 0)
#pragma unroll
            for (int i = 0; i < EARLY; ++i)
                if (side + i * SIDES < count)
                    value = fmaf(early[i], shares[side + i * SIDES], value);
#pragma unroll 8
        for (int s = side + (base ? 0 : EARLY * SIDES); s < count; s += SIDES)
            value = fmaf(from[(i64)(base + s) * GROUP * D], shares[s], value);
    }
    sum = warp_sum(sum);
    if (lane == 0) sums[warp] = sum;
    parts[side][d] = value;
    __syncthreads();
    if (side) return;
    sum = value = 0.0f;
#pragma unroll
    for (int w = 0; w < SIDES * D / 32; ++w) sum += sums[w];
#pragma unroll
    for (int s = 0; s < SIDES; ++s) value += parts[s][d];
    out[(t * HK * GROUP + head) * D + d] = value / sum * sigmoid(gate);
}
