// Choose the next token, hand it to the host, put its embedding in front of the first layer.
//
// No sort. A first histogram over the top 11 bits of the logits tells which tokens can matter for
// top-k and top-p; usually these are few, and the block that comes last selects among them by radix
// in shared memory. Where they are many, all blocks select together, 11 bits a pass. Probabilities
// are fixed-point integers (2^-44 of the largest), so sums do not depend on their order and the
// choice is the same on every run and every device. BLOCKS blocks must be resident together: they
// meet at barriers.
//
// V: vocabulary, below 2^22.  HIDDEN: width of the embedding.

#include "settings.cuh"

#define THREADS 512
#define SPAN ((V + BLOCKS - 1) / BLOCKS)  // ids of a block
#define EACH ((SPAN + THREADS - 1) / THREADS)  // ids of a thread, neighbours
#define BINS 2048
#define FEW 8                    // candidates of a thread of the last block
#ifndef LIST
#define LIST (THREADS * FEW)
#endif
#define ONE 17592186044416.0  // 2^44

struct Work {  // zero before the first launch; whoever uses a part leaves it zero
    u32 arrived, round, finished, listed;
    u64 best;                // key and inverted id of the largest logit
    u64 coarse[2][BINS];     // counts and masses by the top bits
    u64 list[LIST];          // candidates: key and inverted id
    u64 bins[6][BINS];       // three passes by count, three by mass
    u64 sums[3][BLOCKS];     // ties by block, ties by block, kept mass by block
    u32 limits[2];           // last id of the kept ties
};

DEVICE u32 key_of(float x) {  // unsigned order equals float order
    const u32 bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DEVICE float float_of(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

DEVICE void meet(Work* work) {
    __syncthreads();
    if (threadIdx.x == 0) {
        volatile u32* round = &work->round;
        const u32 before = *round;
        __threadfence();
        if (atomicAdd(&work->arrived, 1u) == BLOCKS - 1) {
            work->arrived = 0;
            __threadfence();
            atomicAdd(&work->round, 1u);
        } else {
            while (*round == before) {}
        }
        __threadfence();
    }
    __syncthreads();
}

DEVICE u64 look(const u64* at) { return *(const volatile u64*)at; }

// Inclusive sums over the threads of a block; returns this thread's.
DEVICE u64 scan(u64 x, u64* room) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
        const u64 other = __shfl_up_sync(0xffffffffu, x, offset);
        if (lane >= offset) x += other;
    }
    __syncthreads();
    if (lane == 31) room[warp] = x;
    __syncthreads();
    for (int w = 0; w < warp; ++w) x += room[w];
    return x;
}

// Largest digit d with sum(bins[d..]) >= wanted; above = sum(bins[d + 1..]). wanted >= 1.
DEVICE void find_digit(const u64* bins, u64 wanted, u32& digit, u64& above, u64* room) {
    __shared__ u32 found;
    __shared__ u64 over;
    const int top = BINS - 1 - threadIdx.x * (BINS / THREADS);  // threads run downwards
    u64 mine[BINS / THREADS], sum = 0;
    for (int i = 0; i < BINS / THREADS; ++i) { mine[i] = look(bins + top - i); sum += mine[i]; }
    const u64 to = scan(sum, room), from = to - sum;
    if (from < wanted && wanted <= to) {
        u64 passed = from;
        int i = 0;
        while (passed + mine[i] < wanted) passed += mine[i++];
        found = top - i;
        over = passed;
    }
    __syncthreads();
    digit = found;
    above = over;
    __syncthreads();
}

DEVICE u64 random_bits(u64 seed, u64 counter) {  // Philox-4x32-10, 53 bits
    u32 x0 = (u32)counter, x1 = (u32)(counter >> 32), x2 = 0, x3 = 0;
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
    for (int i = 0; i < 10; ++i) {
        const u64 p0 = (u64)0xD2511F53u * x0, p1 = (u64)0xCD9E8D57u * x2;
        const u32 a = (u32)(p1 >> 32) ^ x1 ^ k0, b = (u32)(p0 >> 32) ^ x3 ^ k1;
        x1 = (u32)p1; x3 = (u32)p0; x0 = a; x2 = b;
        k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
    }
    return ((u64)x0 << 21) | (x1 >> 11);
}

