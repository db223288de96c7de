// What the page knows of the runs, and the questions by which it gets to know more.

import { value } from "./format.js";

const POINTS = 900;
/** Of more new steps than this, e.g. after the page was hidden, the whole curves are asked for again. */
const MOST_EXTENDED = 300;
const TIMES_POINTS = 160;
const USE_POINTS = 400;
const EVENTS_AT_ONCE = 2000;
const MOST_EVENTS = 20000;
/** A question that fails so often in a row is worth a sentence. */
const WORTH_SAYING = 3;
const SLOW_EVERY_MS = 5000;
const NAMES_EVERY_MS = 10000;

/** States of a run that is over. */
const OVER = new Set(["finished", "stopped", "failed"]);
export const isOver = (overview) => Boolean(overview) && (overview.ended > 0 || OVER.has(overview.state));

/** So long after it was told, who came and went may be missing in the run's files. */
const WRITTEN_MS = 15000;

/** One run. `changed(what)` is called with "overview", "facts", "series", "times", "events" or "use". */
export class Run {
  constructor(index, connection, changed) {
    Object.assign(this, { index, connection, changed });
    this.isShown = true;
    this.overview = null;
    this.facts = {};
    this.names = [];
    this.first = 0;
    this.last = -1;
    this.notes = [];
    this.error = "";
    this.toldAt = 0;
    this.isCut = false;
    this.wanted = [];
    this.range = null;
    this.busy = false;
    this.failures = 0;
    this.restUntil = 0;
    this.steppedAt = 0;
    this.forget(true);
  }

  ask(get, more = {}) {
    return this.connection.ask(get, { ...more, run: this.index });
  }

  /** Ask for everything, as after each connection. */
  async load() {
    const [overview, facts, names] = await Promise.all([
      this.ask("overview"), this.ask("facts").catch(() => ({})), this.ask("names")]);
    this.takeOverview(overview);
    this.facts = facts ?? {};
    this.takeNames(names);
    this.changed("facts");
  }

  takeNames(names) {
    this.names = names.names ?? [];
    this.first = names.first ?? 0;
    this.last = names.last ?? -1;
    this.notes = names.notes ?? [];
    this.asked.names = Date.now();
  }

  takeOverview(overview) {
    if (overview.step !== this.overview?.step) this.steppedAt = Date.now();
    const isOther = this.overview !== null && overview.run_id !== this.overview.run_id;
    if (isOther || overview.step < this.covered) this.forget(isOther);
    if (isOther) this.load().then(() => this.loadEvents()).catch(() => {});
    this.overview = overview;
    this.error = "";
    this.changed("overview");
  }

  /** Know no curves: the run has gone back to a checkpoint; `isAll`: nor anything else, of another one. */
  forget(isAll) {
    this.covered = -1;
    this.clock = { step: [], seconds: [] };
    if (!isAll) return;
    Object.assign(this, { series: new Map(), events: [], known: new Set(), past: { workers: [], machines: [], interruptions: [] }, next: null, times: null, use: null, asked: {} });
  }

  takePush(message) {
    if (message.error) {
      this.error = String(message.error);
      this.changed("overview");
    }
    if (message.overview) this.takeOverview(message.overview);
    if (message.events?.length && this.next !== null) this.takeEvents(message.events);
  }

  takeEvents(events) {
    let isNew = false;
    for (const event of events) {
      // What is told unasked has more digits of the time than the same event in the file, and no id of the run.
      const key = [event.time?.toFixed(6), event.head, event.number, event.sentence ?? JSON.stringify(event)].join();
      if (this.known.has(key)) continue;
      this.known.add(key);
      this.events.push(event);
      isNew = true;
    }
    if (!isNew) return;
    this.toldAt = Date.now();
    this.events.sort((a, b) => (a.time ?? 0) - (b.time ?? 0));
    this.changed("events");
  }

  /** Ask for the events that are not here yet; of very many, for the newest. */
  async loadEvents() {
    if (this.next === null) this.next = -MOST_EVENTS;
    for (let asked = 0; asked < 2 * MOST_EVENTS; asked += EVENTS_AT_ONCE) {
      const page = await this.ask("events", { after: this.next, most: EVENTS_AT_ONCE });
      const isFirst = this.next < 0;
      this.next = page.next;
      if (isFirst && page.next - page.events.length > 0) this.isCut = true;
      this.takeEvents(page.events);
      if (page.events.length < EVENTS_AT_ONCE) break;
    }
    await this.loadPast();
  }

  async loadPast() {
    this.asked.past = Date.now();
    this.past = await this.ask("past");
    this.changed("events");
  }

  /** Ask for the curves of these names and steps; `range` null: of the whole run. */
  async loadSeries(names, range, isNow = () => true) {
    const known = new Set(this.names);
    this.wanted = names.filter((name) => known.has(name));
    const first = range ? range[0] : this.first;
    const last = range ? range[1] : this.last;
    if (last < 0 || !this.wanted.length) return;
    const [series, clock] = await Promise.all([
      this.ask("series", { names: this.wanted, first, last, points: POINTS }),
      this.clock.step.length || !known.has("step_s") ? null
        : this.ask("series", { names: ["step_s"], first: this.first, last: this.last, points: POINTS })]);
    if (!isNow()) return;
    if (clock) this.takeClock(clock.step_s);
    this.series = new Map(Object.entries(series).map(([name, curve]) => [name, read(curve)]));
    this.range = range;
    if (!range) this.covered = last;
    this.changed("series");
  }

