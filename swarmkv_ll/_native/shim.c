/*
 * The few things cffi cannot do by itself: a memmove that runs without the GIL, advice and locks for host memory,
 * the engine's log kept line by line, a Ctrl-C check inside a long decode, and which engine is really loaded.
 */
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "ggml.h"
#include "ggml-backend.h"
#include "llama.h"

#ifndef SKV_BUILT_STAMP
#error "SKV_BUILT_STAMP comes from build.py"
#endif

static bool skv_on_progress(float progress, void * user_data);
static bool skv_on_interrupt(void * data);

/* ── which engine this is ── */

const char * skv_library_path(void) {
    Dl_info info;
    return dladdr((void *) llama_backend_init, &info) && info.dli_fname ? info.dli_fname : "";
}

/* How well a variant of a backend suits this processor, by its own word; 0: not at all. */
int skv_backend_score(const char * path) {
    void * library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        return 0;
    }
    int (*score)(void) = (int (*)(void)) dlsym(library, "ggml_backend_score");
    const int found = score ? score() : 0;
    dlclose(library);
    return found;
}

struct build_id { uintptr_t address; char hex[2 * 20 + 1]; };

/* The GNU build id of the object that holds `address`, read from the notes the loader has mapped. */
static int find_build_id(struct dl_phdr_info * info, size_t size, void * data) {
    (void) size;
    struct build_id * wanted = data;
    bool ours = false;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) * p = &info->dlpi_phdr[i];
        const uintptr_t begin = info->dlpi_addr + p->p_vaddr;
        ours = ours || (p->p_type == PT_LOAD && wanted->address >= begin && wanted->address < begin + p->p_memsz);
    }
    for (int i = 0; ours && i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) * p = &info->dlpi_phdr[i];
        if (p->p_type != PT_NOTE) {
            continue;
        }
        const char * note = (const char *) (info->dlpi_addr + p->p_vaddr);
        const char * end = note + p->p_memsz;
        while (note + sizeof(ElfW(Nhdr)) <= end) {
            const ElfW(Nhdr) * head = (const ElfW(Nhdr) *) note;
            const char * name = note + sizeof(*head);
            const unsigned char * desc = (const unsigned char *) name + ((head->n_namesz + 3) & ~3u);
            if (head->n_type == NT_GNU_BUILD_ID && head->n_namesz == 4 && memcmp(name, "GNU", 4) == 0) {
                for (unsigned j = 0; j < head->n_descsz && j < 20; j++) {
                    snprintf(wanted->hex + 2 * j, 3, "%02x", desc[j]);
                }
                return 1;
            }
            note = (const char *) desc + ((head->n_descsz + 3) & ~3u);
        }
    }
    return ours;
}

const char * skv_built_stamp(void) { return SKV_BUILT_STAMP; }

const char * skv_loaded_stamp(void) {
    static char stamp[160];
    struct build_id id = { (uintptr_t) llama_backend_init, "" };
    dl_iterate_phdr(find_build_id, &id);
    snprintf(stamp, sizeof stamp, "%s/%.16s", ggml_commit(), id.hex);
    return stamp;
}

/*
 * ── the engine's log, kept in whole lines until Python takes them ──
 *
 * Python is not called from here: it would notice Ctrl-C on entering the callback, which cannot raise.
 */

struct line { struct line * next; long owner; int level; char text[]; };

enum { MOST_LINES = 10000 };

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static struct line * first_line;
static struct line ** last_link = &first_line;
static int n_lines;

static _Thread_local int collecting;      /* depth of skv_begin_log in this thread */
static _Thread_local bool wants_debug;
static _Thread_local char partial[1024];
static _Thread_local size_t partial_used;
static _Thread_local int partial_level;

static void keep_line(void) {
    struct line * line = malloc(sizeof *line + partial_used + 1);
    if (line) {
        *line = (struct line) { NULL, collecting ? syscall(SYS_gettid) : 0, partial_level };
        memcpy(line->text, partial, partial_used);
        line->text[partial_used] = 0;
        pthread_mutex_lock(&log_lock);
        *last_link = line;
        last_link = &line->next;
        if (++n_lines > MOST_LINES) {
            struct line * oldest = first_line;
            first_line = oldest->next;
            n_lines--;
            free(oldest);
        }
        pthread_mutex_unlock(&log_lock);
    }
}

