/* `run_sm` of model/compiled/sm.py, with the queue of units/wgmma.py and the cache of units/fetch.py, in C.
 *
 * The Python is the statement of the rules and says why; this file follows it function by function under the same names,
 * adds and compares the same doubles in the same order, and must give the same digits (tests/unit/model/compiled/native).
 * Change both or neither.  Times in cycles; NAN stands for "not known yet".
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { PIPES = 8, COUNTERS = 6, LINE = 8 };
/* The order of KINDS in model/compiled/code.py. */
enum { PLAIN, MMA, MMA_WAIT, WAIT, ARRIVE, LOAD, STORE, BARRIER, MARK, SPILL, RELOAD };
enum { NO_TAG = -1, TURN = -2 };
enum { DONE = 0, STUCK = 1, NO_MEMORY = 2 };

typedef struct {
    double taken, taken_under_mma, slot, stall, latency, mma_cycles, port, hold;
    int32_t pipe, waits, write_counter, read_counter, kind, conditional, amount, commits, fetched, word;
} Instruction;

/* A piece of a program: `length` instructions from `code`, and the tags of its waits, arrivals and loads in order. */
typedef struct {
    int32_t code, length, begin;
    int32_t tags[3], count[3];
} Piece;

typedef struct {
    int32_t cta, number, pieces, piece_count, mark_offset, has_lines;
    double begins;
} Program;

typedef struct {
    double size, latency, share;
    int32_t tag, number, slots, of_query;
} Copy;

typedef struct {
    double size, latency, share;
} OwnCopy;

typedef struct {
    int32_t programs, copies, copy_count, own;
    double begins;
} CtaFacts;

typedef struct {
    double operand_release, barrier, barrier_spread, handover, one_way, mma_latency, mma_fetch, mma_beside_copy, port_left, tma_issue,
        tma_bytes_per_clk, memory_bytes_per_clk, store_bytes_per_clk, store_queue_bytes, reload_latency, fetch_cycles;
    int64_t mma_queue, spill_words, fetch_room;
    int32_t ctas, programs, stride, names, words, lines, has_cache, held;
} Facts;

/* --- lists of what was used last -------------------------------------------------------------------------------- */

/* Keys 0..n-1, the least recently used first; -1 ends the list. */
typedef struct {
    int32_t *before, *after;
    uint8_t *held;
    int32_t first, last;
    int64_t count;
} Recent;

static int recent_make(Recent *r, int n)
{
    r->before = malloc(sizeof(int32_t) * (n + 1));
    r->after = malloc(sizeof(int32_t) * (n + 1));
    r->held = calloc(n + 1, 1);
    r->first = r->last = -1;
    r->count = 0;
    return r->before && r->after && r->held;
}

static void recent_free(Recent *r)
{
    free(r->before);
    free(r->after);
    free(r->held);
}

static void recent_drop(Recent *r, int key)
{
    int before = r->before[key], after = r->after[key];
    if (before >= 0) r->after[before] = after; else r->first = after;
    if (after >= 0) r->before[after] = before; else r->last = before;
    r->held[key] = 0;
    r->count--;
}

static void recent_add(Recent *r, int key)
{
    r->before[key] = r->last;
    r->after[key] = -1;
    if (r->last >= 0) r->after[r->last] = key; else r->first = key;
    r->last = key;
    r->held[key] = 1;
    r->count++;
}

/* --- the state --------------------------------------------------------------------------------------------------- */

typedef struct {
    int cta, number, piece, last_piece, at, has_lines;
    int seen[3];
    int tag, line;
    const Instruction *now;
    double free, ready, held, counters[COUNTERS];
    int64_t last;
    int turns_taken, barriers_passed, marks;
    double *mark;
    /* WgmmaQueue: groups committed, and when those that are through were seen to be. */
    double *done;
    int64_t committed, done_count;
    /* When this warp passed its turn on. */
    double *turns;
    int64_t turn_count;
} Warp;

typedef struct {
    double begin, cycles, port;
    int warp, last;
} Waiting;

