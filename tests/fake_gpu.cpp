/*
 * A GPU that is not there, as a backend module for the engine: one device of the kind GPU, whose work is done late, by a
 * thread, on the CPU. For tests of what a GPU demands of the library where none is to be had.
 *
 * - Device memory may be touched only by the device: between its own calls it is closed (PROT_NONE), so that a host
 *   read or write of it is a segmentation fault.
 * - Whatever a stream is given (graphs, asynchronous copies) waits some time before it is done. What is read before a
 *   synchronize is old, or, of an asynchronous copy, 0xA5. The blocking copies of buffers do not wait for streams: as in
 *   CUDA, that is for the caller to do.
 * - Its host buffer type stands for page-locked memory, and can be told to fail in the ways CUDA's does.
 * - Every call is logged, with the host addresses it reads or writes; the exported functions at the end are for ctypes.
 */
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

namespace {

// ── what was called ─────────────────────────────────────────────────────────────────────────────────

struct Call {
    const char * what;
    uint64_t host;  // the host memory that is read or written, 0 where there is none
    uint64_t n_bytes;
};

std::mutex log_lock;
std::vector<Call> calls;

void note(const char * what, const void * host = nullptr, size_t n_bytes = 0) {
    std::lock_guard<std::mutex> hold(log_lock);
    calls.push_back({what, reinterpret_cast<uintptr_t>(host), n_bytes});
}

// ── device memory ───────────────────────────────────────────────────────────────────────────────────

struct Memory {
    void * base;
    size_t size;
};

std::mutex memory_lock;
std::set<Memory *> memories;
int n_open = 0;  // device calls that are at work in it
size_t memory_total = size_t(1) << 30, memory_used = 0;

void protect(int mode) {
    for (const Memory * memory : memories) {
        mprotect(memory->base, memory->size, mode);
    }
}

struct Opened {
    Opened() {
        std::lock_guard<std::mutex> hold(memory_lock);
        if (n_open++ == 0) {
            protect(PROT_READ | PROT_WRITE);
        }
    }
    ~Opened() {
        std::lock_guard<std::mutex> hold(memory_lock);
        if (--n_open == 0) {
            protect(PROT_NONE);
        }
    }
};

Memory * allocate(size_t size) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE)), whole = (size + page - 1) / page * page + page;
    std::lock_guard<std::mutex> hold(memory_lock);
    if (memory_used + whole > memory_total) {
        return nullptr;
    }
    const int mode = n_open ? PROT_READ | PROT_WRITE : PROT_NONE;
    void * base = mmap(nullptr, whole, mode, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) {
        return nullptr;
    }
    memory_used += whole;
    auto * memory = new Memory{base, whole};
    memories.insert(memory);
    return memory;
}

void release(Memory * memory) {
    std::lock_guard<std::mutex> hold(memory_lock);
    memories.erase(memory);
    memory_used -= memory->size;
    munmap(memory->base, memory->size);
    delete memory;
}

// ── buffers of it: blocking copies ──────────────────────────────────────────────────────────────────

extern ggml_backend_buffer_type device_type, host_type;
extern ggml_backend_device device;
extern ggml_backend_reg registry;

void * buffer_base(ggml_backend_buffer_t buffer) { return static_cast<Memory *>(buffer->context)->base; }

void buffer_free(ggml_backend_buffer_t buffer) {
    note("free");
    release(static_cast<Memory *>(buffer->context));
}

void buffer_memset(ggml_backend_buffer_t, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    Opened open;
    memset(static_cast<char *>(tensor->data) + offset, value, size);
}

void buffer_set(ggml_backend_buffer_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    note("set", data, size);
    Opened open;
    memcpy(static_cast<char *>(tensor->data) + offset, data, size);
}

void buffer_get(ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    note("get", data, size);
    Opened open;
    memcpy(data, static_cast<const char *>(tensor->data) + offset, size);
}