static void advise_new_memory(void);

static ggml_log_callback volatile others_log; /* whose the log was before our calls took it */
static void * volatile others_data;

static void on_log(enum ggml_log_level level, const char * text, void * user_data) {
    (void) user_data;
    const ggml_log_callback others = others_log;
    if (!collecting && others && others != on_log) { /* another binding's call, in a thread of its own */
        others(level, text, others_data);
        return;
    }
    if (strstr(text, "CPU KV buffer size")) { /* not a driver's own mappings */
        advise_new_memory();
    }
    if (level != GGML_LOG_LEVEL_CONT) {
        partial_level = level;
    }
    if (partial_level == GGML_LOG_LEVEL_DEBUG && !wants_debug) {
        return;
    }
    for (; *text; text++) {
        const bool ends = *text == '\n' || partial_used == sizeof partial - 1;
        if (ends && partial_used) {
            keep_line();
            partial_used = 0;
        }
        if (*text != '\n') {
            partial[partial_used++] = *text;
        }
    }
}

/* Whether a callback is the engine's own, which writes to standard error. */
static bool is_default(ggml_log_callback callback) {
    Dl_info ggml, its;
    return dladdr((void *) ggml_log_set, &ggml) && dladdr((void *) callback, &its) && ggml.dli_fbase == its.dli_fbase;
}

/* For good, unless another binding in the process has the log already. */
void skv_route_log(void) {
    ggml_log_callback callback;
    void * data;
    llama_log_get(&callback, &data);
    if (is_default(callback)) {
        llama_log_set(on_log, NULL);
    }
}

/* While any of our calls runs, it is ours, and goes back afterwards. */
static int n_collecting;

/* From here to skv_end_log, lines logged in this thread are for this thread to take; others are for whoever comes. */
void skv_begin_log(bool debug) {
    collecting++;
    wants_debug = debug;
    pthread_mutex_lock(&log_lock);
    if (n_collecting++ == 0) {
        ggml_log_callback callback;
        void * data;
        llama_log_get(&callback, &data);
        others_log = callback;
        others_data = data;
        if (callback != on_log) {
            llama_log_set(on_log, NULL);
        }
    }
    pthread_mutex_unlock(&log_lock);
}

void skv_end_log(void) {
    collecting--;
    pthread_mutex_lock(&log_lock);
    if (--n_collecting == 0 && others_log != on_log) {
        llama_log_set(others_log, others_data);
    }
    pthread_mutex_unlock(&log_lock);
}

/* Takes the oldest line of this thread or of none; returns its level, 0 if there is none. */
int skv_take_log(char * out, size_t size) {
    const long me = syscall(SYS_gettid);
    struct line * found = NULL;
    pthread_mutex_lock(&log_lock);
    for (struct line ** link = &first_line; *link; link = &(*link)->next) {
        if ((*link)->owner == me || (*link)->owner == 0) {
            found = *link;
            *link = found->next;
            last_link = found->next ? last_link : link;
            n_lines--;
            break;
        }
    }
    pthread_mutex_unlock(&log_lock);
    if (!found) {
        return 0;
    }
    const int level = found->level ? found->level : GGML_LOG_LEVEL_INFO;
    snprintf(out, size, "%s", found->text);
    free(found);
    return level;
}

/* ── host memory; cffi lets the GIL go around each of these ── */

void skv_memmove(void * dst, const void * src, size_t n_bytes) { memmove(dst, src, n_bytes); }

int skv_advise_huge(void * ptr, size_t n_bytes) {
    return madvise(ptr, n_bytes, MADV_HUGEPAGE) == 0 ? 0 : errno;
}

int skv_prefault(void * ptr, size_t n_bytes) {
#ifdef MADV_POPULATE_WRITE
    if (madvise(ptr, n_bytes, MADV_POPULATE_WRITE) == 0) {
        return 0;
    }
    if (errno != EINVAL) { /* EINVAL: a kernel older than 5.14 */
        return errno;
    }
#endif
    const size_t page = (size_t) sysconf(_SC_PAGESIZE);
    for (size_t i = 0; i < n_bytes; i += page) {
        volatile char * byte = (volatile char *) ptr + i;
        *byte = *byte;
    }
    return 0;
}