typedef struct {
    double *full, *released_last;
    int32_t *released_count;
    /* Barriers of several warpgroups: [barrier][warpgroup] when each came. */
    double *met;
    int64_t met_count;
    int next_copy;
    double producer_free;
} Cta;

typedef struct {
    const Facts *facts;
    const Instruction *table;
    const int32_t *code, *tags;
    const Piece *pieces;
    const Copy *copies;
    const OwnCopy *own;
    const CtaFacts *cta_facts;
    Warp *warps;
    Cta *ctas;
    int64_t seed;
    double engine_free, memory_free, store_free;
    Recent spilled, there;
    /* The instruction caches. */
    double *there_at, fetch_free;
    const uint8_t *known;
    /* The tensor core: instructions from `head` to `tail` wait; copies that come in. */
    Waiting *queue;
    int64_t head, tail, ends_count, interval, copy_head, copy_tail;
    int ending;
    double free, spare, owed, left;
    double *starts, *interval_ends, *ends, *copy_begins, *copy_ends;
} State;

static double larger(double a, double b) { return b > a ? b : a; }

/* --- units/wgmma.py ---------------------------------------------------------------------------------------------- */

static double room(State *s, double at)
{
    int64_t ended = s->ends_count + s->tail - s->head - s->facts->mma_queue;
    if (ended >= s->ends_count) return NAN;
    return ended >= 0 ? larger(at, s->ends[ended]) : at;
}

static double through(const Warp *w, int pending, double at)
{
    int64_t needed = w->committed - pending;
    if (needed <= 0) return at;
    return w->done_count >= needed ? larger(at, w->done[needed - 1]) : NAN;
}

static double next_service(const State *s) { return s->head < s->tail ? larger(s->free, s->queue[s->head].begin) : INFINITY; }

static void extend(State *s, double cycles)
{
    s->free += cycles;
    s->ends[s->ends_count - 1] = s->free;
    s->interval_ends[s->ends_count - 1] = s->free;
    if (s->ending >= 0) {
        Warp *w = &s->warps[s->ending];
        w->done[w->done_count - 1] = s->free + s->facts->mma_latency;
    }
}

static void share(State *s, double cycles)
{
    s->spare -= cycles;
    if (s->spare < 0.0) {
        extend(s, -s->spare);
        s->spare = 0.0;
    }
}

static double beside_copies(State *s, double begin, double end)
{
    double found = 0.0;
    while (s->copy_head < s->copy_tail && s->copy_ends[s->copy_head] <= begin) s->copy_head++;
    for (int64_t k = s->copy_head; k < s->copy_tail; k++) {
        double first = larger(s->copy_begins[k], begin), last = s->copy_ends[k] < end ? s->copy_ends[k] : end;
        if (last > first) found += (last - first) * s->facts->mma_beside_copy;
    }
    return found;
}

static void serve(State *s, double at)
{
    const Waiting next = s->queue[s->head++];
    Warp *w = &s->warps[next.warp];
    double cycles = next.cycles;
    cycles += beside_copies(s, at, at + cycles);
    s->free = at + cycles;
    s->starts[s->ends_count] = at;
    s->interval_ends[s->ends_count] = s->free;
    s->ends[s->ends_count++] = s->free;
    s->ending = next.last ? next.warp : -1;
    if (next.last) w->done[w->done_count++] = s->free + s->facts->mma_latency;
    s->spare = cycles - next.port;
    s->left = 1.0 - next.port / cycles;
    double shared = larger(0.0, s->owed - at);
    if (shared > 0.0) share(s, shared);
}

static double busy_until(const State *s, double at) { return s->head < s->tail ? INFINITY : larger(at, s->free); }

static int runs(State *s, double at)
{
    while (s->interval < s->ends_count && s->interval_ends[s->interval] <= at) s->interval++;
    return s->interval < s->ends_count && s->starts[s->interval] <= at;
}

/* `holds` of the queue. */
static int holds_port(const State *s, double at) { return at < s->free && s->left < s->facts->port_left; }

