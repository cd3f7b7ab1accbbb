/*
 * Put before ggml-cpu.c of a wheel's engine (`-include`), which is compiled without OpenMP, so that its threads wait for
 * each other in a loop of ggml's own, after each of some 900 graph nodes, without ever giving the processor away. Beside
 * a busy neighbour the one that is waited for then cannot run. Here the loop gives way after a short spin.
 *
 * The macro turns ggml's definition `ggml_thread_cpu_relax(void)` into that of another, unused function, and each of its
 * calls `ggml_thread_cpu_relax()` into one of ours.
 */
#include <sched.h>

static inline void skv_relax_(void) {
    static _Thread_local unsigned n;
    if (++n % 2048 == 0) {
        sched_yield();
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    __asm__ volatile("yield" ::: "memory");
#endif
}

#define ggml_thread_cpu_relax(what) skv_relax_##what()
