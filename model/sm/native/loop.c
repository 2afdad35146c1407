/* `Run` of model/sm/run.py with the fair shares of fair_share.py, and `heaviest_cycle` and
 * `longest_paths` of recurrences.py, in C.
 *
 * The Python is the statement of the rules and says why; this file follows it function by function under the same names,
 * adds and compares the same numbers in the same order, and must give the same digits (tests/unit/model/sm/native).
 * Change both or neither.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SYNC, MATRIX, COPY, MEMORY, L2 };
enum { QUEUES = 3 }; /* of the matrix engine, the memory and L2 */
enum { DONE = 0, STUCK = 1, NO_MEMORY = 2 };
static const double EPS = 1e-6, SAME = 3e-4;

/* --- a loop -------------------------------------------------------------------------------------------------------- */

/* As `_written` of native/run.py writes it: counts, then one table after the other. */
typedef struct {
    int count, roles, uses, units, tensor, pacer;
    const int32_t *engine, *role_of, *use_of, *program_at, *program, *is_tensor, *share_at, *share_unit;
    const double *alone, *issue, *fma, *hidden, *most, *share;
    int edges;
    const int32_t *source, *destination, *distance; /* of each edge */
    const double *latency;
} Loop;

static void loop_read(Loop *l, const int32_t *n, const double *x, int edges, const int32_t *edge, const double *latency)
{
    l->count = n[0], l->roles = n[1], l->uses = n[2], l->units = n[3], l->tensor = n[4], l->pacer = n[5];
    n += 6;
    l->engine = n, n += l->count;
    l->role_of = n, n += l->count;
    l->use_of = n, n += 2 * l->count;
    l->program_at = n, n += l->roles + 1;
    l->program = n, n += 2 * l->program_at[l->roles];
    l->is_tensor = n, n += l->uses;
    l->share_at = n, n += l->uses + 1;
    l->share_unit = n;
    l->alone = x, x += 2 * l->count;
    l->issue = x, x += l->count;
    l->fma = x, x += l->uses;
    l->hidden = x, x += l->uses;
    l->most = x, x += l->uses;
    l->share = x;
    l->edges = edges, l->source = edge, l->destination = edge + edges, l->distance = edge + 2 * edges, l->latency = latency;
}

/* --- the state of a run -------------------------------------------------------------------------------------------- */

/* A lap that began: its number, when, and where its key and its times stand in the two heaps. */
typedef struct {
    int lap, key, keys, time, times;
    double now;
} Lap;

typedef struct {
    Loop loop;
    int blocks, masked, stop_early, most; /* `most`: blocks there is room for */
    double now;
    double *issued, *started, *ended;
    int *issues, *starts, *ends;
    int period_laps;
    double period_cycles;
    int *lap, *step, *op, *block;
    double *free, *ready, *reach;
    int *source_at, *source; /* edges by destination */
    int *waiting, *waits;    /* [operation][role] */
    int *running, running_count;
    double *left, *speed;
    int *queue[QUEUES], queue_head[QUEUES], queue_count[QUEUES], busy[QUEUES];
    Lap *seen;
    int seen_count, seen_room;
    int *keys, keys_count, keys_room;
    double *times;
    int times_count, times_room;
    /* `speeds`: what is left of every unit, what is asked of it, the units asked for in order, members by use. */
    double *unit_left, *load;
    int *asked, *member, *kept;
    double *use_speed;
    int no_memory;
} Run;

static int grow(void **heap, int *room, int wanted, size_t size)
{
    if (wanted <= *room) return 1;
    int more = 2 * wanted;
    void *grown = realloc(*heap, size * more);
    if (!grown) return 0;
    *heap = grown, *room = more;
    return 1;
}

static void look(Run *r, int role)
{
    const Loop *l = &r->loop;
    int op = r->op[role], block = r->block[role];
    double when = r->free[role];
    for (int s = r->source_at[op]; s < r->source_at[op + 1]; s++) {
        int edge = r->source[s], src = l->source[edge], at = block - l->distance[edge];
        if (at < 0) continue;
        if (at >= r->ends[src]) {
            r->waiting[src * l->roles + r->waits[src]++] = role;
            r->ready[role] = INFINITY;
            return;
        }
        double handed = r->ended[src * r->most + at] + l->latency[edge];
        if (handed > when) when = handed;
    }
    r->ready[role] = when;
}