static void take_port(State *s, double now, double cycles)
{
    if (now < s->free && runs(s, now)) share(s, cycles);
    else s->owed = larger(s->owed, now) + cycles;
}

/* --- units/fetch.py ---------------------------------------------------------------------------------------------- */

static double fetch(State *s, int line, double now)
{
    if (s->there.held[line]) {
        recent_drop(&s->there, line);
        recent_add(&s->there, line);
        return s->there_at[line];
    }
    s->fetch_free = larger(s->fetch_free, now) + s->facts->fetch_cycles;
    s->there_at[line] = s->fetch_free;
    recent_add(&s->there, line);
    if (s->there.count > s->facts->fetch_room) recent_drop(&s->there, s->there.first);
    return s->there_at[line];
}

static double enter(State *s, int line, double now)
{
    double there = fetch(s, line, now);
    if (s->known[line + 1]) fetch(s, line + 1, now);
    return there;
}

/* --- sm.py ------------------------------------------------------------------------------------------------------- */

static double copy(State *s, double at, double size, double share)
{
    if (share != 0.0) {
        s->memory_free = larger(s->memory_free, at) + share * size / s->facts->memory_bytes_per_clk;
        if (share >= 1.0) return s->memory_free;
    }
    s->engine_free = larger(s->engine_free, at) + size / s->facts->tma_bytes_per_clk;
    return share != 0.0 ? larger(s->engine_free, s->memory_free) : s->engine_free;
}

static void produce(State *s, int index)
{
    Cta *c = &s->ctas[index];
    const CtaFacts *f = &s->cta_facts[index];
    while (c->next_copy < f->copy_count) {
        const Copy *next = &s->copies[f->copies + c->next_copy];
        double at = c->producer_free;
        if (next->number >= next->slots) {
            int let_go = next->tag - next->slots;
            if (c->released_count[let_go] < (next->of_query ? 1 : f->programs)) return;
            at = larger(at, c->released_last[let_go] + s->facts->handover);
        }
        c->producer_free = at + s->facts->tma_issue;
        double landed = c->full[next->tag] = copy(s, at, next->size, next->share) + next->latency;
        if (next->size != 0.0) {
            s->copy_begins[s->copy_tail] = landed - next->size / s->facts->tma_bytes_per_clk;
            s->copy_ends[s->copy_tail++] = landed;
        }
        c->next_copy++;
    }
}

static void store(State *s, double now, double size, double rate) { s->store_free = larger(s->store_free, now) + size / rate; }

static int holds(State *s, int warp, int word)
{
    int key = warp * s->facts->words + word, found = s->spilled.held[key];
    if (found) recent_drop(&s->spilled, key);
    recent_add(&s->spilled, key);
    if (s->spilled.count > s->facts->spill_words) recent_drop(&s->spilled, s->spilled.first);
    return found;
}

static double opens(State *s, const Warp *w)
{
    if (w->tag != TURN) return s->ctas[w->cta].full[w->tag];
    int n = s->cta_facts[w->cta].programs;
    const Warp *before = w - w->number + (w->number + n - 1) % n;
    int needed = w->turns_taken + (w->number > 0);
    if (needed == 0) return 0.0;
    return before->turn_count >= needed ? before->turns[needed - 1] : NAN;
}

static double jitter(State *s)
{
    s->seed = (s->seed * 1103515245 + 12345) & 0x7FFFFFFF;
    return s->facts->barrier_spread * (double)(s->seed >> 8) / (double)0x7FFFFF;
}

static void arrive(State *s, Warp *w, double now)
{
    if (w->tag == TURN) {
        w->turns[w->turn_count++] = now + s->facts->one_way;
        return;
    }
    Cta *c = &s->ctas[w->cta];
    if (!c->released_count[w->tag]++ || now > c->released_last[w->tag]) c->released_last[w->tag] = now;
    produce(s, w->cta);
}