int skv_lock(void * ptr, size_t n_bytes) { return mlock(ptr, n_bytes) == 0 ? 0 : errno; }

void skv_unlock(void * ptr, size_t n_bytes) { munlock(ptr, n_bytes); }

/*
 * ── huge pages for the KV cache ──
 *
 * The engine allocates its KV cache, says so in its log, and then clears it, which is what takes the pages. Advice given
 * in between makes them huge pages where the kernel gives those on request, for less time spent on page tables in every
 * export and restore. Should the log read otherwise one day, nothing is lost but that.
 */

struct range { uintptr_t begin, end; };

enum { MOST_RANGES = 1024 };

static _Thread_local struct range known[MOST_RANGES]; /* what was mapped before the context */
static _Thread_local int n_known = -1;                /* -1: no context is being made in this thread */

/* Private, writable, anonymous mappings, in order of address. */
static int read_ranges(struct range * out) {
    int n = 0;
    FILE * maps = fopen("/proc/self/maps", "re");
    for (char line[512]; maps && n < MOST_RANGES && fgets(line, sizeof line, maps);) {
        unsigned long begin, end, inode;
        char mode[5];
        if (sscanf(line, "%lx-%lx %4s %*s %*s %lu", &begin, &end, mode, &inode) == 4 && !inode
            && strcmp(mode, "rw-p") == 0) {
            out[n++] = (struct range) { begin, end };
        }
    }
    if (maps) {
        fclose(maps);
    }
    return n;
}

static void advise_new_memory(void) {
    struct range * now = n_known < 0 ? NULL : malloc(MOST_RANGES * sizeof *now);
    const int n = now ? read_ranges(now) : 0;
    for (int i = 0, k = 0; i < n; i++) {
        uintptr_t at = now[i].begin;
        while (at < now[i].end) {
            while (k < n_known && known[k].end <= at) {
                k++;
            }
            const uintptr_t stop = k < n_known && known[k].begin < now[i].end ? known[k].begin : now[i].end;
            if (stop > at && stop - at >= 2u << 20) {
                madvise((void *) at, stop - at, MADV_HUGEPAGE);
            }
            at = k < n_known && stop == known[k].begin ? known[k].end : stop;
        }
    }
    free(now);
}

/*
 * ── owners ──
 *
 * The engine's objects are put into memory that Python already owns before the call returns, so that a Ctrl-C on the
 * way back cannot lose them.
 */

void skv_model_load(const char * path, struct llama_model_params params, struct llama_model ** slot) {
    *slot = llama_model_load_from_file(path, params);
}

void skv_model_free(struct llama_model ** slot) {
    if (*slot) {
        llama_model_free(*slot);
    }
    *slot = NULL;
}

void skv_context_init(struct llama_model * model, struct llama_context_params params, struct llama_context ** slot) {
    n_known = read_ranges(known);
    *slot = llama_init_from_model(model, params);
    n_known = -1;
}

void skv_context_free(struct llama_context ** slot) {
    if (*slot) {
        llama_free(*slot);
    }
    *slot = NULL;
}

/* ── stopping a decode: Ctrl-C, and the end of the process ── */

static volatile bool stopping;

/* From now on every decode is stopped: the libraries it runs in are about to be torn down. */
void skv_stop_all(void) { stopping = true; }

/* For models whose decode cannot be left half-way through a batch. */
bool skv_poll_stop(void * data) {
    (void) data;
    return stopping;
}

/*
 * The engine asks before each graph node, some hundred times a token, in the thread that called it. Only the main
 * thread can run signal handlers, and it asks Python at most 20 times a second.
 */
bool skv_poll_interrupt(void * data) {
    static _Thread_local int is_main = -1;
    static int64_t next_us; /* of the main thread only */
    if (stopping) {
        return true;
    }
    if (is_main < 0) {
        is_main = getpid() == (pid_t) syscall(SYS_gettid);
    }
    if (!is_main) {
        return false;
    }
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    const int64_t now_us = (int64_t) t.tv_sec * 1000000 + t.tv_nsec / 1000;
    if (now_us < next_us) {
        return false;
    }
    next_us = now_us + 50000;
    return skv_on_interrupt(data);
}