bool buffer_copy(ggml_backend_buffer_t, const ggml_tensor * source, ggml_tensor * target) {
    if (source->buffer->buft != &device_type) {
        return false;
    }
    note("copy", nullptr, ggml_nbytes(source));
    Opened open;
    memcpy(target->data, source->data, ggml_nbytes(source));
    return true;
}

void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    Opened open;
    auto * memory = static_cast<Memory *>(buffer->context);
    memset(memory->base, value, memory->size);
}

ggml_backend_buffer_t device_alloc(ggml_backend_buffer_type_t type, size_t size) {
    Memory * memory = allocate(size);
    note(memory ? "alloc" : "alloc failed", nullptr, size);
    if (!memory) {
        return nullptr;
    }
    ggml_backend_buffer_i calls_of = {};
    calls_of.free_buffer = buffer_free;
    calls_of.get_base = buffer_base;
    calls_of.memset_tensor = buffer_memset;
    calls_of.set_tensor = buffer_set;
    calls_of.get_tensor = buffer_get;
    calls_of.cpy_tensor = buffer_copy;
    calls_of.clear = buffer_clear;
    return ggml_backend_buffer_init(type, calls_of, memory, size);
}

// ── the host buffer type ────────────────────────────────────────────────────────────────────────────

enum Pinning { PINS, GIVES_ORDINARY, FAILS };  // the second is what CUDA's does where page locking fails
Pinning pinning = PINS;

void host_free(ggml_backend_buffer_t buffer) {
    note("host free", buffer->context);
    free(buffer->context);
}

ggml_backend_buffer_t host_alloc(ggml_backend_buffer_type_t type, size_t size) {
    if (pinning == FAILS) {
        return nullptr;
    }
    if (pinning == GIVES_ORDINARY) {
        return ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    }
    void * pointer = nullptr;
    if (posix_memalign(&pointer, 4096, size)) {
        return nullptr;
    }
    note("host alloc", pointer, size);
    ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(pointer, size);
    buffer->buft = type;
    buffer->iface.free_buffer = host_free;
    return buffer;
}

// ── a stream: done in order, late ───────────────────────────────────────────────────────────────────

int delay_us = 3000;
std::atomic<int> n_pending{0};  // pieces of work that streams were given and have not done

class Stream {
public:
    Stream() : cpu(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr)), worker([this] { run(); }) {
        auto * cpu_registry = ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu));
        auto set_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
            ggml_backend_reg_get_proc_address(cpu_registry, "ggml_backend_set_n_threads"));
        set_threads(cpu, 1);
    }

    ~Stream() {
        wait(given());
        {
            std::lock_guard<std::mutex> hold(lock);
            ends = true;
        }
        changed.notify_all();
        worker.join();
        ggml_backend_free(cpu);
    }

    void give(std::function<void()> work) {
        std::lock_guard<std::mutex> hold(lock);
        queue.push_back(std::move(work));
        n_given++;
        n_pending++;
        changed.notify_all();
    }

    uint64_t given() {
        std::lock_guard<std::mutex> hold(lock);
        return n_given;
    }

    bool wait(uint64_t n) {  // whether there was something to wait for
        std::unique_lock<std::mutex> hold(lock);
        const bool waits = n_done < n;
        changed.wait(hold, [&] { return n_done >= n; });
        return waits;
    }

    ggml_backend_t cpu;

private:
    void run() {
        std::unique_lock<std::mutex> hold(lock);
        while (true) {
            changed.wait(hold, [this] { return ends || !queue.empty(); });
            if (queue.empty()) {
                return;
            }
            auto work = std::move(queue.front());
            queue.pop_front();
            hold.unlock();
            std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
            {
                Opened open;
                work();
            }
            hold.lock();
            n_done++;
            n_pending--;
            changed.notify_all();
        }
    }

    std::mutex lock;
    std::condition_variable changed;
    std::deque<std::function<void()>> queue;
    uint64_t n_given = 0, n_done = 0;
    bool ends = false;
    std::thread worker;
};

Stream & stream_of(ggml_backend_t backend) { return *static_cast<Stream *>(backend->context); }

