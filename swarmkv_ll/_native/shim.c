/*
 * The few things cffi cannot do by itself: a memmove that runs without the GIL, advice and locks for host memory,
 * the engine's log line by line, a Ctrl-C check inside a long decode, and which engine is really loaded.
 */
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
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

static void skv_on_log(int level, const char * text);
static bool skv_on_progress(float progress, void * user_data);
static bool skv_on_interrupt(void * data);

/* ── which engine this is ── */

const char * skv_library_path(void) {
    Dl_info info;
    return dladdr((void *) llama_backend_init, &info) && info.dli_fname ? info.dli_fname : "";
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

/* ── the engine's log, handed on in whole lines ── */

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static char log_line[1024];
static size_t log_used;
static int log_level;

/* Python is called after the lock is let go: a thread that waits for the GIL must not hold it. */
static void on_log(enum ggml_log_level level, const char * text, void * user_data) {
    (void) user_data;
    while (*text) {
        char line[sizeof log_line];
        int line_level = 0;
        pthread_mutex_lock(&log_lock);
        if (level != GGML_LOG_LEVEL_CONT) {
            log_level = level;
        }
        while (*text && !line_level) {
            const bool full = log_used == sizeof log_line - 1;
            if (*text == '\n' || full) {
                memcpy(line, log_line, log_used);
                line[log_used] = 0;
                line_level = log_used ? log_level : 0;
                log_used = 0;
                text += !full;
            } else {
                log_line[log_used++] = *text++;
            }
        }
        pthread_mutex_unlock(&log_lock);
        if (line_level) {
            skv_on_log(line_level, line);
        }
    }
}

void skv_route_log(void) {
    llama_log_set(on_log, NULL);
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

/* ── Ctrl-C inside a decode ── */

/*
 * The engine asks before each graph node, some hundred times a token, in the thread that called it. Only the main
 * thread can run signal handlers, and it asks Python at most 20 times a second.
 */
bool skv_poll_interrupt(void * data) {
    static _Thread_local int is_main = -1;
    static int64_t next_us; /* of the main thread only */
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