static void next(Run *r, int role)
{
    const Loop *l = &r->loop;
    const int32_t *program = l->program + 2 * l->program_at[role];
    int length = l->program_at[role + 1] - l->program_at[role], step = r->step[role], lap = r->lap[role];
    while (lap <= r->blocks) {
        if (step == length) step = 0, lap++;
        int op = program[2 * step], shift = program[2 * step + 1];
        step++;
        if (0 <= lap + shift && lap + shift < r->blocks) {
            r->step[role] = step, r->lap[role] = lap, r->op[role] = op, r->block[role] = lap + shift;
            look(r, role);
            return;
        }
    }
    r->op[role] = -1, r->ready[role] = INFINITY;
}

static double earliest(const double *times, int count)
{
    double least = times[0];
    for (int i = 1; i < count; i++)
        if (times[i] < least) least = times[i];
    return least;
}

static void begin(Run *r, int number)
{
    int op = number % r->loop.count;
    r->started[op * r->most + r->starts[op]++] = r->now;
    r->running[r->running_count] = number;
    r->left[r->running_count++] = r->loop.alone[number];
}

/* Whose queue an operation waits in; -1: none. */
static int queue_of(int kind)
{
    return kind == MATRIX ? 0 : kind == MEMORY ? 1 : kind == L2 ? 2 : -1;
}

static double start(Run *r)
{
    const Loop *l = &r->loop;
    double soon = r->now + EPS, upcoming = earliest(r->ready, l->roles);
    while (upcoming <= soon) {
        for (int role = 0; role < l->roles; role++) {
            if (r->ready[role] > soon) continue;
            int op = r->op[role], number = r->block[role] < r->masked ? op + l->count : op, kind = l->engine[op];
            r->issued[op * r->most + r->issues[op]++] = r->now;
            if (kind == SYNC) {
                r->ready[role] = INFINITY;
            } else {
                r->free[role] = r->now + l->issue[op];
                next(r, role);
            }
            int q = queue_of(kind);
            if (q >= 0)
                r->queue[q][r->queue_head[q] + r->queue_count[q]++] = number;
            else
                begin(r, number);
        }
        upcoming = earliest(r->ready, l->roles);
    }
    for (int q = 0; q < QUEUES; q++) {
        if (!r->queue_count[q] || r->busy[q]) continue;
        r->queue_count[q]--;
        begin(r, r->queue[q][r->queue_head[q]++]);
        r->busy[q] = 1;
    }
    return upcoming;
}

/* --- fair shares --------------------------------------------------------------------------------------------------- */

/* Progressive filling among the `members`, uses in order; `beside_mma`: whether their highest speeds hold. */
static void share(Run *r, int *members, int count, int beside_mma)
{
    const Loop *l = &r->loop;
    while (count) {
        int asked = 0, tight = -1;
        for (int i = 0; i < count; i++)
            for (int s = l->share_at[members[i]]; s < l->share_at[members[i] + 1]; s++) {
                int unit = l->share_unit[s], known = 0;
                for (int k = 0; k < asked; k++) known |= r->asked[k] == unit;
                if (!known) r->asked[asked++] = unit, r->load[unit] = 0.0;
                r->load[unit] += l->share[s];
            }
        double level = 1.0;
        for (int k = 0; k < asked; k++) {
            double wanted = r->load[r->asked[k]];
            if (wanted > 0 && r->unit_left[r->asked[k]] / wanted < level - 1e-12) {
                double reached = r->unit_left[r->asked[k]] / wanted;
                level = reached > 0.0 ? reached : 0.0, tight = r->asked[k];
            }
        }
        double slowest = 1.0;
        for (int i = 0; i < count && beside_mma; i++)
            if (l->most[members[i]] < slowest) slowest = l->most[members[i]];
        int capped = slowest < level;
        if (capped) level = slowest;
        int rest = 0;
        for (int i = 0; i < count; i++) {
            int on_it = capped ? l->most[members[i]] == slowest : tight < 0;
            for (int s = l->share_at[members[i]]; s < l->share_at[members[i] + 1] && !capped; s++)
                on_it |= l->share_unit[s] == tight;
            if (!on_it) {
                members[rest++] = members[i];
                continue;
            }
            r->use_speed[members[i]] = level;
            for (int s = l->share_at[members[i]]; s < l->share_at[members[i] + 1]; s++) {
                double after = r->unit_left[l->share_unit[s]] - level * l->share[s];
                r->unit_left[l->share_unit[s]] = after > 0.0 ? after : 0.0;
            }
        }
        count = rest;
    }
}