/* Point at the next instruction and its tag; 0 at the end of the program. */
static int settle(State *s, Warp *w)
{
    while (w->piece < w->last_piece && w->at == s->pieces[w->piece].length) {
        w->piece++;
        w->at = 0;
        w->seen[0] = w->seen[1] = w->seen[2] = 0;
    }
    if (w->piece == w->last_piece) return 0;
    const Piece *p = &s->pieces[w->piece];
    w->now = &s->table[s->code[p->code + w->at]];
    w->tag = NO_TAG;
    int which = w->now->kind - WAIT;
    if (which >= 0 && which < 3) {
        int seen = w->seen[which]++;
        if (seen < p->count[which]) w->tag = s->tags[p->tags[which] + seen];
    }
    return 1;
}

static void advance(Warp *w)
{
    double ready = w->now->hold != 0.0 ? w->free : larger(w->free, w->held);
    for (int bit = 0; bit < COUNTERS; bit++)
        if (w->now->waits >> bit & 1 && w->counters[bit] > ready) ready = w->counters[bit];
    w->ready = ready;
}

static double condition(State *s, Warp *w, double at)
{
    const Instruction *i = w->now;
    switch (i->kind) {
    case MMA: return room(s, at);
    case MMA_WAIT: return through(w, i->amount, at);
    case WAIT: return w->tag == NO_TAG || !isnan(opens(s, w)) ? at : NAN;
    case BARRIER: {
        int n = s->cta_facts[w->cta].programs, came = 0;
        double *met = s->ctas[w->cta].met + (int64_t)w->barriers_passed * n, last = at;
        if (isnan(met[w->number])) met[w->number] = at;
        for (int k = 0; k < n; k++)
            if (!isnan(met[k])) {
                came++;
                last = larger(last, met[k]);
            }
        return came >= i->amount ? last : NAN;
    }
    case SPILL: return larger(at, s->store_free - s->facts->store_queue_bytes / s->facts->store_bytes_per_clk);
    default: return larger(at, s->store_free);
    }
}

static void issue(State *s, int index, double now)
{
    Warp *w = &s->warps[index];
    const Instruction *i = w->now;
    const Facts *f = s->facts;
    double after = now + i->stall, result = now + i->latency;
    switch (i->kind) {
    case MMA:
        s->queue[s->tail++] = (Waiting){i->fetched ? now + f->mma_fetch : now, i->mma_cycles, i->port, index, i->commits};
        w->committed += i->commits != 0;
        break;
    case WAIT:
        if (w->tag != NO_TAG) {
            result = larger(result, opens(s, w));
            w->turns_taken += w->tag == TURN;
        }
        break;
    case ARRIVE:
        if (w->tag != NO_TAG) arrive(s, w, now);
        break;
    case LOAD:
        if (w->tag != NO_TAG) {
            const OwnCopy *own = &s->own[s->cta_facts[w->cta].own + w->tag / f->stride];
            s->ctas[w->cta].full[w->tag] = copy(s, now, own->size, own->share) + own->latency;
        }
        break;
    case STORE: {
        double moved = 128.0 * i->amount;
        store(s, now, moved, s->memory_free > now ? f->memory_bytes_per_clk / 2.0 : f->store_bytes_per_clk);
        s->memory_free = larger(s->memory_free, now) + moved / f->memory_bytes_per_clk;
        break;
    }
    case SPILL:
        store(s, now, 128.0 * i->amount, f->store_bytes_per_clk);
        holds(s, index, i->word);
        break;
    case RELOAD:
        if (!holds(s, index, i->word)) result = now + f->reload_latency;
        break;
    case BARRIER:
        after = larger(after, now + f->barrier + jitter(s));
        w->barriers_passed += i->amount > 1;
        break;
    case MARK: w->mark[w->marks++] = now; break;
    }
    if (i->write_counter < COUNTERS && result > w->counters[i->write_counter]) w->counters[i->write_counter] = result;
    if (i->read_counter < COUNTERS && now + f->operand_release > w->counters[i->read_counter])
        w->counters[i->read_counter] = now + f->operand_release;
    w->free = after;
    w->at++;
}

