// The timeline of generations: which worker was there from when to when, and why it came and went.

import { byId, el, icon, put, table, tableFold } from "./dom.js";
import { clock, count, duration, moment, plain, sum, whole } from "./format.js";

const BAD = new Set(["lost", "failed", "evicted"]);
const MOST_GENERATION_LABELS = 12;
const TICK_PX = 110;

export class Timeline {
  constructor(app) {
    this.app = app;
    this.body = el("div", { class: "lanes", "aria-hidden": "true" });
    this.say = el("p", { class: "say" });
    this.fold = tableFold("Show as a table", () => this.table());
    const box = el("div", { class: "scroll" }, this.body);
    put(byId("timeline-card"), this.say, box, this.fold);
    new ResizeObserver(() => this.draw()).observe(box);
  }

  draw() {
    const run = this.app.primary();
    if (!run?.overview) return;
    const { spans, generations } = history(run);
    this.spans = spans;
    this.generations = generations;
    this.say.textContent = sentence(run, spans, generations);
    this.body.hidden = !spans.length;
    this.fold.hidden = !spans.length;
    if (!spans.length) return;
    const [from, to] = this.domain(run, spans);
    const place = (time) => `${(100 * Math.max(0, Math.min(1, (time - from) / (to - from)))).toFixed(3)}%`;
    const isIn = (time) => time >= from && time <= to;
    const hosts = lanes(spans);
    const rows = sum(hosts.map(([, each]) => each.length));
    const high = rows > 40 ? 9 : rows > 16 ? 14 : 20;
    const width = this.body.clientWidth - 90;
    const marks = generations.filter(({ time }) => isIn(time));
    const every = Math.ceil(marks.length / Math.max(1, Math.min(MOST_GENERATION_LABELS, width / 40)));
    put(this.body,
      el("div"), el("div", { class: "ruler" }, ticks(from, to, width).map((time) =>
        el("span", { class: edge((time - from) / (to - from), width), text: clock(time, to), style: { left: place(time) } }))),
      el("div", { class: "label", text: "generation" }),
      el("div", { class: "generations" }, marks.map((mark, index) => el("span", {
        text: index % every ? "" : whole(mark.generation), title: `generation ${mark.generation}, ${clock(mark.time)}${mark.reason ? `: ${plain(mark.reason, 300)}` : ""}`,
        style: { left: place(mark.time) } }))),
      hosts.flatMap(([host, each]) => [
        el("div", { class: "label" }, el("b", { class: "name", text: plain(host || "machine unknown", 60), title: plain(host, 200) }), count(each.length, "place")),
        el("div", { class: "rows" },
          marks.length <= 200 ? marks.map((mark) => el("i", { class: "generation", style: { left: place(mark.time) } })) : [],
          each.map((lane) => el("div", { class: "row", style: { height: `${high}px` } }, lane
            .filter((span) => span.to >= from && span.from <= to)
            .map((span) => bar(span, place, high, ((span.to - span.from) / (to - from)) * width))))),
      ]));
    this.fold.refresh();
  }

  /** From when to when: the steps that are shown, where their times are known; else the whole run. */
  domain(run, spans) {
    const times = this.app.range ? (run.times?.time ?? []).filter((time) => time > 0) : [];
    if (times.length > 1 && times.at(-1) > times[0]) return [times[0], times.at(-1)];
    const from = Math.min(...spans.map((span) => span.from));
    const to = Math.max(...spans.map((span) => span.to));
    return [from, to > from ? to : from + 1];
  }

  table() {
    return el("div", {},
      table("Workers", ["Worker", "Machine", "Came", "Why", "Went", "How", "Why", "Was there"], this.spans.map((span) => [
        plain(span.id, 60), plain(span.host, 80), moment(span.from), plain(span.cameFor || "–", 300),
        span.isOpen ? "still there" : moment(span.to), span.how || "–", plain(span.wentFor || "–", 500), duration(span.to - span.from)])),
      table("Generations", ["Generation", "Began", "Workers", "Why"], this.generations.map((each) => [
        whole(each.generation), moment(each.time), whole(each.workers), plain(each.reason || "–", 500)])));
  }
}

