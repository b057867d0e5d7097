// Just enough of a CUDA device to run our kernels on a CPU, thread by thread, for tests.
//
// Every thread of a block is a fiber; barriers and warp collectives switch between them. Which
// fiber runs next is drawn at random, so that a missing barrier shows; a collective also yields
// before and after. Blocks run one after another in random order, so a kernel whose blocks meet
// must be compiled for one block; those of a cluster run together.
//
// A fiber is entered once with makecontext; later switches are jumps, since swapcontext asks the
// kernel for the signal mask each time, which took longer than what the threads compute.
#undef _FORTIFY_SOURCE  // its longjmp takes the stack of a fiber for a broken one
#include <ucontext.h>

#include <limits.h>
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <map>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __CUDA_ARCH__ 900
#define EMULATED

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(8) uint2 { unsigned x, y; };
static inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
static inline uint2 make_uint2(unsigned a, unsigned b) { return {a, b}; }
static inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
static inline float2 make_float2(float a, float b) { return {a, b}; }
struct dim3 { int x, y, z; };

namespace emu {
enum State { FIBER_RUNS, FIBER_AT_BLOCK, FIBER_AT_WARP, FIBER_AT_CLUSTER, FIBER_DONE };
struct Copy { void* to; const void* from; bool live; };
struct Fiber {
    jmp_buf place; bool begun; State state; dim3 id, block; std::vector<char> stack;
    char* dynamic;
    int index, arrived;                     // among all of the cluster; at how many of its barriers
    std::vector<Copy> open;                 // asynchronous copies that no group holds yet
    std::vector<std::vector<Copy>> groups;  // and the groups on their way, oldest first
};
static std::vector<Fiber> fibers;
static jmp_buf home;
static Fiber* self;
static dim3 grid, block;
static void (*body)(void**);
static void** arguments;
struct Barrier { int count, missing; unsigned passed; std::vector<Copy> copies, there; };
static std::map<void*, Barrier> barriers;
static uint64_t lanes[64][32][8];  // what the lanes of a warp show each other

static uint64_t draw() {
    static uint64_t chance = (uint64_t)time(nullptr) * 2654435761u + 88172645463325252u;
    chance ^= chance << 13;
    chance ^= chance >> 7;
    chance ^= chance << 17;
    return chance;
}
static void shuffle(std::vector<int>& order) {
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[draw() % i]);
}
static void copy(const Copy& c) {
    if (c.live) memcpy(c.to, c.from, 16);
    else memset(c.to, 0, 16);
}

static void stop(State state) {
    self->state = state;
    if (!_setjmp(self->place)) _longjmp(home, 1);
}
static void enter() {
    for (;;) {  // block after block
        body(arguments);
        stop(FIBER_DONE);
    }
}
// A function of its own: nothing but registers has to outlive the jump.
__attribute__((noinline)) static void go_on(Fiber& f) {
    if (_setjmp(home)) return;
    self = &f;
    if (f.begun) _longjmp(f.place, 1);
    f.begun = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = f.stack.data();
    context.uc_stack.ss_size = f.stack.size();
    context.uc_link = nullptr;
    makecontext(&context, enter, 0);
    setcontext(&context);
}
static int warp() { return self->index / 32; }
static int lane() { return self->index % 32; }

