// Put settings of the sampler into the state, and tell the host what they are then: one launch.
//
// What is chosen comes as a kernel parameter, what is told goes to pinned memory by plain stores, so
// no copy between host and device stands in front of the first token.

struct Wish {
    float temperature, top_p;
    int top_k;
    u32 given;  // a bit for each of the five, in the order of Told
    u64 seed, counter;
    u32 number;
};

struct Told {
    float temperature, top_p;
    int top_k;
    u32 number;  // of the wish; written last
    u64 seed, counter;
};

extern "C" __global__ void
choose(const __grid_constant__ Wish wish, float* temperature, float* top_p, int* top_k, u64* seed,
       u64* counter, Told* told) {
    if (threadIdx.x) return;
    if (wish.given & 1) *temperature = wish.temperature;
    if (wish.given & 2) *top_p = wish.top_p;
    if (wish.given & 4) *top_k = wish.top_k;
    if (wish.given & 8) *seed = wish.seed;
    if (wish.given & 16) *counter = wish.counter;
    told->temperature = *temperature;
    told->top_p = *top_p;
    told->top_k = *top_k;
    told->seed = *seed;
    told->counter = *counter;
    __threadfence_system();
    *(volatile u32*)&told->number = wish.number;
    __threadfence_system();
}