static void speeds(Run *r)
{
    const Loop *l = &r->loop;
    int count = r->running_count;
    /* In order of their uses. */
    for (int i = 0; i < count; i++) {
        int use = l->use_of[r->running[i]], at = i;
        for (; at && r->member[at - 1] > use; at--) r->member[at] = r->member[at - 1];
        r->member[at] = use;
    }
    for (int unit = 0; unit < l->units; unit++) r->unit_left[unit] = 1.0;
    double hidden = INFINITY, fma = 0.0;
    int beside_mma = 0;
    for (int i = 0; i < count; i++) beside_mma |= l->is_tensor[r->member[i]];
    for (int i = 0; i < count; i++) {
        if (l->hidden[r->member[i]] < hidden) hidden = l->hidden[r->member[i]];
        fma += l->fma[r->member[i]] * (beside_mma ? l->most[r->member[i]] : 1.0);
        r->use_speed[r->member[i]] = 1.0;
    }
    double beyond = (fma < 1.0 ? fma : 1.0) - hidden;
    if (beyond > 0.0 && l->tensor >= 0) r->unit_left[l->tensor] = 1.0 - beyond;
    for (int engine_first = 1; engine_first >= 0; engine_first--) {
        int members = 0;
        for (int i = 0; i < count; i++)
            if (l->is_tensor[r->member[i]] == engine_first) r->kept[members++] = r->member[i];
        share(r, r->kept, members, beside_mma);
    }
    for (int i = 0; i < count; i++) r->speed[i] = r->use_speed[l->use_of[r->running[i]]];
}

/* --- from event to event --------------------------------------------------------------------------------------------- */

static void finish(Run *r, int op)
{
    const Loop *l = &r->loop;
    r->ended[op * r->most + r->ends[op]++] = r->now;
    if (queue_of(l->engine[op]) >= 0) {
        r->busy[queue_of(l->engine[op])] = 0;
    } else if (l->engine[op] == SYNC) {
        r->free[l->role_of[op]] = r->now;
        next(r, l->role_of[op]);
    }
    int count = r->waits[op], roles[count + 1];
    memcpy(roles, r->waiting + op * l->roles, sizeof(int) * count);
    r->waits[op] = 0;
    for (int i = 0; i < count; i++) look(r, roles[i]);
}

/* Whether time could pass. */
static int advance(Run *r, double upcoming)
{
    int count = r->running_count, rest = 0, over = 0, ended[count];
    speeds(r);
    double step = INFINITY;
    for (int i = 0; i < count; i++) {
        double alone = r->left[i] * (r->speed[i] > 0 ? 1.0 / r->speed[i] : INFINITY);
        if (!i || alone < step) step = alone;
    }
    if (upcoming - r->now < step) step = upcoming - r->now;
    if (!(step < INFINITY)) return 0;
    r->now += step;
    for (int i = 0; i < count; i++) {
        double left = r->left[i] - step * r->speed[i];
        if (left > EPS) {
            r->running[rest] = r->running[i];
            r->left[rest++] = left;
        } else {
            ended[over++] = r->running[i];
        }
    }
    r->running_count = rest;
    for (int i = 0; i < over; i++) finish(r, ended[i] % r->loop.count);
    return 1;
}

static void put_key(Run *r, int number)
{
    if (grow((void **)&r->keys, &r->keys_room, r->keys_count + 1, sizeof(int)))
        r->keys[r->keys_count++] = number;
    else
        r->no_memory = 1;
}

