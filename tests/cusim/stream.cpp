/* Streams, events and graphs. A stream is a queue that runs only when something waits for it: what a program reads without a
 * synchronize it reads too early, always. An event is a place in its stream's queue.
 */
#include "tests/cusim/machine.h"
#include <stdio.h>
#include <stdlib.h>
#include <deque>
#include <map>
#include <set>

using work = std::function<void()>;

/* The real headers' opaque types, so that no pointer needs a cast. */
struct CUgraph_st {
    std::vector<work> nodes;
    bool invalid = false;
};
struct CUgraphExec_st {
    std::vector<work> nodes;
};
struct CUstream_st {
    std::deque<work> queue;
    uint64_t queued = 0, done = 0; /* counts since the stream was made */
    CUgraph_st *capture = nullptr;
    bool origin = false; /* of the capture */
};
struct CUevent_st {
    CUstream_st *stream = nullptr;
    uint64_t place = 0;            /* done once the stream has run so many */
    CUgraph_st *capture = nullptr; /* recorded in a capture */
};

namespace cusim
{
static CUstream_st null_stream;
static std::set<CUstream_st *> streams = {&null_stream};
static std::set<CUevent_st *> events;
static cudaError_t last_error, sticky; /* a failed kernel's error stays, as on a device */

unsigned env_number(const char *name, unsigned otherwise)
{
    const char *text = getenv(name);
    return text && *text ? (unsigned)strtoul(text, nullptr, 10) : otherwise;
}

/* ---- planned failures ---- */

static std::map<std::string, unsigned> countdown;

static void read_plan()
{
    static bool done;
    const char *plan = getenv("CUSIM_FAIL");
    const char *colon = plan ? strchr(plan, ':') : nullptr;
    if (!done && colon)
        countdown[std::string(plan, colon)] = (unsigned)atoi(colon + 1);
    done = true;
}

static bool fails(const char *call)
{
    read_plan();
    auto found = countdown.find(call);
    return found != countdown.end() && found->second && --found->second == 0;
}

static cudaError_t failed(cudaError_t e)
{
    if (e != cudaSuccess)
        last_error = e;
    return e;
}

/* ---- queues ---- */

static CUstream_st *stream_of(cudaStream_t s)
{
    if (!s || s == cudaStreamLegacy || s == cudaStreamPerThread)
        return &null_stream;
    if (!streams.count(s))
        fatal("a stream that was destroyed or never made: %p", (void *)s);
    return s;
}

bool capturing()
{
    for (CUstream_st *s : streams)
        if (s->capture)
            return true;
    return false;
}

static void run_one(CUstream_st *s)
{
    work w = std::move(s->queue.front());
    s->queue.pop_front();
    w();
    s->done++;
}

static void drain_to(CUstream_st *s, uint64_t place)
{
    if (s->done >= place || s->queue.empty())
        return;
    device_access access;
    while (s->done < place && !s->queue.empty())
        run_one(s);
}

static void drain(CUstream_st *s)
{
    drain_to(s, s->queued);
}

void drain_all()
{
    std::lock_guard<std::recursive_mutex> lock(machine_lock);
    for (CUstream_st *s : streams)
        drain(s);
}

void push(cudaStream_t stream, work w)
{
    std::lock_guard<std::recursive_mutex> lock(machine_lock);
    CUstream_st *s = stream_of(stream);
    if (s->capture) {
        s->capture->nodes.push_back(std::move(w));
        return;
    }
    s->queue.push_back(std::move(w));
    s->queued++;
}

/* What waits or allocates breaks a capture, as on a device. */
static cudaError_t not_while_capturing(const char *call)
{
    if (!capturing())
        return cudaSuccess;
    for (CUstream_st *s : streams)
        if (s->capture)
            s->capture->invalid = true;
    report("%s during a stream capture", call);
    return failed(cudaErrorStreamCaptureUnsupported);
}

#define REFUSE_IN_CAPTURE()                                                                                                      \
    do {                                                                                                                         \
        cudaError_t refused = not_while_capturing(__func__);                                                                     \
        if (refused != cudaSuccess)                                                                                              \
            return refused;                                                                                                      \
    } while (0)
#define LOCK std::lock_guard<std::recursive_mutex> lock(machine_lock)

/* ---- launches ---- */

static std::map<const void *, size_t> dynamic_limit; /* by kernel, where cudaFuncSetAttribute raised it */

size_t shared_opt_in()
{
    unsigned sm = env_number("CUSIM_SM", 90);
    return (size_t)(sm == 80 ? 163 : sm < 90 ? 99 : 227) << 10;
}

static bool launchable(const launch &l)
{
    uint64_t n = (uint64_t)l.block.x * l.block.y * l.block.z;
    auto raised = dynamic_limit.find(l.kernel);
    size_t limit = raised == dynamic_limit.end() ? STATIC_SHARED_MAX : raised->second;
    return n && n <= MAX_THREADS && l.block.z <= 64 && l.grid.x && l.grid.y && l.grid.z && l.grid.x <= 0x7fffffffu &&
           l.grid.y <= 65535 && l.grid.z <= 65535 && l.dynamic_smem <= limit;
}

void enqueue(const launch &l)
{
    LOCK;
    machine_init();
    if (!launchable(l) || fails("launch")) {
        failed(cudaErrorInvalidConfiguration);
        return;
    }
    push(l.stream, [l] { run_launch(l); });
}
} // namespace cusim

