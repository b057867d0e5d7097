// Helpers of all kernels. No header is included, so NVRTC needs nothing but this package.
//
// The element type of weights and rows is chosen by ELEMENT: 16 for bfloat16, 32 for float.
// Everything else is fp32. Vectors are 16 bytes: VEC elements.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#if ELEMENT == 16
typedef u16 elem;
#define VEC 8
#else
typedef float elem;
#define VEC 4
#endif

#define DEVICE __device__ __forceinline__

DEVICE float bf16_float(u32 bits) { return __uint_as_float(bits << 16); }

DEVICE u32 pack_bf16(float low, float high) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

#if ELEMENT == 16
DEVICE float to_float(elem x) { return bf16_float(x); }
DEVICE elem from_float(float x) { return (u16)pack_bf16(x, 0.0f); }
#else
DEVICE float to_float(elem x) { return x; }
DEVICE elem from_float(float x) { return x; }
#endif

// Widen the VEC elements of a 16-byte vector.
DEVICE void widen(const uint4& raw, float (&out)[VEC]) {
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#if ELEMENT == 16
        out[2 * i] = __uint_as_float(words[i] << 16);
        out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
#else
        out[i] = __uint_as_float(words[i]);
#endif
    }
}

// Read-only bytes that are used once: they need no place in L1, and leave L2 before what is used
// again, the state above all.
DEVICE u64 leave_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

DEVICE uint4 load_once(const void* at, u64 policy) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at), "l"(policy));
    return v;
}

// Ask for bytes that the next kernels will read, while the memory would idle otherwise: worker
// number `worker` of `workers` asks for its share. It lands in L2 and nobody waits for it.
DEVICE void ask_ahead(const char* at, i64 bytes, i64 worker, i64 workers) {
    const i64 share = (bytes + workers * 128 - 1) / (workers * 128) * 128;
    const i64 from = worker * share;
    if (from >= bytes) return;
    const u32 size = (u32)(bytes - from < share ? bytes - from : share);
#ifdef EMULATED
#elif __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(at + from), "r"(size));
#else
    for (u32 i = 0; i < size; i += 128)
        asm volatile("prefetch.global.L2 [%0];" :: "l"(at + from + i));
#endif
}

// Copies from global to shared memory that run by themselves; zeros where not live.
DEVICE u32 shared_at(const void* at) { return (u32)__cvta_generic_to_shared(at); }

DEVICE void copy_async(elem* to, const elem* from, bool live) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(shared_at(to)), "l"(from), "r"(live ? 16 : 0) : "memory");
}

DEVICE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void arrive() {
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}

DEVICE float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

DEVICE float warp_max(float x) {
#pragma unroll
    for (int offset = 16; offset; offset >>= 1)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }
DEVICE float silu(float x) { return x / (1.0f + __expf(-x)); }
DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// Programmatic dependent launch: the next kernel may start, and this one waits for its inputs.
// What lies before wait_inputs() may read nothing that an earlier kernel of the graph writes, and no
// pointer to such a thing may be __restrict__: what nobody seems to write is read ahead of the wait,
// however it stands here. Weights, taps and norms may be, and what is only written. Every
// kernel of a graph waits, also where it has nothing to do: the next one relies on that it ends
// after everything before it.
DEVICE void start_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

DEVICE void wait_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#define INFINITE __int_as_float(0x7f800000)