static void put_time(Run *r, double time)
{
    if (grow((void **)&r->times, &r->times_room, r->times_count + 1, sizeof(double)))
        r->times[r->times_count++] = time;
    else
        r->no_memory = 1;
}

static void compare(Run *r, int lap)
{
    const Loop *l = &r->loop;
    int furthest = -1, least = r->ends[0];
    for (int role = 0; role < l->roles; role++)
        if (r->op[role] >= 0 && r->block[role] > furthest) furthest = r->block[role];
    if (furthest < 0) furthest = r->blocks;
    for (int op = 0; op < l->count; op++)
        if (r->ends[op] < least) least = r->ends[op];
    if (least < r->masked || furthest + 1 >= r->blocks) return;
    double now = r->now;
    Lap this = {lap, r->keys_count, 0, r->times_count, 0, now};
    for (int role = 0; role < l->roles; role++) {
        double when = r->ready[role], free = r->free[role];
        put_time(r, when < INFINITY && when - now > 0.0 ? when - now : 0.0);
        put_time(r, free - now > 0.0 ? free - now : 0.0);
        put_key(r, r->step[role]);
        put_key(r, r->lap[role] - lap);
        put_key(r, when == INFINITY);
    }
    for (int op = 0; op < l->count; op++) {
        const double *ends = r->ended + op * r->most;
        int count = 0;
        for (; count < r->ends[op] && ends[r->ends[op] - 1 - count] + r->reach[op] > now + EPS; count++)
            put_time(r, ends[r->ends[op] - 1 - count] - now);
        put_key(r, r->ends[op] - lap);
        put_key(r, count);
    }
    put_key(r, r->running_count);
    for (int i = 0; i < r->running_count; i++) put_key(r, r->running[i]), put_time(r, r->left[i]);
    for (int q = 0; q < QUEUES; q++) {
        put_key(r, r->queue_count[q]);
        for (int i = 0; i < r->queue_count[q]; i++) put_key(r, r->queue[q][r->queue_head[q] + i]);
    }
    this.keys = r->keys_count - this.key, this.times = r->times_count - this.time;
    if (r->no_memory) return;
    for (int i = 0; i < r->seen_count; i++) {
        const Lap *other = r->seen + i;
        if (other->keys != this.keys || memcmp(r->keys + other->key, r->keys + this.key, sizeof(int) * this.keys)) continue;
        int same = 1;
        double most = SAME * (now - other->now) / (lap - other->lap);
        for (int k = 0; k < this.times && same; k++)
            same = fabs(r->times[this.time + k] - r->times[other->time + k]) <= most;
        if (same) {
            r->period_laps = lap - other->lap, r->period_cycles = now - other->now;
            if (r->stop_early) r->blocks = furthest + 1;
            return;
        }
    }
    if (grow((void **)&r->seen, &r->seen_room, r->seen_count + 1, sizeof(Lap)))
        r->seen[r->seen_count++] = this;
    else
        r->no_memory = 1;
}

static int run(Run *r)
{
    const Loop *l = &r->loop;
    int lap = r->lap[l->pacer];
    while (1) {
        double upcoming = start(r);
        if (r->lap[l->pacer] != lap) {
            lap = r->lap[l->pacer];
            if (!r->period_laps) compare(r, lap);
            if (r->no_memory) return NO_MEMORY;
        }
        if (r->running_count) {
            if (!advance(r, upcoming)) return STUCK;
        } else if (upcoming < INFINITY) {
            r->now = upcoming;
        } else {
            for (int role = 0; role < l->roles; role++)
                if (r->op[role] >= 0) return STUCK;
            return DONE;
        }
    }
}

/* --- what native/run.py calls ---------------------------------------------------------------------------------------- */

/* Runs `blocks` blocks; `times` has room for when each operation was issued, started and ended: [3][count][blocks].
 * `found`: blocks run, laps and cycles of the repetition (laps 0: none). */
