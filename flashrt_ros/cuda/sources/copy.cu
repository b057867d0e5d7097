// Capsules: the fixed block and rows by pages, in one launch, without a table in memory.
//
// The table of pages is a kernel parameter, so a launch owns it and nothing has to be kept alive.
// Rows [begin, end) of every plane move between the live rows and pages of PAGE rows: live row i
// lies in place pages[i / PAGE - first] * PAGE + i % PAGE of the pool.

#define PAGES 960
#define PLANES 4
#define PAGE 64

struct Plane {
    char* live;
    char* pool;
    i64 live_pitch, pool_pitch;  // bytes from field to field
    int fields, row_bytes;
};

struct Table {
    Plane planes[PLANES];
    char* fixed_to;
    const char* fixed_from;
    i64 fixed_bytes;
    i64 begin, end, first;  // rows; first: page of pages[0]
    int plane_count, restore;  // restore: pool -> live
    int pages[PAGES];
};

DEVICE void move(char* to, const char* from, i64 bytes, i64 worker, i64 workers) {
    const i64 vectors = bytes / 16;
    i64 i = worker;
    for (; i + 3 * workers < vectors; i += 4 * workers) {
        const uint4 a = ((const uint4*)from)[i], b = ((const uint4*)from)[i + workers];
        const uint4 c = ((const uint4*)from)[i + 2 * workers], d = ((const uint4*)from)[i + 3 * workers];
        ((uint4*)to)[i] = a;
        ((uint4*)to)[i + workers] = b;
        ((uint4*)to)[i + 2 * workers] = c;
        ((uint4*)to)[i + 3 * workers] = d;
    }
    for (; i < vectors; i += workers) ((uint4*)to)[i] = ((const uint4*)from)[i];
    for (i = vectors * 16 + worker; i < bytes; i += workers) to[i] = from[i];
}

extern "C" __global__ void __launch_bounds__(512)
move_fixed(char* to, const char* from, i64 bytes) {
    move(to, from, bytes, (i64)blockIdx.x * blockDim.x + threadIdx.x, (i64)gridDim.x * blockDim.x);
}

extern "C" __global__ void __launch_bounds__(512)
move_boundary(const __grid_constant__ Table table) {
    const i64 worker = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const i64 workers = (i64)gridDim.x * blockDim.x;
    if (table.fixed_bytes) move(table.fixed_to, table.fixed_from, table.fixed_bytes, worker, workers);
    const int first = (int)(table.begin / PAGE);
    const int count = table.end > table.begin ? (int)((table.end - 1) / PAGE) - first + 1 : 0;
    for (int p = 0; p < table.plane_count; ++p) {
        const Plane& plane = table.planes[p];
        const i64 jobs = (i64)plane.fields * count;  // a job: one page of one field
        for (i64 job = blockIdx.x; job < jobs; job += gridDim.x) {
            const int page = (int)(job % count) + first;
            const i64 field = job / count;
            const i64 from_row = max((i64)page * PAGE, table.begin);
            const i64 to_row = min((i64)(page + 1) * PAGE, table.end);
            const i64 place = (i64)table.pages[page - table.first] * PAGE + from_row % PAGE;
            char* live = plane.live + field * plane.live_pitch + from_row * plane.row_bytes;
            char* pool = plane.pool + field * plane.pool_pitch + place * plane.row_bytes;
            const i64 bytes = (to_row - from_row) * plane.row_bytes;
            const bool wide = ((u64)live | (u64)pool) % 16 == 0;
            char* to = table.restore ? live : pool;
            const char* from = table.restore ? pool : live;
            if (wide) move(to, from, bytes, threadIdx.x, blockDim.x);
            else for (i64 i = threadIdx.x * 4; i < bytes; i += blockDim.x * 4)
                *(int*)(to + i) = *(const int*)(from + i);
        }
    }
}
