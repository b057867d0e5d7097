// Products of a warpgroup (Hopper): 64 rows at a time, operands in shared memory or registers,
// results in registers, run by themselves until they are waited for. And barriers copies reach.
//
// A matrix in shared memory is a row of panels of 64 values (128 bytes) by as many rows as it has.
// Within a panel the 16-byte vector c of row r stands at c ^ r % 8, so that eight rows below each
// other lie on different banks. Panels start at multiples of 1024 bytes.

// Where vector `c` of row `r` lies in a matrix of ROWS rows, in elements.
template <int ROWS> DEVICE int swizzled(int r, int c) {
    return c / 8 * (ROWS * 64) + r * 64 + (c % 8 ^ r % 8) * 8;
}

// A place in shared memory as the products take it; `panels`: bytes from one panel to the next,
// for a matrix that is read turned. Eight rows of a panel take 1024 bytes.
DEVICE u64 described(u32 at, u32 panels) {
    return (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)(panels >> 4) << 16 | (at & 0x3ffff) >> 4;
}

// Registers of products are handed over, and may be touched again behind finish_products.
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void finish_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
}

// Keeps the compiler from moving what reads or writes x across this line.
DEVICE void pin(float& x) { asm volatile("" : "+f"(x) :: "memory"); }
DEVICE void pin_bits(u32& x) { asm volatile("" : "+r"(x) :: "memory"); }

// Registers of a thread from here on, in a whole warpgroup; what one leaves another takes.
template <int REGISTERS> DEVICE void keep_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}
template <int REGISTERS> DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}

// What copies have left in shared memory becomes visible to products.
DEVICE void show_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void barrier_open(u64* at, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;"
                 :: "r"(shared_at(at)), "r"(count) : "memory");
}

DEVICE void barrier_reach(u64* at) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}"
                 :: "r"(shared_at(at)) : "memory");
}

// Reached once all copies that this thread has begun are there.
DEVICE void barrier_reach_copied(u64* at) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];"
                 :: "r"(shared_at(at)) : "memory");
}

// Wait until the barrier was reached by all, for the 1st, 3rd, ... (0) or 2nd, 4th, ... time (1).
DEVICE void barrier_pass(u64* at, int parity) {
    asm volatile("{\n.reg .pred done;\nagain:\n"
                 "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}" :: "r"(shared_at(at)), "r"(parity) : "memory");
}

#define OUT8(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), \
                   "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define OUT16(c, i) OUT8(c, i), OUT8(c, i + 8)

// c (+)= A B^T for 64 rows A and as many rows B as c has columns, 16 values of each. Row r and
// column n lie in lane r % 8 * 4 + n % 8 / 2 of warp r / 16, at n / 8 * 4 + r / 8 % 2 * 2 + n % 2;
// of A in registers likewise (multiply_turned: c += A B with 16 rows B).
DEVICE void multiply_rows(float (&c)[40], u64 a, u64 b, bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %42, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
                 "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39"
                 "}, %40, %41, add, 1, 1, 0, 0;\n}"
                 : OUT16(c, 0), OUT16(c, 16), OUT8(c, 32)
                 : "l"(a), "l"(b), "r"((int)add));
}

DEVICE void multiply_turned(float (&c)[128], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
                 "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "
                 "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
                 "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, "
                 "%77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, "
                 "%92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, "
                 "%106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, "
                 "%119, %120, %121, %122, %123, %124, %125, %126, %127"
                 "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
                 : OUT16(c, 0), OUT16(c, 16), OUT16(c, 32), OUT16(c, 48),
                   OUT16(c, 64), OUT16(c, 80), OUT16(c, 96), OUT16(c, 112)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef OUT16
#undef OUT8