int run_loop(const int32_t *n, const double *x, int edges, const int32_t *edge, const double *latency, int blocks,
             int masked, int stop_early, double *times, double *found)
{
    Run r = {0};
    Loop *l = &r.loop;
    loop_read(l, n, x, edges, edge, latency);
    r.blocks = r.most = blocks, r.masked = masked, r.stop_early = stop_early;
    int count = l->count, roles = l->roles;
    r.issued = times, r.started = r.issued + (size_t)count * blocks, r.ended = r.started + (size_t)count * blocks;
    /* Every operation is in a queue once a block, and runs at most as often. */
    size_t queued = (size_t)count * blocks + 1;
    size_t ints = 3 * count + 4 * roles + (count + 1) + edges + (size_t)count * roles + count + (1 + QUEUES) * queued + l->units + 2 * queued;
    size_t doubles = 2 * roles + count + 2 * queued + 2 * l->units + l->uses;
    int *i = calloc(ints, sizeof(int));
    double *d = calloc(doubles, sizeof(double));
    int result = NO_MEMORY;
    if (i && d) {
        int *at = i;
        r.issues = at, at += count;
        r.starts = at, at += count;
        r.ends = at, at += count;
        r.lap = at, at += roles;
        r.step = at, at += roles;
        r.op = at, at += roles;
        r.block = at, at += roles;
        r.source_at = at, at += count + 1;
        r.source = at, at += edges;
        r.waiting = at, at += count * roles;
        r.waits = at, at += count;
        for (int q = 0; q < QUEUES; q++) r.queue[q] = at, at += queued;
        r.running = at, at += queued;
        r.asked = at, at += l->units;
        r.member = at, at += queued;
        r.kept = at;
        double *to = d;
        r.free = to, to += roles;
        r.ready = to, to += roles;
        r.reach = to, to += count;
        r.left = to, to += queued;
        r.speed = to, to += queued;
        r.unit_left = to, to += l->units;
        r.load = to, to += l->units;
        r.use_speed = to;
        for (int e = 0; e < edges; e++) {
            int src = l->source[e];
            if (latency[e] > r.reach[src]) r.reach[src] = latency[e];
            r.source_at[l->destination[e] + 1]++;
        }
        for (int op = 0; op < count; op++) r.source_at[op + 1] += r.source_at[op];
        for (int e = edges - 1; e >= 0; e--) {
            /* From the back: each destination's edges stay in order; `waits` counts those placed. */
            int dst = l->destination[e];
            r.source[r.source_at[dst + 1] - 1 - r.waits[dst]++] = e;
        }
        memset(r.waits, 0, sizeof(int) * count);
        for (int role = 0; role < roles; role++) {
            int most = l->program[2 * l->program_at[role] + 1];
            for (int s = l->program_at[role]; s < l->program_at[role + 1]; s++)
                if (l->program[2 * s + 1] > most) most = l->program[2 * s + 1];
            r.lap[role] = -most, r.op[role] = -1, r.ready[role] = INFINITY;
        }
        for (int role = 0; role < roles; role++) next(&r, role);
        result = run(&r);
        found[0] = r.blocks, found[1] = r.period_laps, found[2] = r.period_cycles;
    }
    free(i);
    free(d);
    free(r.seen);
    free(r.keys);
    free(r.times);
    return result;
}

/* --- recurrences ----------------------------------------------------------------------------------------------------- */

/* An arc: source, destination, weight, distance. */
typedef int64_t Arc[4];
enum { NONE = 0, TOO_LARGE = -1, DEADLOCK = -2 };

typedef struct {
    int nodes, arcs;
    const Arc *arc;
    int64_t *weight, *value;
    int *pred, *mark;
} Graph;

/* Arcs of a cycle among the predecessors into `cycle`, in walking order; how many. */
static int predecessor_cycle(Graph *g, int32_t *cycle)
{
    for (int node = 0; node < g->nodes; node++) g->mark[node] = -1;
    for (int start = 0; start < g->nodes; start++) {
        int node = start;
        while (g->mark[node] < 0 && g->pred[node] >= 0) {
            g->mark[node] = start;
            node = (int)g->arc[g->pred[node]][0];
        }
        if (g->mark[node] != start || g->pred[node] < 0) continue;
        int count = 0, at = node;
        do {
            cycle[count++] = g->pred[at];
            at = (int)g->arc[g->pred[at]][0];
        } while (at != node);
        for (int k = 0; k < count / 2; k++) {
            int32_t swapped = cycle[k];
            cycle[k] = cycle[count - 1 - k], cycle[count - 1 - k] = swapped;
        }
        return count;
    }
    return NONE;
}