  /** Ask for the steps since the last ones that are here. */
  async extendSeries() {
    const known = new Set(this.names);
    const names = [...new Set([...this.wanted, "step_s"])].filter((name) => known.has(name));
    if (!names.length) return;
    const got = await this.ask("series", { names, first: this.covered + 1, last: -1, points: MOST_EXTENDED });
    let newest = this.covered;
    for (const [name, curve] of Object.entries(got)) {
      const more = read(curve);
      if (!more.step.length) continue;
      newest = Math.max(newest, more.step.at(-1));
      if (name === "step_s") this.takeClock(curve);
      const here = this.series.get(name);
      if (!here) {
        if (this.wanted.includes(name)) this.series.set(name, more);
        continue;
      }
      for (const key of ["step", "low", "high", "mean"]) here[key].push(...more[key]);
    }
    if (newest > this.covered) {
      this.covered = newest;
      this.last = Math.max(this.last, newest);
      this.changed("series");
    }
  }

  /** Keep how long the run has trained at which step: the sum of the steps' times. */
  takeClock(curve) {
    const { step, mean } = read(curve);
    for (let i = 0; i < step.length; i++) {
      const at = this.clock.step.length;
      const before = at ? this.clock.seconds[at - 1] : 0;
      const steps = at ? step[i] - this.clock.step[at - 1] : 1;
      if (steps <= 0) continue;
      this.clock.step.push(step[i]);
      this.clock.seconds.push(before + steps * (Number.isFinite(mean[i]) ? mean[i] : 0));
    }
  }

  secondsAt(step) {
    return interpolate(this.clock.step, this.clock.seconds, step);
  }

  stepAt(seconds) {
    return interpolate(this.clock.seconds, this.clock.step, seconds);
  }

  async loadTimes(range) {
    this.asked.times = Date.now();
    this.times = await this.ask("times", {
      first: range ? range[0] : this.first, last: range ? range[1] : -1, points: TIMES_POINTS });
    this.changed("times");
  }

  async loadUse() {
    this.asked.use = Date.now();
    this.use = await this.ask("use", { points: USE_POINTS });
    this.changed("use");
  }

  /** Bring what is shown up to date, after news: never two at a time, and the dear things rarely. */
  async follow(names, range) {
    const now = Date.now();
    if (this.busy || document.hidden || now < this.restUntil) return;
    this.busy = true;
    try {
      const logs = Object.keys(this.overview?.logs ?? {});
      const isUnknown = logs.some((name) => !this.names.includes(`log/${name}`)) || !this.names.includes("loss");
      if (now - (this.asked.names ?? 0) > (isUnknown ? 1000 : NAMES_EVERY_MS)) this.takeNames(await this.ask("names"));
      if (!range) {
        const length = this.series.get("loss")?.step.length ?? 0;
        const isMissing = names.some((name) => this.names.includes(name) && !this.series.has(name));
        const isFar = (this.overview?.step ?? -1) - this.covered > MOST_EXTENDED;
        if (length > 2.2 * POINTS || isFar || this.range || this.covered < 0 || isMissing) {
          this.takeNames(await this.ask("names"));
          await this.loadSeries(names, null);
        } else if ((this.overview?.step ?? -1) > this.covered) {
          await this.extendSeries();
        }
      }
      if (now - (this.asked.times ?? 0) > SLOW_EVERY_MS) await this.loadTimes(range);
      if (now - (this.asked.use ?? 0) > SLOW_EVERY_MS) await this.loadUse();
      const isPastOld = this.toldAt + WRITTEN_MS > (this.asked.past ?? 0);
      if (isPastOld && now - (this.asked.past ?? 0) > SLOW_EVERY_MS) await this.loadPast();
      this.failures = 0;
    } catch (error) {
      this.failures += 1;
      if (this.failures >= WORTH_SAYING) throw error;
    } finally {
      this.busy = false;
      // Who answers slowly has many to answer: ask more rarely, and after a failure more rarely still.
      const took = Date.now() - now;
      this.restUntil = Date.now() + 2 * took + (this.failures ? 1000 * 2 ** Math.min(this.failures, 5) : 0);
    }
  }
}

function read(curve) {
  return {
    step: [...curve.step],
    low: curve.low.map(value),
    high: curve.high.map(value),
    mean: curve.mean.map(value),
  };
}

/** Index of the last value of growing `xs` that is not above `x`; -1: there is none. */
export function nearest(xs, x) {
  let low = -1;
  let high = xs.length;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  return low;
}

/** Value of `ys` at `x`, where `xs` grow. */
function interpolate(xs, ys, x) {
  const at = nearest(xs, x);
  if (at < 0) return ys[0] ?? NaN;
  if (at === xs.length - 1) return ys[at];
  return ys[at] + ((x - xs[at]) / (xs[at + 1] - xs[at])) * (ys[at + 1] - ys[at]);
}