struct Kept {  // tokens that the thresholds let through
    u32 key, limit;
    DEVICE bool has(u32 k, int id) const { return k > key || (k == key && (u32)id <= limit); }
};

struct Range { int begin, end; };

// The id of tie number `rank` (from 1) among kept ids of equal key; written by its block.
DEVICE void limit_ties(const float* logits, Kept& kept, u32 key, u64 rank, Work* work, int slot,
                       Range ids, u64* room) {
    u64 count = 0;
    for (int id = ids.begin; id < ids.end; ++id) {
        const u32 k = key_of(logits[id]);
        count += k == key && kept.has(k, id);
    }
    const u64 to = scan(count, room);
    if (threadIdx.x == THREADS - 1) work->sums[slot][blockIdx.x] = to;
    meet(work);
    u64 before = 0;
    for (int b = 0; b < blockIdx.x; ++b) before += look(&work->sums[slot][b]);
    u64 seen = before + to - count;
    if (seen < rank && rank <= seen + count)
        for (int id = ids.begin; id < ids.end; ++id) {
            const u32 k = key_of(logits[id]);
            if (k == key && kept.has(k, id) && ++seen == rank) work->limits[slot] = id;
        }
    meet(work);
    kept.key = key;
    kept.limit = *(volatile u32*)&work->limits[slot];
}

// Candidates of the last block: in registers, FEW a thread, in no particular order.
struct Candidates {
    u64 order[FEW];  // larger is earlier: key << 22 | inverted id
    u64 mass[FEW];
    u32 kept;        // a bit each
};

// The smallest prefix in descending order, of weight (mass or count) >= wanted, ends with the
// value that is returned, or (unless exact) before the next candidate. bits: how many of the
// order's low bits to look at. wanted >= 1.
DEVICE u64 select(const Candidates& c, bool by_mass, u64 wanted, int bits, bool exact, u64* bins,
                  u64* room) {
    u64 prefix = 0;
    for (int shift = bits; shift > 0;) {
        const int width = shift > 22 ? min(11, shift - 22) : 11, above_bits = shift;
        shift -= width;
        __syncthreads();
        for (int i = threadIdx.x; i < BINS; i += THREADS) bins[i] = 0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < FEW; ++i) {
            const u64 value = c.order[i] & ((1ull << bits) - 1);
            if ((c.kept >> i & 1) && value >> above_bits == prefix)
                atomicAdd(bins + (value >> shift & ((1 << width) - 1)),
                          by_mass ? c.mass[i] : 1ull);
        }
        __syncthreads();
        u32 digit;
        u64 above;
        find_digit(bins, wanted, digit, above, room);
        prefix = prefix << width | digit;
        wanted -= above;
        if (!exact && look(bins + digit) == wanted) return prefix << shift;  // all of them
    }
    return prefix;
}

DEVICE u64 total_mass(const Candidates& c, u64* room) {
    __shared__ u64 total;
    u64 sum = 0;
#pragma unroll
    for (int i = 0; i < FEW; ++i) sum += c.kept >> i & 1 ? c.mass[i] : 0;
    const u64 to = scan(sum, room);
    if (threadIdx.x == THREADS - 1) total = to;
    __syncthreads();
    return total;
}

DEVICE void keep_from(Candidates& c, u64 last) {
#pragma unroll
    for (int i = 0; i < FEW; ++i) c.kept &= ~((u32)(c.order[i] < last) << i);
}

// What becomes of a token. A step's goes out and into the fold; said, where there is one, collects
// the tokens that a block is checked against, and only the last of them is announced.
struct Out {
    const i64* position;
    int* mailbox;
    u64* box;
    u32* sent;
    const elem* table;
    float* x;
    int* tokens;
    int* said;
    volatile int* heard;
    int index, block;
};