/* Arcs of some cycle of positive weight; TOO_LARGE where sums of the weights might not fit. */
static int positive_cycle(Graph *g, int32_t *cycle)
{
    double most = 0.0;
    for (int k = 0; k < g->arcs; k++)
        if (fabs((double)g->weight[k]) > most) most = fabs((double)g->weight[k]);
    /* Every round reaches over each arc once. */
    if (most * (g->nodes + 2.0) * (g->arcs + 1.0) > 4e18) return TOO_LARGE;
    for (int node = 0; node < g->nodes; node++) g->value[node] = 0, g->pred[node] = -1;
    for (int round = 0; round <= g->nodes; round++) {
        int changed = 0;
        for (int k = 0; k < g->arcs; k++) {
            int64_t reached = g->value[g->arc[k][0]] + g->weight[k];
            if (reached > g->value[g->arc[k][1]]) {
                g->value[g->arc[k][1]] = reached;
                g->pred[g->arc[k][1]] = k;
                changed = 1;
            }
        }
        if (!changed) return NONE;
        int count = predecessor_cycle(g, cycle);
        if (count) return count;
    }
    return TOO_LARGE;
}

static int64_t divisor(int64_t a, int64_t b)
{
    while (b) {
        int64_t rest = a % b;
        a = b, b = rest;
    }
    return a;
}

/* Arcs of a cycle with the largest weight over distance into `best`, which has room for `nodes`; how many there are, or
 * DEADLOCK, or TOO_LARGE where Python has to answer. */
int heaviest_cycle(int nodes, int arcs, const Arc *arc, int32_t *best)
{
    Graph g = {nodes, arcs, arc, malloc(sizeof(int64_t) * (arcs + nodes + 1)), NULL, malloc(sizeof(int) * (2 * nodes + 1)), NULL};
    int32_t *cycle = malloc(sizeof(int32_t) * (nodes + 1));
    int found = TOO_LARGE, count = 0;
    if (g.weight && g.pred && cycle) {
        g.value = g.weight + arcs, g.mark = g.pred + nodes;
        for (int k = 0; k < arcs; k++) g.weight[k] = 1 - (nodes + 1) * arc[k][3];
        found = positive_cycle(&g, cycle);
        if (found > 0) found = DEADLOCK;
        while (found == NONE) {
            int64_t p = 0, q = count ? 0 : 1;
            for (int k = 0; k < count; k++) p += arc[best[k]][2], q += arc[best[k]][3];
            int64_t common = divisor(p, q);
            p /= common, q /= common;
            for (int k = 0; k < arcs && found == NONE; k++) {
                if (fabs((double)arc[k][2]) * q + fabs((double)p * arc[k][3]) > 4e18) found = TOO_LARGE;
                g.weight[k] = arc[k][2] * q - p * arc[k][3];
            }
            if (found == NONE) found = positive_cycle(&g, cycle);
            if (found == NONE) break;
            if (found > 0) {
                memcpy(best, cycle, sizeof(int32_t) * found);
                count = found, found = NONE;
            }
        }
    }
    free(g.weight);
    free(g.pred);
    free(cycle);
    return found == NONE ? count : found;
}

/* `before` holds zeros and `after` cycles alone to begin with. */
void longest_paths(int ops, int links, const int32_t *link, const double *cycles, double *before, double *after)
{
    for (int round = 0; round < ops; round++) {
        int changed = 0;
        for (int k = 0; k < links; k++) {
            int src = link[2 * k], dst = link[2 * k + 1];
            if (before[src] + cycles[k] > before[dst]) before[dst] = before[src] + cycles[k], changed = 1;
            if (after[dst] + cycles[k] > after[src]) after[src] = after[dst] + cycles[k], changed = 1;
        }
        if (!changed) break;
    }
}