static int run(State *s, double *end, int64_t *instructions, double *busy)
{
    int n = s->facts->programs, active = 0, *alive = malloc(sizeof(int) * (n + 1));
    double pipe_free[PIPES] = {0}, slot_free = 0.0, issue_free = 0.0, now = 0.0;
    int64_t count = 0;
    if (!alive) return NO_MEMORY;
    for (int k = 0; k < n; k++)
        if (settle(s, &s->warps[k])) {
            advance(&s->warps[k]);
            alive[active++] = k;
        }
    while (active) {
        int chosen = -1;
        double best = INFINITY;
        for (int k = 0; k < active; k++) {
            Warp *w = &s->warps[alive[k]];
            const Instruction *i = w->now;
            double ready = w->ready;
            if (i->conditional) {
                ready = condition(s, w, ready);
                if (isnan(ready)) continue;
            }
            if (i->kind != MMA) {
                if (pipe_free[i->pipe] > ready) ready = pipe_free[i->pipe];
                if (i->slot != 0.0 && slot_free > ready) {
                    double until = busy_until(s, ready);
                    ready = larger(ready, slot_free < until ? slot_free : until);
                }
            }
            if (issue_free > ready) ready = issue_free;
            if (ready < best || (ready == best && chosen >= 0 && w->last < s->warps[alive[chosen]].last)) {
                chosen = k;
                best = ready;
            }
        }
        double service = next_service(s);
        if (service <= best && service < INFINITY) {
            serve(s, service);
            continue;
        }
        if (chosen < 0) {
            free(alive);
            return STUCK;
        }
        Warp *w = &s->warps[alive[chosen]];
        const Instruction *i = w->now;
        now = best;
        w->last = ++count;
        issue_free = now + 1.0;
        int loaded = runs(s, now);
        if (i->kind == MMA) {
            busy[i->pipe] += i->mma_cycles;
        } else {
            double taken = loaded ? i->taken_under_mma : i->taken;
            pipe_free[i->pipe] = larger(now, pipe_free[i->pipe]) + taken;
            busy[i->pipe] += taken;
            if (loaded && i->slot != 0.0) slot_free = larger(now, slot_free) + i->slot;
            if (i->port != 0.0) take_port(s, now, i->port);
        }
        if (i->hold != 0.0 && loaded && now >= w->held && holds_port(s, now)) w->held = now + i->hold;
        issue(s, alive[chosen], now);
        if (!settle(s, w)) {
            memmove(alive + chosen, alive + chosen + 1, sizeof(int) * (size_t)(active - chosen - 1));
            active--;
            continue;
        }
        advance(w);
        if (w->has_lines) {
            int line = (s->pieces[w->piece].begin + w->at) / LINE;
            if (line != w->line) {
                w->line = line;
                w->ready = larger(w->ready, enter(s, line, now));
            }
        }
    }
    free(alive);
    *end = now;
    *instructions = count;
    return DONE;
}

static double *unknown(int64_t n)
{
    double *made = malloc(sizeof(double) * (size_t)(n + 1));
    for (int64_t i = 0; made && i < n; i++) made[i] = NAN;
    return made;
}

/* Rooms of a warp: as many matrix instructions, barriers and turns as its program holds. */
static int make_warp(State *s, const Program *p, Warp *w, double *marks, int64_t *products, int64_t *barriers)
{
    int64_t mma = 0, met = 0, turns = 0;
    for (int k = p->pieces; k < p->pieces + p->piece_count; k++)
        for (int at = 0; at < s->pieces[k].length; at++) {
            const Instruction *i = &s->table[s->code[s->pieces[k].code + at]];
            mma += i->kind == MMA;
            met += i->kind == BARRIER;
            turns += i->kind == ARRIVE;
        }
    w->cta = p->cta;
    w->number = p->number;
    w->piece = p->pieces;
    w->last_piece = p->pieces + p->piece_count;
    w->free = p->begins;
    w->line = -1;
    w->has_lines = p->has_lines && s->facts->has_cache;
    w->mark = marks + p->mark_offset;
    w->done = malloc(sizeof(double) * (size_t)(mma + 1));
    w->turns = malloc(sizeof(double) * (size_t)(turns + 1));
    *products += mma;
    if (met > *barriers) *barriers = met;
    return w->done && w->turns;
}

