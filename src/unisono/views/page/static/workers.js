// Where each worker's time goes: a row a worker, and a map of workers by steps.

import { byId, el, icon, put, say, swatch, table, tableFold } from "./dom.js";
import { bytes, count, duration, mean, number, percent, plain, sum, whole } from "./format.js";
import { colour, isPart, partColour } from "./theme.js";

const WAITING = "waiting";
const SORT_EVERY_MS = 5000;
/** What `times` has beside the parts of a step. (Runs of older versions have more, which nobody shows.) */
const WORDS = { leaves: "micro-batches", waits_s: "wait for one other worker", page_faults: "page faults" };
const TONES = { lost: "bad", failed: "bad", late: "warn", leaving: "warn", joining: "warn", waiting: "warn", left: "soft", finished: "soft", ended: "soft" };
const ICONS = { training: "training", lost: "failed", failed: "failed", late: "warning", finished: "done", joining: "waiting", waiting: "waiting", leaving: "stopped", left: "stopped", ended: "stopped" };
const BUSY = "busy";

/** Which part of the model a worker has, where a run has groups of workers. */
const partOf = (worker, overview) => (worker && overview.parts > 1 ? `, part ${whole(worker.part)} of ${whole(overview.parts)}` : "");
const total = (parts) => sum(Object.values(parts));

export class Workers {
  constructor(app) {
    this.app = app;
    this.sortedAt = 0;
    this.places = new Map();
    this.heat = new HeatMap(byId("heat"));
    this.body = el("tbody");
    const heading = (text, style = "") => el("th", { scope: "col", class: style, text });
    put(byId("workers-table"),
      el("caption", { class: "unseen", text: "Workers, and where their time goes" }),
      el("thead", {}, el("tr", {},
        heading("Worker"), heading("Machine", "less"), heading("State"), heading("Share", "num less"), heading("Its time", "bar-cell"),
        heading("Step", "num"), heading("Waits", "num"), heading("for", "less"), heading("Cores", "num less least"), heading("Memory", "num less least"))),
      this.body);
    for (const id of ["workers-of", "workers-order"]) {
      byId(id).addEventListener("change", () => {
        this.sortedAt = 0;
        this.draw();
      });
    }
  }

  /** `isRecoloured`: the colours may be others, and not only the values. */
  draw(isRecoloured = false) {
    const run = this.app.primary();
    if (!run?.overview) return;
    const rows = this.sorted(this.rows(run));
    const parts = [...new Set(rows.flatMap((row) => Object.keys(row.parts)))];
    const used = parts.filter((part) => rows.some((row) => row.parts[part] > 0));
    const longest = Math.max(...rows.map((row) => total(row.parts)), 1e-12);
    put(byId("workers-legend"), used.map((part) => el("span", {}, swatch({ colour: partColour(part, parts.indexOf(part)) }, true), part)));
    put(this.body, rows.map((row) => this.row(row, parts, longest)));
    const isNow = byId("workers-of").value === "now";
    say(byId("workers-say"), rows.length ? verdict(rows) : isNow ? "No worker has reported yet." : "Times by worker are kept of the newest steps only.");
    const order = rows.map((row) => row.id).join();
    if (run.times === this.mapped?.times && order === this.mapped.order && !isRecoloured) return;
    this.mapped = { times: run.times, order };
    this.heat.show(run.times, rows.map((row) => row.id));
  }

  /** Rows from the last steps, or from the means of the steps that are shown. */
  rows(run) {
    const now = new Map(run.overview.workers.map((worker) => [worker.worker_id, worker]));
    if (byId("workers-of").value === "now") {
      return run.overview.workers.map((worker) => ({
        id: worker.worker_id, part: partOf(worker, run.overview), host: worker.host, state: worker.state, rank: worker.rank, share: worker.share,
        parts: worker.seconds, waitsFor: worker.waits_for, cores: worker.cores, memory: worker.memory_bytes }));
    }
    const { times } = run;
    if (!times?.workers) return [];
    const parts = Object.keys(times.values).filter(isPart);
    const leaves = times.workers.map((_, at) => meanOf(times.values.leaves, at));
    return times.workers.map((id, at) => ({
      id, part: partOf(now.get(id), run.overview), host: now.get(id)?.host ?? "", state: now.get(id)?.state ?? "", rank: now.get(id)?.rank ?? null,
      share: sum(leaves) > 0 ? leaves[at] / sum(leaves) : 0,
      parts: Object.fromEntries(parts.map((part) => [part, meanOf(times.values[part], at)])),
      waitsFor: commonest((times.waits_for ?? []).map((point) => point?.[at])), cores: now.get(id)?.cores ?? 0, memory: now.get(id)?.memory_bytes ?? 0 }))
      .filter((row) => total(row.parts) > 0);
  }

