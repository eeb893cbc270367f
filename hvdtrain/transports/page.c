/* How the ranks of one host meet in shared memory, and add up small tensors there.

`page.py` loads it; where it was not compiled, `shm_sync` has semaphores instead. One rank's memory
holds the page of the group: how many ranks have arrived, and the generation, which is the number of
meetings that are over. A meeting:

    each rank:          copy its tensor and its call to its own memory;  add 1 to `arrived`
    the last of them:   compare the calls;  add up the tensors;  set `matched`
                        set `arrived` to 0;  publish the next generation;  wake all sleepers
    the others:         poll for the next generation, then sleep until it is published
    each rank:          copy the sum to its tensor, in Python: its memory may have moved meanwhile

Why each rank sees what it reads. `arrived` is counted by read-modify-writes that acquire and
release, so they are one release sequence: the last rank, which reads all other ranks' increments,
sees what they wrote before. `generation` is stored with release order after the last rank's writes,
and loaded with acquire order by the others, so they see the sum, `matched`, and `arrived` being 0.
A rank writes to the memory of meeting m again in meeting m + 2. It enters that after meeting m + 1
is over, so after all ranks have arrived there, and so after they have read what belongs to m.
On x86-64 the increments are locked instructions, and the other loads and stores plain ones, whose
order its memory model keeps; only the compiler is held back. On ARM64 they are LDADDAL or
load-acquire and store-release exclusives, STLR, and LDAR; without these the sum could be read
before the generation. Both have the futex system calls: a rank sleeps only while the generation is
the one that it has read, which the kernel checks under a lock that waking takes, too, so no wake-up
is lost.

A rank that dies leaves the others waiting: they return to Python every 0.2 s, which looks for lost
ranks. So they do at a signal.
*/

#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum outcome { MATCHED, DIFFERENT, LATE, LAST }; /* page.py has the same numbers */
enum dtype { NONE, FLOAT32, FLOAT64, INT32, INT64 };

#define POLLS 120          /* before a rank sleeps: some 20 us, if no other process runs meanwhile */
#define CHECK_NS 200000000 /* how long it sleeps before Python looks for lost ranks */

struct page {
    _Alignas(64) uint32_t arrived;
    _Alignas(64) uint32_t generation;
};

/* A call that reduces a tensor. page.py has the same fields of this and the next. */
struct call {
    const char *text; /* what the rank writes to its slot */
    uint64_t text_bytes, num_bytes;
    uint32_t dtype, divisor;
};

/* One rank's side of a group. */
struct group {
    struct page *page;
    uint8_t *matched;  /* whether the calls of the last meeting were alike */
    uint64_t *entered; /* the others read here how many meetings this rank has entered */
    char **slots;      /* of the calls: of all ranks for even meetings, then for odd ones */
    char **staging;    /* of the tensors, in the same order */
    uint32_t num_ranks, local_rank;
    uint32_t generation; /* of the meeting that this rank waits for */
    uint64_t meetings;   /* that this rank has entered */
};

/* Return the digest of the file that this was compiled from. */
const char *page_source(void)
{
    return PAGE_SOURCE;
}

static int is_over(const struct group *g)
{
    return __atomic_load_n(&g->page->generation, __ATOMIC_ACQUIRE) != g->generation;
}

static enum outcome leave(const struct group *g)
{
    return *g->matched ? MATCHED : DIFFERENT;
}

/* Return true if this rank is the last to arrive. */
static int arrive(struct group *g)
{
    g->generation = __atomic_load_n(&g->page->generation, __ATOMIC_RELAXED);
    __atomic_store_n(g->entered, ++g->meetings, __ATOMIC_RELAXED);
    return __atomic_add_fetch(&g->page->arrived, 1, __ATOMIC_ACQ_REL) == g->num_ranks;
}

/* Wait until the meeting is over. Return MATCHED or DIFFERENT, or LATE after 0.2 s or at a signal:
   then call it again. */
int page_wait(struct group *g)
{
    /* Each poll yields the core: with more ranks than cores to a rank that has yet to arrive. */
    for (int i = 0; i < POLLS; i++) {
        if (is_over(g))
            return leave(g);
        sched_yield();
    }
    struct timespec most = {0, CHECK_NS};
    syscall(SYS_futex, &g->page->generation, FUTEX_WAIT, g->generation, &most, NULL, 0);
    return is_over(g) ? leave(g) : LATE;
}

/* End the meeting, by the last rank to arrive. */
void page_release(struct group *g)
{
    __atomic_store_n(&g->page->arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&g->page->generation, g->generation + 1, __ATOMIC_RELEASE);
    syscall(SYS_futex, &g->page->generation, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Enter a meeting without a call. Return what page_wait does, or LAST to the last rank, which has
   to call page_release. */
int page_enter(struct group *g)
{
    return arrive(g) ? LAST : page_wait(g);
}

#define ADD(type)                                                                               \
    for (uint32_t r = 1; r < g->num_ranks; r++) {                                                \
        type *sum = (type *)staging[0];                                                          \
        const type *other = (const type *)staging[r];                                            \
        for (uint64_t i = 0; i < call->num_bytes / sizeof(type); i++)                            \
            sum[i] += other[i];                                                                  \
    }
#define DIVIDE(type)                                                                             \
    for (uint64_t i = 0; call->divisor > 1 && i < call->num_bytes / sizeof(type); i++)           \
        ((type *)staging[0])[i] /= (type)call->divisor;

/* Enter meeting `number` with a call and a tensor. The staging area of the first rank has then the
   sum over all ranks, in their order, divided by the divisor if it is a float. Return what page_wait
   does, or LAST to the last rank if the calls differ: then nothing is added up. */
int page_reduce(struct group *g, uint32_t number, const struct call *call, const char *tensor)
{
    char **slots = g->slots + number % 2 * g->num_ranks;
    char **staging = g->staging + number % 2 * g->num_ranks;
    memcpy(staging[g->local_rank], tensor, call->num_bytes);
    memcpy(slots[g->local_rank], call->text, call->text_bytes);
    if (!arrive(g))
        return page_wait(g);
    for (uint32_t r = 0; r < g->num_ranks; r++)
        if (memcmp(slots[r], call->text, call->text_bytes))
            return LAST;
    switch (call->dtype) {
    case FLOAT32:
        ADD(float)
        DIVIDE(float)
        break;
    case FLOAT64:
        ADD(double)
        DIVIDE(double)
        break;
    case INT32:
        ADD(uint32_t) /* unsigned, because they may overflow */
        break;
    case INT64:
        ADD(uint64_t)
        break;
    }
    *g->matched = 1;
    page_release(g);
    return leave(g);
}