// A graph as it is when it is given: like kernels that were launched, it no longer needs the caller's.
struct Launched {
    std::deque<ggml_tensor> tensors;
    std::unordered_map<const ggml_tensor *, ggml_tensor *> found;
    ggml_context * memory;
    ggml_cgraph * graph;

    explicit Launched(ggml_cgraph * source) {
        const int n = ggml_graph_n_nodes(source);
        memory = ggml_init({ggml_graph_overhead_custom(size_t(n), false) + 1024, nullptr, true});
        graph = ggml_new_graph_custom(memory, size_t(n), false);
        for (int i = 0; i < n; i++) {
            const ggml_tensor * node = ggml_graph_node(source, i);
            ggml_tensor * mine = copy(node);
            for (int j = 0; j < GGML_MAX_SRC; j++) {
                mine->src[j] = node->src[j] ? copy(node->src[j]) : nullptr;
            }
            ggml_graph_add_node(graph, mine);
        }
    }

    ~Launched() { ggml_free(memory); }

    ggml_tensor * copy(const ggml_tensor * tensor) {
        ggml_tensor *& known = found[tensor];
        if (!known) {
            tensors.push_back(*tensor);
            known = &tensors.back();
            memset(known->src, 0, sizeof known->src);  // what has computed it is no part of this graph, or comes yet
            known->view_src = nullptr;
        }
        return known;
    }
};

const char * backend_name(ggml_backend_t) { return "FAKE"; }

void backend_free(ggml_backend_t backend) {
    delete static_cast<Stream *>(backend->context);
    delete backend;
}

void set_async(ggml_backend_t backend, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    note("set async", data, size);
    char * target = static_cast<char *>(tensor->data) + offset;
    stream_of(backend).give([=] { memcpy(target, data, size); });
}

void get_async(ggml_backend_t backend, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    note("get async", data, size);
    const char * source = static_cast<const char *>(tensor->data) + offset;
    memset(data, 0xA5, size);
    stream_of(backend).give([=] { memcpy(data, source, size); });
}

void synchronize(ggml_backend_t backend) {
    Stream & stream = stream_of(backend);
    note(stream.wait(stream.given()) ? "synchronize, waited" : "synchronize");
}

ggml_status compute(ggml_backend_t backend, ggml_cgraph * graph) {
    note("compute");
    auto launched = std::make_shared<Launched>(graph);
    ggml_backend_t cpu = stream_of(backend).cpu;
    stream_of(backend).give([=] { ggml_backend_graph_compute(cpu, launched->graph); });
    return GGML_STATUS_SUCCESS;
}

struct Event {
    Stream * stream;
    uint64_t n;
};

void event_record(ggml_backend_t backend, ggml_backend_event_t event) {
    *static_cast<Event *>(event->context) = {&stream_of(backend), stream_of(backend).given()};
}

void event_synchronize(ggml_backend_dev_t, ggml_backend_event_t event) {
    auto * recorded = static_cast<Event *>(event->context);
    if (recorded->stream) {
        recorded->stream->wait(recorded->n);
    }
}

void event_wait(ggml_backend_t, ggml_backend_event_t event) { event_synchronize(nullptr, event); }

ggml_backend_event_t event_new(ggml_backend_dev_t of) { return new ggml_backend_event{of, new Event{nullptr, 0}}; }

void event_free(ggml_backend_dev_t, ggml_backend_event_t event) {
    delete static_cast<Event *>(event->context);
    delete event;
}

// ── the device ──────────────────────────────────────────────────────────────────────────────────────

ggml_backend_dev_t cpu_device() { return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); }

const char * device_name(ggml_backend_dev_t) { return "FAKE0"; }
const char * device_description(ggml_backend_dev_t) { return "a GPU that is not there"; }
enum ggml_backend_dev_type device_kind(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }

void device_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    std::lock_guard<std::mutex> hold(memory_lock);
    *total = memory_total;
    *free = memory_total > memory_used ? memory_total - memory_used : 0;
}