  /** Rows in their order, which changes no more than every few seconds: what jumps cannot be read. */
  sorted(rows) {
    const busy = (row) => total(row.parts) - (row.parts[WAITING] ?? 0);
    const orders = {
      slow: (a, b) => busy(b) - busy(a),
      waiting: (a, b) => (b.parts[WAITING] ?? 0) - (a.parts[WAITING] ?? 0),
      rank: (a, b) => (a.rank ?? 1e9) - (b.rank ?? 1e9),
    };
    const isNew = rows.some((row) => !this.places.has(row.id));
    if (isNew || Date.now() - this.sortedAt > SORT_EVERY_MS) {
      this.sortedAt = Date.now();
      const order = orders[byId("workers-order").value];
      const members = (row) => (row.rank === null && byId("workers-of").value === "now" ? 1 : 0);
      rows.sort((a, b) => members(a) - members(b) || order(a, b) || a.id.localeCompare(b.id, "en", { numeric: true }));
      this.places = new Map(rows.map((row, place) => [row.id, place]));
    }
    return rows.sort((a, b) => this.places.get(a.id) - this.places.get(b.id));
  }

  row(row, parts, longest) {
    const all = total(row.parts);
    const waits = row.parts[WAITING] ?? 0;
    const stack = el("div", { class: "stack", "aria-hidden": "true" });
    const said = [];
    parts.forEach((part, index) => {
      const seconds = row.parts[part] ?? 0;
      if (seconds <= 0) return;
      stack.append(el("i", {
        title: `${part} ${duration(seconds)} (${percent(seconds / all)})`,
        style: { width: `${(100 * seconds) / longest}%`, background: partColour(part, index) } }));
      said.push(`${part} ${percent(seconds / all)}`);
    });
    const isThere = all > 0;
    return el("tr", {},
      el("th", { scope: "row", class: "name", text: plain(row.id, 40) + row.part }),
      el("td", { class: "less name soft", text: plain(row.host, 60) }),
      el("td", {}, el("span", { class: "state", "data-tone": TONES[row.state] ?? "" }, icon(ICONS[row.state] ?? "unknown"), el("span", { class: "words", text: plain(row.state || "–", 20) }))),
      el("td", { class: "num less", text: row.share ? percent(row.share) : "–" }),
      el("td", { class: "bar-cell" }, stack, el("span", { class: "unseen", text: said.join(", ") })),
      el("td", { class: "num", text: isThere ? duration(all) : "–" }),
      el("td", { class: "num", text: isThere ? percent(waits / all) : "–" }),
      el("td", { class: "less name", text: plain(row.waitsFor || "–", 40) }),
      el("td", { class: "num less least", text: row.cores ? row.cores.toFixed(1) : "–" }),
      el("td", { class: "num less least", text: row.memory ? bytes(row.memory) : "–" }));
  }
}