using namespace cusim;

void cusim_fail(const char *call, unsigned n)
{
    LOCK;
    read_plan();
    countdown[call] = n;
}

static unsigned long copies_to_host;
static size_t bytes_to_host;

unsigned long cusim_copies_to_host(size_t *bytes)
{
    LOCK;
    *bytes = bytes_to_host;
    return copies_to_host;
}

extern "C" {
cudaError_t cusim_malloc(void **p, size_t size);
cudaError_t cusim_free(void *p);
cudaError_t cusim_host_alloc(void **p, size_t size);
cudaError_t cusim_host_free(void *p);

/* ---- errors ---- */

cudaError_t cudaGetLastError(void)
{
    LOCK;
    cudaError_t e = last_error;
    last_error = sticky;
    return e;
}

cudaError_t cudaPeekAtLastError(void)
{
    return last_error;
}

/* ---- memory ---- */

cudaError_t cudaMalloc(void **p, size_t size)
{
    LOCK;
    REFUSE_IN_CAPTURE();
    return failed(fails("malloc") ? cudaErrorMemoryAllocation : cusim_malloc(p, size));
}

cudaError_t cudaFree(void *p)
{
    LOCK;
    REFUSE_IN_CAPTURE();
    drain_all();
    return failed(cusim_free(p));
}

cudaError_t cudaHostAlloc(void **p, size_t size, unsigned)
{
    LOCK;
    REFUSE_IN_CAPTURE();
    return failed(fails("hostalloc") ? cudaErrorMemoryAllocation : cusim_host_alloc(p, size));
}

cudaError_t cudaMallocHost(void **p, size_t size)
{
    return cudaHostAlloc(p, size, 0);
}

cudaError_t cudaFreeHost(void *p)
{
    LOCK;
    drain_all();
    return failed(cusim_host_free(p));
}

/* The kind must say what the pointers are. */
static bool right_way(const void *to, const void *from, size_t size, cudaMemcpyKind kind)
{
    bool to_device = in_arena(to), from_device = in_arena(from);
    if (kind != cudaMemcpyDefault && (to_device != (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) ||
                                      from_device != (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice))) {
        report("copy of %zu bytes from %s to %s memory, but its kind is %d", size, from_device ? "device" : "host",
               to_device ? "device" : "host", (int)kind);
        return false;
    }
    const void *device[] = {to_device ? to : nullptr, from_device ? from : nullptr};
    for (const void *p : device)
        if (p && !is_device(p, size)) {
            const allocation *a = allocation_near(p);
            report("copy of %zu bytes at %p: past the end of, or not in, an allocation (the nearest has %zu bytes%s)", size, p,
                   a ? a->size : 0, a && !a->live ? ", freed" : "");
            return false;
        }
    return true;
}

static void copy(void *to, const void *from, size_t size)
{
    device_access access;
    if (in_arena(from) && !in_arena(to)) {
        copies_to_host++;
        bytes_to_host += size;
    }
    memcpy(to, from, size);
    memory_copied(to, from, size);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind kind, cudaStream_t stream)
{
    LOCK;
    machine_init();
    if (!size)
        return cudaSuccess;
    if (!right_way(to, from, size, kind))
        return failed(cudaErrorInvalidValue);
    const void *host = in_arena(to) ? in_arena(from) ? nullptr : from : to;
    if (host && stream_of(stream)->capture && !is_pinned(host, size)) {
        report("cudaMemcpyAsync of pageable host memory in a capture");
        stream_of(stream)->capture->invalid = true;
        return failed(cudaErrorStreamCaptureUnsupported);
    }
    push(stream, [=] { copy(to, from, size); });
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind kind)
{
    LOCK;
    REFUSE_IN_CAPTURE();
    drain(&null_stream);
    cudaError_t e = cudaMemcpyAsync(to, from, size, kind, nullptr);
    drain(&null_stream);
    return e;
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream)
{
    LOCK;
    if (width > to_pitch || width > from_pitch)
        return failed(cudaErrorInvalidPitchValue);
    for (size_t row = 0; row < height; row++) {
        cudaError_t e = cudaMemcpyAsync((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, kind, stream);
        if (e != cudaSuccess)
            return e;
    }
    return cudaSuccess;
}

cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                         cudaMemcpyKind kind)
{
    LOCK;
    REFUSE_IN_CAPTURE();
    cudaError_t e = cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, nullptr);
    drain(&null_stream);
    return e;
}