/** Who was there from when to when, the first one first; and when each generation began. */
function history({ overview, past, events }) {
  const now = overview.ended || overview.time;
  const end = overview.state === "finished" ? "finished" : "left";
  const spans = past.workers.filter((each) => each.joined).map((each) => ({
    id: each.worker_id, host: each.host, from: each.joined, to: Math.max(each.joined, each.gone || now),
    cameFor: each.why_joined ?? "", wentFor: each.why_gone ?? "", how: each.how || end, isOpen: !each.gone && !overview.ended,
  }));
  const began = events.filter((event) => event.kind === "membership");
  const generations = began.filter((event, index) => event.generation !== began[index - 1]?.generation).map((event) => ({
    generation: event.generation, time: event.time, workers: event.worker_ids?.length ?? 0, reason: event.reason ?? "" }));
  return { spans: spans.sort((a, b) => a.from - b.from), generations };
}

/** Put the spans of each machine into as few rows as hold them: [[host, [row, ...]], ...]. */
function lanes(spans) {
  const hosts = new Map();
  for (const span of spans) {
    if (!hosts.has(span.host)) hosts.set(span.host, []);
    const rows = hosts.get(span.host);
    const free = rows.find((row) => row.at(-1).to <= span.from && !row.at(-1).isOpen);
    if (free) free.push(span);
    else rows.push([span]);
  }
  return [...hosts].sort((a, b) => a[0].localeCompare(b[0], "en", { numeric: true }));
}

function bar(span, place, high, width) {
  const left = place(span.from);
  const text = high >= 14 && width > 26 ? plain(span.id, 30) : "";
  const about = `${plain(span.id, 60)}: ${clock(span.from)}${span.cameFor ? ` (${plain(span.cameFor, 200)})` : ""} to ${
    span.isOpen ? "now" : `${clock(span.to)}, ${span.how}${span.wentFor ? ` (${plain(span.wentFor, 300)})` : ""}`}`;
  return el("span", { class: "span", title: about, "data-how": span.isOpen ? "" : span.how, style: { left, width: `calc(${place(span.to)} - ${left})` } },
    BAD.has(span.how) && high >= 14 && width > 40 ? [icon("failed"), text] : text);
}

/** A label at an edge stays inside. */
function edge(part, width) {
  const half = 30 / Math.max(60, width);
  return part < half ? "first" : part > 1 - half ? "last" : "";
}

function ticks(from, to, width) {
  const steps = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 604800];
  const wanted = ((to - from) * TICK_PX) / Math.max(TICK_PX, width);
  const step = steps.find((each) => each >= wanted) ?? 2592000;
  const zone = new Date(from * 1000).getTimezoneOffset() * 60;
  const found = [];
  for (let time = Math.ceil((from - zone) / step) * step + zone; time <= to; time += step) found.push(time);
  return found.length ? found : [from];
}

function sentence(run, spans, generations) {
  if (!spans.length) return "Who was there is not known: the run's events are missing.";
  const lost = spans.filter((span) => BAD.has(span.how));
  const there = spans.filter((span) => span.isOpen).length;
  const parts = [`${count(spans.length, "worker")} in all, on ${count(new Set(spans.map((span) => span.host)).size, "machine")}`];
  if (there) parts.push(`${whole(there)} there now`);
  if (generations.length) parts.push(count(generations.length, "generation"));
  parts.push(lost.length ? `${whole(lost.length)} lost or failed` : "none lost");
  const cost = run.past.interruptions.filter((each) => each.measured).map((each) => each.measured.seconds);
  if (cost.length) parts.push(`${count(cost.length, "change")} of generation cost ${duration(sum(cost))}`);
  return `${parts.join(", ")}.${run.isCut ? " The oldest events are not shown." : ""}`;
}