/** In a sentence: who makes the others wait. */
function verdict(rows) {
  const at = rows.filter((row) => total(row.parts) > 0);
  if (at.length < 2) return at.length ? "One worker: there is nobody to wait for." : "No worker has finished a step yet.";
  const blame = new Map();
  for (const row of at) {
    if (!row.waitsFor || row.waitsFor === row.id) continue;
    const [number_, seconds] = blame.get(row.waitsFor) ?? [0, 0];
    blame.set(row.waitsFor, [number_ + 1, seconds + (row.parts[WAITING] ?? 0) / total(row.parts)]);
  }
  const waiting = mean(at.map((row) => (row.parts[WAITING] ?? 0) / total(row.parts)));
  const [name, [waiters, share]] = [...blame].sort((a, b) => b[1][1] - a[1][1])[0] ?? ["", [0, 0]];
  const general = `${count(at.length, "worker")} wait ${percent(waiting)} of the time for each other`;
  if (!name || share / waiters < 0.05) return `${general}: nobody holds the others up.`;
  return `${general}; ${whole(waiters)} of them mostly for ${plain(name, 40)}, ${percent(share / waiters)} of each step.`;
}

/** The mean of one worker's value over some points; 0: it was not there. */
const meanOf = (points, at) => mean((points ?? []).map((point) => point?.[at])) || 0;

function commonest(values) {
  const counts = new Map();
  for (const value of values) if (value) counts.set(value, (counts.get(value) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1])[0]?.[0] ?? "";
}