DEVICE void finish(int token, const Out& to) {
    if (threadIdx.x == 0) {
        if (to.said) {
            to.said[to.index] = token;
            to.heard[to.index] = token;
            __threadfence_system();
        } else {
            *to.mailbox = token;
            to.tokens[*to.position] = token;
        }
        if (to.index == to.block - 1) {
            const u32 number = *to.sent + 1;
            *to.sent = number;
            *(volatile u64*)to.box = (u64)number << 32 | (u32)token;  // never half a message
            __threadfence_system();
        }
    }
    if (to.said) return;
#pragma unroll 8
    for (int i = threadIdx.x; i < HIDDEN; i += THREADS)
        to.x[i] = to_float(to.table[(i64)token * HIDDEN + i]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
sample(const float* logits, float* temperature, float* top_p, int* top_k, i64* seed,
       i64* counter, const i64* position, int* mailbox, u64* box, u32* sent, const elem* table,
       float* x, int* tokens, Work* work, int* said, int* heard,
       const __grid_constant__ Wish wish, Told* told, int index, int block, const char* ahead,
       i64 ahead_bytes) {
    const Out goes = {position, mailbox, box, sent, table, x, tokens, said, heard, index, block};
    // Whoever is last writes what was given, while others may still read: they have it from here.
    auto hand_out = [&](int chosen) {
        if (threadIdx.x == 0 && wish.number)
            settle(wish, {temperature, top_p, top_k, seed, counter}, told);
        finish(chosen, goes);
    };
    __shared__ u64 room[THREADS / 32];
    __shared__ u64 local[2][BINS];
    __shared__ bool last;
    __shared__ int token;
    const int tid = threadIdx.x;
    start_next();
    if (tid == 0) ask_ahead(ahead, ahead_bytes, blockIdx.x, BLOCKS);
    wait_inputs();
    const int base = blockIdx.x * SPAN, stop = min(base + SPAN, V);
    const Range ids = {min(base + tid * EACH, stop), min(base + (tid + 1) * EACH, stop)};
    u64 best = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int id = base + i * THREADS + tid;
        const u64 here = id < stop ? (u64)key_of(logits[id]) << 32 | (u32)~id : 0;
        best = here > best ? here : best;
    }
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) {
        const u64 other = __shfl_xor_sync(0xffffffffu, best, offset);
        best = other > best ? other : best;
    }
    if (tid % 32 == 0) atomicMax(&work->best, best);
    const double heat = wish.given & 1 ? wish.temperature : *temperature;
    if (heat == 0.0) {
        __threadfence();
        __syncthreads();
        if (tid == 0) last = atomicAdd(&work->finished, 1u) == BLOCKS - 1;
        __syncthreads();
        if (!last) return;
        __threadfence();
        if (tid == 0) {
            token = (int)~(u32)look(&work->best);
            work->best = 0;
            work->finished = 0;
        }
        __syncthreads();
        hand_out(token);
        return;
    }
    meet(work);
    const double top = (double)float_of((u32)(look(&work->best) >> 32)) / heat;
    auto mass = [&](float logit) { return (u64)(exp((double)logit / heat - top) * ONE); };
    const int k = wish.given & 4 ? wish.top_k : *top_k;
    const float share = wish.given & 2 ? wish.top_p : *top_p;
    const u64 key = wish.given & 8 ? wish.seed : (u64)*seed;
    const u64 number = (u64)(wish.given & 16 ? wish.counter : *counter) + index;
    const bool by_count = 0 < k && k < V, by_mass = share < 1.0f;
    auto nucleus = [&](u64 sum) {
        const double goal = ceil((double)share * (double)sum);
        return goal < 1.0 ? 1 : goal > (double)sum ? sum : (u64)goal;
    };
    if (by_count || by_mass) {
        for (int i = tid; i < 2 * BINS; i += THREADS) local[0][i] = 0;
        __syncthreads();
        for (int id = base + tid; id < stop; id += THREADS) {
            const u32 digit = key_of(logits[id]) >> 21;
            atomicAdd(&local[0][digit], 1ull);
            if (!by_count) atomicAdd(&local[1][digit], mass(logits[id]));
        }
        __syncthreads();
        for (int i = tid; i < BINS; i += THREADS)
            if (local[0][i]) {
                atomicAdd(&work->coarse[0][i], local[0][i]);
                if (!by_count) atomicAdd(&work->coarse[1][i], local[1][i]);
            }
        meet(work);
        u32 digit;
        u64 above, wanted = k;
        if (!by_count) {  // of all mass
            u64 sum = 0;
            for (int i = tid; i < BINS; i += THREADS) sum += look(&work->coarse[1][i]);
            sum = scan(sum, room);
            if (tid == THREADS - 1) local[0][0] = sum;
            __syncthreads();
            wanted = nucleus(local[0][0]);
        }
        find_digit(work->coarse[by_count ? 0 : 1], wanted, digit, above, room);
        u64 many = 0;  // tokens at and above that digit
        for (int i = digit + tid; i < BINS; i += THREADS) many += look(&work->coarse[0][i]);
        many = scan(many, room);
        if (tid == THREADS - 1) local[1][0] = many;
        __syncthreads();
        if (local[1][0] <= LIST) {
            for (int id = base + tid; id < stop; id += THREADS) {
                const u32 key = key_of(logits[id]);
                if (key >> 21 >= digit)
                    work->list[atomicAdd(&work->listed, 1u)] = (u64)key << 22 | (0x3fffff - id);
            }
            __threadfence();
            __syncthreads();
            if (tid == 0) last = atomicAdd(&work->finished, 1u) == BLOCKS - 1;
            __syncthreads();
            if (!last) return;
            __threadfence();
            Candidates c = {};
            const int listed = (int)local[1][0];
#pragma unroll
            for (int i = 0; i < FEW; ++i) {
                const int at = i * THREADS + tid;
                c.order[i] = at < listed ? look(work->list + at) : 0;
                c.mass[i] = at < listed ? mass(float_of((u32)(c.order[i] >> 22))) : 0;
                c.kept |= (u32)(at < listed) << i;
            }
            u64* bins = local[0];
            if (by_count) {
                keep_from(c, select(c, false, k, 54, false, bins, room));
                wanted = nucleus(total_mass(c, room));
            }
            if (by_mass) keep_from(c, select(c, true, wanted, 54, false, bins, room));
            const u64 draw = __umul64hi(random_bits(key, number) << 11, total_mass(c, room));
            const u64 place = select(c, true, draw + 1, 22, true, bins, room);
            for (int i = tid; i < 2 * BINS; i += THREADS) work->coarse[0][i] = 0;
            if (tid == 0) work->best = work->listed = work->finished = 0;
            hand_out(0x3fffff - (int)place);
            return;
        }
        meet(work);  // everyone has read these
        if (blockIdx.x == 0) {
            for (int i = tid; i < 2 * BINS; i += THREADS) work->coarse[0][i] = 0;
            for (int i = tid; i < 6 * BINS; i += THREADS) work->bins[0][i] = 0;
        }
        meet(work);
    }
    Kept kept = {0, 0xffffffffu};
    u64 total = 0;
    for (int second = 0; second < 2; ++second) {
        u64 wanted;
        if (!second) {
            if (!by_count) continue;
            wanted = k;
        } else {
            u64 sum = 0;
            for (int id = ids.begin; id < ids.end; ++id)
                if (kept.has(key_of(logits[id]), id)) sum += mass(logits[id]);
            const u64 to = scan(sum, room);
            if (tid == THREADS - 1) work->sums[2][blockIdx.x] = to;
            meet(work);
            for (int b = 0; b < BLOCKS; ++b) total += look(&work->sums[2][b]);
            if (!by_mass) continue;
            wanted = nucleus(total);
        }
        u32 prefix = 0;
        u64 passed = 0, ties = 0;
        for (int pass = 0; pass < 3; ++pass) {
            const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
            const u32 mask = pass == 0 ? 0 : pass == 1 ? 0xffe00000u : 0xfffffc00u;
            u64* bins = work->bins[second * 3 + pass];
            for (int i = tid; i < BINS; i += THREADS) local[0][i] = 0;
            __syncthreads();
            for (int id = base + tid; id < stop; id += THREADS) {
                const u32 k = key_of(logits[id]);
                if ((k & mask) == prefix && kept.has(k, id))
                    atomicAdd(&local[0][(k >> shift) & (pass == 2 ? 1023 : 2047)],
                              second ? mass(logits[id]) : 1ull);
            }
            __syncthreads();
            for (int i = tid; i < BINS; i += THREADS)
                if (local[0][i]) atomicAdd(bins + i, local[0][i]);
            meet(work);
            u32 digit;
            u64 above;
            find_digit(bins, wanted - passed, digit, above, room);
            prefix |= digit << shift;
            passed += above;
            ties = look(bins + digit);
        }
        if (ties == wanted - passed) {  // all of them stay; they may be limited already
            kept.limit = prefix == kept.key ? kept.limit : 0xffffffffu;
            kept.key = prefix;
        } else {
            const u64 one = second ? mass(float_of(prefix)) : 1;
            const u64 rank = (wanted - passed + one - 1) / one;
            limit_ties(logits, kept, prefix, rank, work, second, ids, room);
        }
    }
    u64 sum = 0;
    for (int id = ids.begin; id < ids.end; ++id)
        if (kept.has(key_of(logits[id]), id)) sum += mass(logits[id]);
    const u64 to = scan(sum, room);
    meet(work);  // everyone has read the sums of before
    if (tid == THREADS - 1) work->sums[2][blockIdx.x] = to;
    meet(work);
    u64 before = 0;
    total = 0;
    for (int b = 0; b < BLOCKS; ++b) {
        const u64 part = look(&work->sums[2][b]);
        if (b < blockIdx.x) before += part;
        total += part;
    }
    const u64 u = random_bits(key, number);
    const u64 draw = __umul64hi(u << 11, total);  // floor(u 2^-53 total) < total
    u64 seen = before + to - sum;
    if (tid == 0) last = before <= draw && draw < before + look(&work->sums[2][blockIdx.x]);
    __syncthreads();
    if (blockIdx.x == 0 && tid == 0) work->best = 0;  // all blocks have read it: two barriers ago
    if (!last) return;
    if (seen <= draw && draw < seen + sum)
        for (int id = ids.begin; id < ids.end; ++id)
            if (kept.has(key_of(logits[id]), id)) {
                seen += mass(logits[id]);
                if (seen > draw) { token = id; break; }
            }
    __syncthreads();
    hand_out(token);
}

