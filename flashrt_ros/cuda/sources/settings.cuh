// Settings that were chosen for a first token come with its launch, and what they are then goes back
// by plain stores to pinned memory: no copy and no launch more stands in front of the token. In a
// graph nothing is given and nobody asks.
struct Wish {
    float temperature, top_p;
    int top_k;
    u32 given;  // a bit for each of the five, in this order
    u64 seed;
    i64 counter;
    u32 number;  // 0: nobody asks
};

struct Told {
    float temperature, top_p;
    int top_k;
    u32 number;  // of the wish; written last
    i64 seed, counter;
};

struct Settings {
    float* temperature;
    float* top_p;
    int* top_k;
    i64* seed;
    i64* counter;
};

DEVICE void settle(const Wish& wish, const Settings& now, Told* told) {
    if (wish.given & 1) *now.temperature = wish.temperature;
    if (wish.given & 2) *now.top_p = wish.top_p;
    if (wish.given & 4) *now.top_k = wish.top_k;
    if (wish.given & 8) *now.seed = (i64)wish.seed;
    if (wish.given & 16) *now.counter = wish.counter;
    told->temperature = *now.temperature;
    told->top_p = *now.top_p;
    told->top_k = *now.top_k;
    told->seed = *now.seed;
    told->counter = *now.counter;
    __threadfence_system();
    *(volatile u32*)&told->number = wish.number;
    __threadfence_system();
}