cudaError_t cudaMemsetAsync(void *p, int byte, size_t size, cudaStream_t stream)
{
    LOCK;
    machine_init();
    if (!size)
        return cudaSuccess;
    if (!is_device(p, size)) {
        report("cudaMemset of %zu bytes at %p: not in one allocation", size, p);
        return failed(cudaErrorInvalidValue);
    }
    push(stream, [=] {
        device_access access;
        memset(p, byte, size);
        memory_written(p, size);
    });
    return cudaSuccess;
}

cudaError_t cudaMemset(void *p, int byte, size_t size)
{
    LOCK;
    REFUSE_IN_CAPTURE();
    cudaError_t e = cudaMemsetAsync(p, byte, size, nullptr);
    drain(&null_stream);
    return e;
}

/* ---- streams ---- */

cudaError_t cudaStreamCreate(cudaStream_t *s)
{
    LOCK;
    *s = new CUstream_st;
    streams.insert(*s);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned)
{
    return cudaStreamCreate(s);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned, int)
{
    return cudaStreamCreate(s);
}

cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    LOCK;
    drain(stream_of(s));
    for (CUevent_st *e : events)
        if (e->stream == s)
            e->stream = nullptr;
    streams.erase(s);
    delete s;
    return cudaSuccess;
}

static cudaError_t waited()
{
    if (fails("sync"))
        sticky = last_error = cudaErrorLaunchFailure;
    return failed(sticky);
}

cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    LOCK;
    REFUSE_IN_CAPTURE();
    drain(stream_of(s));
    return waited();
}

cudaError_t cudaDeviceSynchronize(void)
{
    LOCK;
    REFUSE_IN_CAPTURE();
    drain_all();
    return waited();
}

/* Each question lets one piece of work run, so that a loop of them ends. */
cudaError_t cudaStreamQuery(cudaStream_t s)
{
    LOCK;
    CUstream_st *stream = stream_of(s);
    if (stream->queue.empty())
        return failed(sticky);
    drain_to(stream, stream->done + 1);
    return cudaErrorNotReady;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t fn, void *data)
{
    push(s, [=] { fn(data); });
    return cudaSuccess;
}