// Fold known tokens: their embeddings in front of the first layer, their ids in their rows. The
// first of a block may be one that was just chosen. One block a token; *count are live.
extern "C" __global__ void __launch_bounds__(THREADS)
embed(const int* ids, const int* chosen, const i64* count, const i64* position, const elem* table,
      float* x, int* tokens) {
    const int t = blockIdx.x;
    start_next();
    wait_inputs();
    const bool live = !count || t < *count;
    const int token = !live ? 0 : t == 0 && chosen ? *chosen : ids[t];
    if (live && threadIdx.x == 0) tokens[*position + t] = token;
    for (int i = threadIdx.x; i < HIDDEN; i += blockDim.x)
        x[(i64)t * HIDDEN + i] = to_float(table[(i64)token * HIDDEN + i]);
}

// The rest of a ladder's boundaries: what the fixed block says after t + 1 more tokens. One block
// of threads a token; bytes [begin, end) do not change, position and counter do.
extern "C" __global__ void __launch_bounds__(32)
foresee(const char* fixed, char* ladder, i64 pitch, i64 begin, i64 end, i64 position, i64 counter) {
    char* to = ladder + blockIdx.x * pitch;
    start_next();
    wait_inputs();
    for (i64 i = begin + threadIdx.x * 4; i < end; i += 128)
        *(int*)(to + i) = *(const int*)(fixed + i);
    __syncwarp();
    if (threadIdx.x) return;
    *(i64*)(to + position) = *(const i64*)(fixed + position) + blockIdx.x + 1;
    *(i64*)(to + counter) = *(const i64*)(fixed + counter) + blockIdx.x + 1;
}