static int make_ctas(State *s, int64_t barriers)
{
    int64_t tags = (int64_t)s->facts->names * s->facts->stride;
    for (int k = 0; k < s->facts->ctas; k++) {
        Cta *c = &s->ctas[k];
        c->full = unknown(tags);
        c->released_last = unknown(tags);
        c->released_count = calloc((size_t)(tags + 1), sizeof(int32_t));
        c->met = unknown((barriers + 1) * s->cta_facts[k].programs);
        c->producer_free = s->cta_facts[k].begins;
        if (!c->full || !c->released_last || !c->released_count || !c->met) return 0;
    }
    for (int k = 0; k < s->facts->ctas; k++) produce(s, k);
    return 1;
}

static void release(State *s)
{
    for (int k = 0; s->warps && k < s->facts->programs; k++) {
        Warp *w = &s->warps[k];
        free(w->done);
        free(w->turns);
    }
    for (int k = 0; s->ctas && k < s->facts->ctas; k++) {
        Cta *c = &s->ctas[k];
        free(c->full);
        free(c->released_last);
        free(c->released_count);
        free(c->met);
    }
    free(s->warps);
    free(s->ctas);
    free(s->starts);
    free(s->interval_ends);
    free(s->ends);
    free(s->queue);
    free(s->copy_begins);
    free(s->copy_ends);
    free(s->there_at);
    recent_free(&s->spilled);
    recent_free(&s->there);
}

/* `held` are the lines in the first instruction cache at the start, the least recently used first; `known` all there are. */
int run_sm(const Facts *facts, const Instruction *table, const int32_t *code, const Piece *pieces, const int32_t *tags,
           const Program *programs, const CtaFacts *cta_facts, const Copy *copies, const OwnCopy *own, const uint8_t *known,
           const int32_t *held, double *marks, double *end, int64_t *instructions, double *busy)
{
    State s = {.facts = facts, .table = table, .code = code, .tags = tags, .pieces = pieces, .copies = copies, .own = own,
               .cta_facts = cta_facts, .seed = 1, .known = known, .ending = -1};
    int64_t products = 0, barriers = 0, copied = 0;
    int fine = 1, found = NO_MEMORY;
    s.warps = calloc((size_t)facts->programs + 1, sizeof(Warp));
    s.ctas = calloc((size_t)facts->ctas + 1, sizeof(Cta));
    fine = s.warps && s.ctas;
    for (int k = 0; fine && k < facts->programs; k++)
        fine = make_warp(&s, &programs[k], &s.warps[k], marks, &products, &barriers);
    s.starts = malloc(sizeof(double) * (size_t)(products + 1));
    s.interval_ends = malloc(sizeof(double) * (size_t)(products + 1));
    s.ends = malloc(sizeof(double) * (size_t)(products + 1));
    for (int k = 0; k < facts->ctas; k++) copied += cta_facts[k].copy_count;
    s.queue = malloc(sizeof(Waiting) * (size_t)(products + 1));
    s.copy_begins = malloc(sizeof(double) * (size_t)(copied + 1));
    s.copy_ends = malloc(sizeof(double) * (size_t)(copied + 1));
    s.there_at = calloc((size_t)facts->lines + 2, sizeof(double));
    fine = fine && s.starts && s.interval_ends && s.ends && s.queue && s.copy_begins && s.copy_ends && s.there_at;
    fine = recent_make(&s.spilled, facts->programs * facts->words) && fine;
    fine = recent_make(&s.there, facts->lines + 1) && fine;
    fine = fine && make_ctas(&s, barriers);
    for (int k = 0; fine && k < facts->held; k++) recent_add(&s.there, held[k]);
    if (fine) found = run(&s, end, instructions, busy);
    release(&s);
    return found;
}