static void run_blocks() {
    for (auto& f : fibers) {
        f.state = FIBER_RUNS;
        f.arrived = 0;
        f.open.clear();
        f.groups.clear();
    }
    barriers.clear();
    std::vector<int> order(fibers.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = (int)i;
    for (;;) {
        bool moved = false, all_done = true;
        int arrived = INT_MAX;
        shuffle(order);
        for (int index : order)
            if (fibers[index].state == FIBER_RUNS) {
                go_on(fibers[index]);
                moved = true;
            }
        for (size_t w = 0; w < fibers.size(); w += 32) {
            bool ready = false, hold = false;
            for (size_t i = w; i < (w + 32 < fibers.size() ? w + 32 : fibers.size()); ++i) {
                ready |= fibers[i].state == FIBER_AT_WARP;
                hold |= fibers[i].state != FIBER_AT_WARP && fibers[i].state != FIBER_DONE;
            }
            if (ready && !hold)
                for (size_t i = w; i < (w + 32 < fibers.size() ? w + 32 : fibers.size()); ++i)
                    if (fibers[i].state == FIBER_AT_WARP) { fibers[i].state = FIBER_RUNS; moved = true; }
        }
        for (auto& f : fibers) {
            all_done &= f.state == FIBER_DONE;
            if (f.state != FIBER_DONE && f.arrived < arrived) arrived = f.arrived;
        }
        if (all_done) return;
        for (size_t from = 0; from < fibers.size(); from += block.x) {
            bool all_wait = true, waits = false;
            for (int i = 0; i < block.x; ++i) {
                const State state = fibers[from + i].state;
                all_wait &= state == FIBER_DONE || state == FIBER_AT_BLOCK;
                waits |= state == FIBER_AT_BLOCK;
            }
            for (int i = 0; all_wait && waits && i < block.x; ++i)
                if (fibers[from + i].state == FIBER_AT_BLOCK) fibers[from + i].state = FIBER_RUNS;
            moved |= all_wait && waits;
        }
        for (auto& f : fibers)
            if (f.state == FIBER_AT_CLUSTER && f.arrived <= arrived) {
                f.state = FIBER_RUNS;
                moved = true;
            }
        if (!moved) { fprintf(stderr, "emulator: threads wait for each other\n"); abort(); }
    }
}

// Clusters are neighbours along x.
static void launch(void (*f)(void**), void** args, int gx, int gy, int gz, int threads, int shared,
                   int cluster) {
    body = f;
    arguments = args;
    grid = {gx, gy, gz};
    block = {threads, 1, 1};
    fibers.resize(threads * cluster);
    const size_t room = (shared + 2047) / 1024 * 1024;
    char* dynamic = (char*)aligned_alloc(1024, room * cluster);
    for (int i = 0; i < threads * cluster; ++i) {
        fibers[i].id = {i % threads, 0, 0};
        fibers[i].index = i;
        fibers[i].dynamic = dynamic + i / threads * room;
        fibers[i].stack.resize(64 << 10);
    }
    std::vector<int> clusters(gx * gy * gz / cluster);
    for (size_t i = 0; i < clusters.size(); ++i) clusters[i] = (int)i;
    shuffle(clusters);
    for (int c : clusters) {
        memset(dynamic, 0xff, room * cluster);  // NaN: nothing may be read before it is written
        for (auto& f : fibers) {
            const int i = c * cluster + f.index / threads;
            f.block = {i % gx, i / gx % gy, i / gx / gy};
        }
        run_blocks();
    }
    free(dynamic);
}

template <class... A, size_t... I>
void call(void (*f)(A...), void** args, std::index_sequence<I...>) {
    f(*(std::remove_const_t<A>*)args[I]...);
}
template <class... A> void call(void (*f)(A...), void** args) {
    call(f, args, std::index_sequence_for<A...>());
}

template <class T> T shuffle(T x, int from) {
    memcpy(lanes[warp()][lane()], &x, sizeof x);
    stop(FIBER_AT_WARP);
    T y;
    memcpy(&y, lanes[warp()][from < 0 || from > 31 ? lane() : from], sizeof y);
    stop(FIBER_AT_WARP);
    return y;
}
static bool any(int x) {
    for (int offset = 16; offset; offset >>= 1) x |= shuffle(x, lane() ^ offset);
    return x;
}
}  // namespace emu

