// What SLICES blocks of a cluster hand each other: numbers, whose bytes a barrier counts where they
// arrive. All wait for all that a block expects; nobody sends before all have begun to expect.
#if SLICES == 1
#define CLUSTER
DEVICE void expect(u64*, u32) {}
DEVICE void begin() {}
DEVICE void all_expect() {}
DEVICE u32 way_to(const void*, int) { return 0; }
template <class E> DEVICE void send(E* to, u64*, u32, E value) { *to = value; }
DEVICE void await(u64*) { __syncthreads(); }
#else
#define CLUSTER __cluster_dims__(SLICES, 1, 1)
DEVICE void expect(u64* barrier, u32 bytes) {  // by one thread
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(shared_at(barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
                 :: "r"(shared_at(barrier)), "r"(bytes) : "memory");
}
DEVICE void begin() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
DEVICE void all_expect() { asm volatile("barrier.cluster.wait;" ::: "memory"); }
DEVICE u32 way_to(const void* mine, int peer) {  // from what is here to the same there
    u32 at;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_at(mine)), "r"(peer));
    return at - shared_at(mine);
}
DEVICE void send(u32* to, u64* barrier, u32 way, u32 value) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
                 :: "r"(shared_at(to) + way), "r"(value), "r"(shared_at(barrier) + way)
                 : "memory");
}
DEVICE void send(float* to, u64* barrier, u32 way, float value) {
    send((u32*)to, barrier, way, __float_as_uint(value));
}
DEVICE void await(u64* barrier) {
    u32 done;
    do
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; "
                     "selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(shared_at(barrier)) : "memory");
    while (!done);
}
#endif