/* ---- events ---- */

cudaError_t cudaEventCreate(cudaEvent_t *e)
{
    LOCK;
    *e = new CUevent_st;
    events.insert(*e);
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned)
{
    return cudaEventCreate(e);
}

cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    LOCK;
    events.erase(e);
    delete e;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    LOCK;
    CUstream_st *stream = stream_of(s);
    e->stream = stream;
    e->place = stream->queued;
    e->capture = stream->capture;
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t e)
{
    LOCK;
    if (!e->stream || e->stream->done >= e->place)
        return failed(sticky);
    drain_to(e->stream, e->stream->done + 1);
    return cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    LOCK;
    REFUSE_IN_CAPTURE();
    if (e->stream)
        drain_to(e->stream, e->place);
    return waited();
}

/* Time does not exist here; 1 us keeps rates finite. */
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    LOCK;
    bool done = from->stream && to->stream && from->stream->done >= from->place && to->stream->done >= to->place;
    *ms = 0.001f;
    return done ? cudaSuccess : failed(cudaErrorNotReady);
}

/* An event of a capture draws the other stream into it. */
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned)
{
    LOCK;
    CUstream_st *stream = stream_of(s), *other = e->stream;
    uint64_t place = e->place;
    if (e->capture) {
        stream->capture = e->capture;
        return cudaSuccess;
    }
    if (other && other != stream)
        push(s, [=] { drain_to(other, place); });
    return cudaSuccess;
}

/* ---- graphs ---- */

cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode)
{
    LOCK;
    CUstream_st *stream = stream_of(s);
    if (stream == &null_stream || stream->capture)
        return failed(stream->capture ? cudaErrorIllegalState : cudaErrorStreamCaptureUnsupported);
    stream->capture = new CUgraph_st;
    stream->origin = true;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph)
{
    LOCK;
    CUstream_st *stream = stream_of(s);
    CUgraph_st *captured = stream->capture;
    *graph = nullptr;
    if (!captured || !stream->origin)
        return failed(captured ? cudaErrorStreamCaptureUnmatched : cudaErrorIllegalState);
    for (CUstream_st *other : streams)
        if (other->capture == captured)
            other->capture = nullptr;
    stream->origin = false;
    if (captured->invalid) {
        delete captured;
        return failed(cudaErrorStreamCaptureInvalidated);
    }
    *graph = captured;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus *status)
{
    LOCK;
    CUgraph_st *captured = stream_of(s)->capture;
    *status = !captured           ? cudaStreamCaptureStatusNone
              : captured->invalid ? cudaStreamCaptureStatusInvalidated
                                  : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long)
{
    LOCK;
    if (fails("instantiate"))
        return failed(cudaErrorMemoryAllocation);
    *exec = new CUgraphExec_st{graph->nodes};
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *n)
{
    if (nodes)
        return failed(cudaErrorNotSupported);
    *n = graph->nodes.size();
    return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t)
{
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s)
{
    LOCK;
    if (fails("launch"))
        return failed(cudaErrorLaunchFailure);
    for (const work &node : exec->nodes)
        push(s, node);
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    delete graph;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    delete exec;
    return cudaSuccess;
}

/* ---- kernels ---- */

cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute attribute, int value)
{
    LOCK;
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize)
        return cudaSuccess;
    if (value < 0 || (size_t)value > shared_opt_in())
        return failed(cudaErrorInvalidValue);
    dynamic_limit[kernel] = (size_t)value;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int threads, size_t smem, unsigned)
{
    int by_threads = threads > 0 ? 2048 / threads : 0, by_smem = (int)((shared_opt_in() + 1024) / (smem + 1024));
    *blocks = by_threads < by_smem ? by_threads : by_smem;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads, size_t smem)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel, threads, smem, 0);
}
}