void device_props(ggml_backend_dev_t of, ggml_backend_dev_props * props) {
    props->name = device_name(of);
    props->description = device_description(of);
    props->type = device_kind(of);
    device_memory(of, &props->memory_free, &props->memory_total);
    props->caps.async = props->caps.host_buffer = props->caps.events = true;
    props->caps.buffer_from_host_ptr = false;
}

ggml_backend_t device_backend(ggml_backend_dev_t of, const char *) {
    static uint8_t guid[16] = {0xfa, 0x4e};
    ggml_backend_i calls_of = {};
    calls_of.get_name = backend_name;
    calls_of.free = backend_free;
    calls_of.set_tensor_async = set_async;
    calls_of.get_tensor_async = get_async;
    calls_of.synchronize = synchronize;
    calls_of.graph_compute = compute;
    calls_of.event_record = event_record;
    calls_of.event_wait = event_wait;
    return new ggml_backend{&guid, calls_of, of, new Stream};
}

ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t) { return &device_type; }
ggml_backend_buffer_type_t device_host_buffer_type(ggml_backend_dev_t) { return &host_type; }
bool device_supports_op(ggml_backend_dev_t, const ggml_tensor * op) { return ggml_backend_dev_supports_op(cpu_device(), op); }
bool device_supports_type(ggml_backend_dev_t, ggml_backend_buffer_type_t type) { return type == &device_type; }

const char * device_type_name(ggml_backend_buffer_type_t) { return "FAKE0"; }
const char * host_type_name(ggml_backend_buffer_type_t) { return "FAKE_Host"; }
size_t alignment(ggml_backend_buffer_type_t) { return 128; }  // as CUDA's
bool yes(ggml_backend_buffer_type_t) { return true; }
bool no(ggml_backend_buffer_type_t) { return false; }

ggml_backend_buffer_type device_type = {
    {device_type_name, device_alloc, alignment, nullptr, nullptr, no}, &device, nullptr};
ggml_backend_buffer_type host_type = {{host_type_name, host_alloc, alignment, nullptr, nullptr, yes}, &device, nullptr};

ggml_backend_device device = {
    {device_name, device_description, device_memory, device_kind, device_props, device_backend, device_buffer_type,
     device_host_buffer_type, nullptr, device_supports_op, device_supports_type, nullptr, event_new, event_free,
     event_synchronize},
    &registry,
    nullptr};

const char * registry_name(ggml_backend_reg_t) { return "FAKE"; }
size_t registry_count(ggml_backend_reg_t) { return 1; }
ggml_backend_dev_t registry_device(ggml_backend_reg_t, size_t) { return &device; }
void * registry_function(ggml_backend_reg_t, const char *) { return nullptr; }

ggml_backend_reg registry = {
    GGML_BACKEND_API_VERSION, {registry_name, registry_count, registry_device, registry_function}, nullptr};

}  // namespace

extern "C" {

ggml_backend_reg_t ggml_backend_init(void) { return &registry; }

// ── for the tests ───────────────────────────────────────────────────────────────────────────────────

uint64_t fake_n_calls(void) {
    std::lock_guard<std::mutex> hold(log_lock);
    return calls.size();
}

const char * fake_call(uint64_t index, uint64_t * host, uint64_t * n_bytes) {
    std::lock_guard<std::mutex> hold(log_lock);
    *host = calls[index].host;
    *n_bytes = calls[index].n_bytes;
    return calls[index].what;
}

void fake_forget_calls(void) {
    std::lock_guard<std::mutex> hold(log_lock);
    calls.clear();
}

void fake_note(const char * what, uint64_t host, uint64_t n_bytes) {  // `what` has to last
    note(what, reinterpret_cast<const void *>(host), n_bytes);
}

void fake_pinning(int mode) { pinning = Pinning(mode); }

void fake_memory(uint64_t total) { memory_total = total; }

uint64_t fake_memory_used(void) {
    std::lock_guard<std::mutex> hold(memory_lock);
    return memory_used;
}

int fake_pending(void) { return n_pending; }

void fake_delay(int microseconds) { delay_us = microseconds; }
}