#define threadIdx (emu::self->id)
#define blockIdx (emu::self->block)
#define gridDim (emu::grid)
#define blockDim (emu::block)
#define __syncthreads() emu::stop(emu::FIBER_AT_BLOCK)
#define __syncwarp() emu::stop(emu::FIBER_AT_WARP)
#define __threadfence()
#define __threadfence_system()
#define __shfl_xor_sync(m, x, o) emu::shuffle(x, emu::lane() ^ (o))
#define __shfl_up_sync(m, x, o) emu::shuffle(x, emu::lane() - (o))
#define __shfl_sync(m, x, l) emu::shuffle(x, l)
#define __any_sync(m, x) emu::any(x)
#define __expf expf
#define __log2f log2f
#define __ldcg(p) (*(p))
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
static inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
static inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
template <class T, class U> T atomicAdd(T* at, U x) { T old = *at; *at += x; return old; }
template <class T, class U> T atomicMax(T* at, U x) { T old = *at; *at = old < (T)x ? (T)x : old; return old; }
template <class T, class U> auto min(T a, U b) { return a < b ? a : b; }
template <class T, class U> auto max(T a, U b) { return a > b ? a : b; }

// What the sources say in assembler.
static unsigned pack_bf16(float low, float high) {
    auto round = [](float x) -> unsigned {
        unsigned bits = __float_as_uint(x);
        if (x != x) return 0x7fff;
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    };
    return round(low) | round(high) << 16;
}
static float fast_exp2(float x) { return exp2f(x); }
static float fast_log2(float x) { return log2f(x); }
static float fast_inverse(float x) { return 1.0f / x; }
static uint64_t leave_first() { return 0; }
static uint4 load_once(const void* at, uint64_t) { return *(const uint4*)at; }
static void start_next() {}
static void wait_inputs() {}
static void begin() { ++emu::self->arrived; }
static void all_expect() { emu::stop(emu::FIBER_AT_CLUSTER); }
static void expect(unsigned long long* barrier, unsigned bytes) { *barrier = bytes; }
template <class T> T* at_peer(T* mine, int peer) {
    return (T*)((char*)mine - emu::self->dynamic + emu::fibers[peer * emu::block.x].dynamic);
}
static unsigned way_to(const void*, int peer) { return peer; }
template <class T> void send(T* to, unsigned long long* barrier, unsigned peer, T value) {
    *at_peer(to, peer) = value;
    *at_peer(barrier, peer) -= sizeof value;
}
static void await(unsigned long long* barrier) {
    while (*barrier) emu::stop(emu::FIBER_RUNS);
}
static void commit() {
    emu::self->groups.push_back(std::move(emu::self->open));
    emu::self->open.clear();
}
template <int PENDING> void arrive() {
    auto& groups = emu::self->groups;
    while (groups.size() > PENDING) {
        for (auto& c : groups.front()) emu::copy(c);
        groups.erase(groups.begin());
    }
}
static float widened(uint64_t word, int half) {
    return __uint_as_float((unsigned)(half ? word & 0xffff0000u : word << 16));
}
template <class T> void copy_async(T* to, const T* from, bool live) {
    const emu::Copy c{to, from, live};
    if (emu::draw() % 2) emu::copy(c);      // at once
    else emu::self->open.push_back(c);      // or when it is waited for, and not before
}
template <class T> void matrices(unsigned (&r)[4], const T* at) {
    emu::lanes[emu::warp()][emu::lane()][0] = (uint64_t)at;
    emu::stop(emu::FIBER_AT_WARP);
    const int lane = emu::lane();
    for (int i = 0; i < 4; ++i)
        memcpy(&r[i], (const T*)emu::lanes[emu::warp()][8 * i + lane / 4][0] + lane % 4 * 2, 4);
    emu::stop(emu::FIBER_AT_WARP);
}
template <class T> void matrices_turned(unsigned (&r)[4], const T* at) {
    emu::lanes[emu::warp()][emu::lane()][0] = (uint64_t)at;
    emu::stop(emu::FIBER_AT_WARP);
    const int lane = emu::lane();
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 2; ++j)
            memcpy((char*)&r[i] + 2 * j,
                   (const T*)emu::lanes[emu::warp()][8 * i + lane % 4 * 2 + j][0] + lane / 4, 2);
    emu::stop(emu::FIBER_AT_WARP);
}
static void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    auto& mine = emu::lanes[emu::warp()];
    const int lane = emu::lane();
    for (int i = 0; i < 4; ++i) mine[lane][i] = a[i];
    mine[lane][4] = b0;
    mine[lane][5] = b1;
    emu::stop(emu::FIBER_AT_WARP);
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k)
            c[i] += widened(mine[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2)
                  * widened(mine[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
    }
    emu::stop(emu::FIBER_AT_WARP);
}

// Products of a warpgroup. They run when they are queued, so waiting for them is not tested here.
static void begin_products() {}
static void commit_products() {}
template <int PENDING> void finish_products() {}
static void pin(float&) {}
static void pin_bits(unsigned&) {}
static void show_products() {}
template <int REGISTERS> void keep_registers() {}
template <int REGISTERS> void take_registers() {}
static unsigned shared_at(const void* at) { return (unsigned)((char*)at - emu::self->dynamic); }

static void barrier_open(void* at, int count) { emu::barriers[at] = {count, count, 0, {}, {}}; }
static void barrier_reach(void* at) {
    auto& barrier = emu::barriers.at(at);
    if (--barrier.missing) return;
    barrier.there.swap(barrier.copies);  // for whoever waits for them, and not before
    barrier.missing = barrier.count;
    ++barrier.passed;
}
static void barrier_reach_copied(void* at) {
    auto& copies = emu::barriers.at(at).copies;
    copies.insert(copies.end(), emu::self->open.begin(), emu::self->open.end());
    emu::self->open.clear();
    barrier_reach(at);
}
static void barrier_pass(void* at, int parity) {
    for (int tries = 0; (int)(emu::barriers.at(at).passed & 1) == parity; ++tries) {
        if (tries == 1 << 20) { fprintf(stderr, "emulator: a barrier is never reached\n"); abort(); }
        emu::stop(emu::FIBER_RUNS);
    }
    auto& there = emu::barriers.at(at).there;
    for (auto& c : there) emu::copy(c);
    there.clear();
}

namespace emu {
// The value at byte `offset` of eight-row block `block`, row `row` of what a descriptor says.
static float described(uint64_t matrix, int panel, int block, int row, int offset) {
    unsigned at = (unsigned)(matrix & 0x3fff) * 16 + panel * (int)(matrix >> 16 & 0x3fff) * 16
                + block * (int)(matrix >> 32 & 0x3fff) * 16 + row * 128 + offset;
    at ^= (at >> 7 & 7) << 4;
    if (matrix >> 62 != 1) abort();
    return widened(*(const uint16_t*)(self->dynamic + at), 0);
}
}  // namespace emu
template <int N> void multiply_rows(float (&c)[N], uint64_t a, uint64_t b, bool add) {
    emu::stop(emu::FIBER_AT_WARP);
    const int lane = emu::lane(), first = emu::warp() % 4 * 16 + lane / 4;
    float rows[2][16];
    for (int k = 0; k < 32; ++k)
        rows[k / 16][k % 16] = emu::described(a, 0, first / 8 + k / 16, first % 8, k % 16 * 2);
    for (int i = 0; i < N; ++i) {
        float sum = add ? c[i] : 0.0f;
        for (int k = 0; k < 16; ++k)
            sum += rows[i / 2 % 2][k]
                 * emu::described(b, 0, i / 4, lane % 4 * 2 + i % 2, k * 2);
        c[i] = sum;
    }
    emu::stop(emu::FIBER_AT_WARP);
}
template <int N> void multiply_turned(float (&c)[N], const unsigned (&a)[4], uint64_t b) {
    auto& mine = emu::lanes[emu::warp()];
    const int lane = emu::lane();
    for (int i = 0; i < 4; ++i) mine[lane][i] = a[i];
    emu::stop(emu::FIBER_AT_WARP);
    float rows[2][16];
    for (int k = 0; k < 32; ++k)
        rows[k / 16][k % 16] =
            widened(mine[lane / 4 * 4 + k % 8 / 2][k / 16 + k % 16 / 8 * 2], k % 2);
    for (int i = 0; i < N; ++i) {
        const int n = i / 4 * 8 + lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k)
            c[i] += rows[i / 2 % 2][k] * emu::described(b, n / 64, k / 8, k % 8, n % 64 * 2);
    }
    emu::stop(emu::FIBER_AT_WARP);
}