/** A map of one value: a row a worker, a column for some steps. 64 workers stay legible where 64 lines would not. */
class HeatMap {
  constructor(host) {
    this.select = el("select", { onchange: () => this.draw() });
    this.at = el("span", { class: "at soft" });
    this.ramp = el("canvas", { width: 90, height: 8, "aria-hidden": "true" });
    this.least = el("span");
    this.most = el("span");
    this.canvas = el("canvas", { tabindex: 0, role: "img" });
    this.names = el("div", { class: "rows", "aria-hidden": "true" });
    this.from = el("span");
    this.to = el("span");
    this.fold = tableFold("Show as a table", () => this.table());
    this.body = el("div", { class: "heat" }, this.names, this.canvas, el("div", { class: "axis" }, this.from, this.to));
    this.nothing = el("p", { class: "empty", text: "Times by worker come with the first steps, and are kept of the newest ones only." });
    put(host,
      el("div", { class: "tools" },
        el("h3", { text: "By worker and step" }),
        el("label", { class: "group" }, "Colour shows", this.select),
        el("span", { class: "ramp" }, this.least, this.ramp, this.most), this.at),
      this.nothing, this.body, this.fold);
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.canvas.addEventListener("mouseleave", () => say(this.at, ""));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.body);
    this.cell = [0, 0];
  }

  show(times, order) {
    this.times = times;
    const has = Boolean(times?.workers?.length && times.step?.length);
    this.nothing.hidden = has;
    this.body.hidden = !has;
    this.fold.hidden = !has;
    if (!has) return;
    const index = new Map(times.workers.map((id, at) => [id, at]));
    this.order = [...order.filter((id) => index.has(id)), ...times.workers.filter((id) => !order.includes(id))].map((id) => index.get(id));
    const kinds = [BUSY, ...Object.keys(times.values)];
    if (this.select.options.length !== kinds.length) {
      const before = this.select.value;
      put(this.select, kinds.map((kind) => el("option", { value: kind, text: kind === BUSY ? "the step, without waiting" : WORDS[kind] ?? kind })));
      if (kinds.includes(before)) this.select.value = before;
    }
    this.draw();
    this.fold.refresh();
  }

  value(point, worker) {
    const { values } = this.times;
    const kind = this.select.value;
    if (kind !== BUSY) return values[kind]?.[point]?.[worker] ?? null;
    let busy = null;
    for (const part of Object.keys(values)) {
      const seconds = values[part][point]?.[worker];
      if (!isPart(part)) continue;
      if (!Number.isFinite(seconds)) return null;
      if (part !== WAITING) busy = (busy ?? 0) + seconds;
    }
    return busy;
  }

  draw() {
    if (!this.times?.workers?.length || this.body.hidden) return;
    const { times, order } = this;
    const columns = times.step.length;
    const width = this.canvas.clientWidth;
    if (!width) return;
    const high = Math.max(5, Math.min(18, Math.floor(420 / order.length)));
    const scale = devicePixelRatio || 1;
    this.high = high;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(high * order.length * scale);
    this.canvas.style.height = `${high * order.length}px`;
    const cells = order.map((worker) => times.step.map((_, point) => this.value(point, worker)));
    const all = cells.flat().filter(Number.isFinite).sort((a, b) => a - b);
    const low = all[0] ?? 0;
    const most = all[Math.floor(all.length * 0.99)] ?? 1;
    const ramp = ramps();
    const context = this.canvas.getContext("2d");
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    const wide = this.canvas.width / columns;
    cells.forEach((row, y) => row.forEach((value, x) => {
      if (!Number.isFinite(value)) return;
      context.fillStyle = ramp(most > low ? (value - low) / (most - low) : 0.3);
      context.fillRect(Math.floor(x * wide), Math.round(y * high * scale), Math.ceil(wide), Math.max(1, Math.round((high - (high > 7 ? 1 : 0)) * scale)));
    }));
    const key = this.ramp.getContext("2d");
    for (let x = 0; x < 90; x++) {
      key.fillStyle = ramp(x / 89);
      key.fillRect(x, 0, 1, 8);
    }
    say(this.least, this.words(low));
    say(this.most, this.words(most));
    const every = Math.ceil(11 / high);
    put(this.names, order.map((worker, y) => el("span", { text: y % every ? "" : plain(times.workers[worker], 12), style: { height: `${high}px`, lineHeight: `${high}px` } })));
    say(this.from, `step ${whole(times.step[0])}`);
    say(this.to, `step ${whole(times.step.at(-1))}`);
    this.canvas.setAttribute("aria-label",
      `${this.select.selectedOptions[0]?.text ?? ""}, of ${count(order.length, "worker")}, from ${this.words(low)} to ${this.words(most)}; the arrow keys read single values`);
  }

  words(value) {
    const kind = this.select.value;
    if (kind === "leaves" || kind === "page_faults") return number(value);
    return kind.endsWith("bytes") ? bytes(value) : duration(value);
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    this.cell = [
      clamp(Math.floor(((event.clientX - box.left) / box.width) * this.times.step.length), this.times.step.length),
      clamp(Math.floor((event.clientY - box.top) / this.high), this.order.length)];
    say(this.at, this.readCell());
  }

  key(event) {
    const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!by || !this.times) return;
    event.preventDefault();
    this.cell = [clamp(this.cell[0] + by[0], this.times.step.length), clamp(this.cell[1] + by[1], this.order.length)];
    say(this.at, this.readCell());
    say(byId("spoken"), this.readCell());
  }

  readCell() {
    const [point, y] = this.cell;
    const worker = this.order[y];
    const value = this.value(point, worker);
    const target = this.times.waits_for?.[point]?.[worker];
    const waits = target ? `, waits for ${plain(target, 20)}` : "";
    return `${plain(this.times.workers[worker], 20)}, step ${whole(this.times.step[point])}: ${value === null ? "not there" : this.words(value)}${waits}`;
  }

  table() {
    const kinds = Object.keys(this.times.values).filter((kind) => isPart(kind) || kind in WORDS);
    return table("Means of the steps that are shown, by worker", ["Worker", ...kinds.map((kind) => WORDS[kind] ?? kind)],
      this.order.map((worker) => [plain(this.times.workers[worker], 40), ...kinds.map((kind) => {
        const value = meanOf(this.times.values[kind], worker);
        return isPart(kind) || kind.endsWith("_s") ? duration(value) : kind.endsWith("bytes") ? bytes(value) : number(value);
      })]));
  }
}

const clamp = (value, length) => Math.max(0, Math.min(length - 1, value));

/** From few to much: four colours of the style sheet, which differ in lightness, and what lies between them. */
function ramps() {
  const stops = [0, 1, 2, 3].map((at) => {
    const hex = colour(`heat-${at}`);
    return [1, 3, 5].map((from) => parseInt(hex.slice(from, from + 2), 16));
  });
  return (part) => {
    const at = Math.max(0, Math.min(1, part)) * 3;
    const from = Math.min(2, Math.floor(at));
    const mixed = stops[from].map((value, index) => Math.round(value + (stops[from + 1][index] - value) * (at - from)));
    return `rgb(${mixed.join(",")})`;
  };
}
