// A chart: uPlot, with a legend that says values, keys, a text for those who cannot see it, and a table.

import { byId, el, put, say, swatch, tableFold, table } from "./dom.js";
import { clock, clockTick, duration, moment, number, short, tick, whole } from "./format.js";
import { nearest } from "./model.js";
import { colour } from "./theme.js";

const KINDS = {
  step: { word: "step", say: (x) => whole(Math.round(x)), axis: (x) => (x % 1 ? "" : Math.abs(x) >= 1e5 ? short(x) : whole(x)) },
  time: { word: "after", say: duration, axis: duration },
  clock: { word: "at", say: clock, axis: clockTick },
};
const MOST_TABLE_ROWS = 60;
const NAVIGATION = /^(Arrow|Page|Home|End)/;
const KEYS = ["ArrowLeft", "ArrowRight", "PageUp", "PageDown", "Home", "End", "Escape", "+", "=", "-", "0"];

export const charts = new Set();

/** Draw all charts again, with other colours. */
export const redraw = () => charts.forEach((chart) => chart.rebuild());

export class Chart {
  /**
   * `host` gets the chart. `onZoom(first, last)` is called with values of x, `onZoom(null)` for all of them; `onKey`
   * gets "in", "out", "left" or "right". `format` writes a value.
   */
  constructor(host, { title, height = 190, format = number, axis = tick, zero = false, most = null, onZoom = null, onKey = null }) {
    Object.assign(this, { host, title, height, format, axis, zero, most, onZoom, onKey });
    this.plot = null;
    this.shown = null;
    this.legend = el("div", { class: "legend" });
    this.at = el("span", { class: "at" });
    this.heading = el("h3", { text: title });
    this.area = el("div", { class: "plot", tabindex: 0, role: "group", "aria-roledescription": "chart", "aria-label": title });
    this.area.style.minHeight = `${height}px`;
    this.fold = tableFold("Show as a table", () => this.table());
    put(host, el("div", { class: "chart-head" }, this.heading, this.legend, this.at), this.area, this.fold);
    this.area.addEventListener("keydown", (event) => this.key(event));
    this.area.addEventListener("blur", () => this.plot?.setCursor({ left: -10, top: -10 }));
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.area);
    charts.add(this);
  }

  remove() {
    this.observer.disconnect();
    this.plot?.destroy();
    charts.delete(this);
    this.host.remove();
  }

  /**
   * Show lines: `{label, colour, dash, x, y, low, high, points}`, of which `low` and `high` may be left out.
   *
   * `kind`: what x is ("step", "time", "clock"); `stacked`: each line is drawn on the one before, as an area; `log`: of y;
   * `limits`: of x; `marks`: values of x at which something has happened.
   */
  show(lines, { kind = "step", stacked = false, log = false, limits = null, marks = [], empty = "Nothing yet." } = {}) {
    const alive = lines.filter((line) => line.x.length);
    this.shown = { lines: alive, kind, stacked, log, limits, marks, empty };
    const shape = JSON.stringify([
      kind, stacked, log, alive.map((line) => [line.label, line.colour, line.dash, Boolean(line.low), line.points])]);
    const data = this.data();
    if (!alive.length) {
      this.plot?.destroy();
      this.plot = null;
      put(this.area, el("div", { class: "nothing", text: empty }));
      put(this.legend);
      say(this.at, "");
    } else if (!this.plot || shape !== this.shape) {
      this.build(data);
    } else {
      this.plot.setData(data, false);
      this.limit();
      this.read(this.plot.cursor.idx);
    }
    this.shape = alive.length ? shape : "";
    this.describe();
    this.fold.refresh();
  }

  rebuild() {
    if (this.plot) this.build(this.data());
  }

  /** Columns for uPlot: x, then for each line its mean, and its low and high where it has them. */
  data() {
    const { lines, stacked, log } = this.shown;
    if (!lines.length) return [[]];
    const clean = (values) => values.map((y) => (Number.isFinite(y) && (!log || y > 0) ? y : null));
    if (stacked) {
      const sums = new Array(lines[0].x.length).fill(0);
      return [lines[0].x, ...lines.map((line) => line.y.map((y, i) => (sums[i] += Number.isFinite(y) ? y : 0)))];
    }
    const tables = lines.map((line) => [line.x, clean(line.y), ...(line.low ? [clean(line.low), clean(line.high)] : [])]);
    return tables.length === 1 ? tables[0] : uPlot.join(tables);
  }

  build(data) {
    const { lines, kind, stacked, log } = this.shown;
    this.plot?.destroy();
    put(this.area);
    const series = [{}];
    const bands = [];
    lines.forEach((line, index) => {
      if (stacked) {
        series.push({ label: line.label, stroke: line.colour, width: 1, fill: line.colour, points: { show: false } });
        if (index) bands.push({ series: [index + 1, index], fill: line.colour });
        return;
      }
      const at = series.length;
      series.push({
        label: line.label, stroke: line.colour, width: 1.75, dash: line.dash, spanGaps: false,
        points: { show: line.points ? true : undefined, size: line.points ? 6 : 5, fill: line.colour, stroke: line.colour },
      });
      if (line.low) {
        const edge = { label: "", stroke: "transparent", width: 0, points: { show: false } };
        series.push(edge, edge);
        bands.push({ series: [at + 2, at + 1], fill: fade(line.colour) });
      }
    });
    const axis = { stroke: colour("soft"), font: "11px system-ui, sans-serif", ticks: { show: false }, gap: 6 };
    const kinds = KINDS[kind];
    this.plot = new uPlot({
      width: Math.max(120, this.area.clientWidth), height: this.height, series, bands,
      padding: [8, 10, 0, 0],
      legend: { show: false },
      scales: {
        x: { time: kind === "clock", range: (u, low, high) => this.xRange(low, high) },
        y: { distr: log ? 3 : 1, range: log ? undefined : (u, low, high) => this.yRange(low, high) },
      },
      axes: [
        { ...axis, size: 26, grid: { show: false }, space: kind === "step" ? 64 : 76,
          values: (u, splits, _, __, step) => splits.map((x) => kinds.axis(x, step)) },
        { ...axis, size: (u, values) => Math.max(54, 12 + 6.5 * Math.max(0, ...(values ?? []).map((text) => text.length))), grid: { stroke: colour("grid"), width: 1 }, space: 34,
          values: (u, splits, _, __, step) => splits.map((y) => (y === null ? "" : this.axis(y, log ? Math.abs(y) : step))) },
      ],
      cursor: {
        y: false, drag: { x: Boolean(this.onZoom), y: false, setScale: false, dist: 6 },
        points: { show: !stacked, size: 6 },
        sync: { key: `unisono-${kind}`, scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
        bind: { dblclick: () => () => { this.onZoom?.(null); return null; } },
      },
      hooks: {
        setSelect: [(u) => this.select(u)],
        setCursor: [(u) => this.read(u.cursor.idx)],
        draw: [(u) => this.drawOdd(u)],
      },
    }, data, this.area);
    this.makeLegend();
    this.read(null);
  }

  xRange(low, high) {
    const limits = this.shown.limits;
    if (limits) return limits[0] < limits[1] ? limits : [limits[0] - 0.5, limits[1] + 0.5];
    if (low === null) return [0, 1];
    return low < high ? [low, high] : [low - 0.5, high + 0.5];
  }

  yRange(low, high) {
    if (low === null) return [0, 1];
    if (this.most !== null) return [0, this.most];
    if (this.zero || this.shown.stacked) return [0, high > 0 ? high * 1.06 : 1];
    const isFlat = high - low <= 1e-6 * Math.max(Math.abs(low), Math.abs(high));
    const room = isFlat ? Math.abs(high) * 0.05 || 1 : (high - low) * 0.07;
    return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
  }

  limit() {
    const [xs] = this.plot.data;
    const [min, max] = this.xRange(xs[0], xs.at(-1));
    this.plot.batch(() => {
      this.plot.setScale("x", { min, max });
    });
  }

  resize() {
    const width = this.area.clientWidth;
    if (this.plot && width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: this.height });
  }

  select(u) {
    const { left, width } = u.select;
    if (width < 4 || !this.onZoom) return;
    const first = u.posToVal(left, "x");
    const last = u.posToVal(left + width, "x");
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.onZoom(first, last);
  }

  /** Mark values that are no finite numbers, which no line can go through. */
  drawOdd(u) {
    const marks = this.shown.lines.flatMap((line) => line.odd ?? []);
    const { ctx, bbox } = u;
    ctx.save();
    ctx.strokeStyle = colour("line-strong");
    ctx.setLineDash([2 * devicePixelRatio, 4 * devicePixelRatio]);
    for (const x of this.shown.marks.slice(-200)) {
      const at = Math.round(u.valToPos(x, "x", true)) + 0.5;
      if (at < bbox.left || at > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.fillStyle = colour("bad");
    for (const x of marks.slice(0, 500)) {
      const at = u.valToPos(x, "x", true);
      if (at < bbox.left || at > bbox.left + bbox.width) continue;
      const foot = bbox.top + bbox.height;
      const size = 5 * devicePixelRatio;
      ctx.beginPath();
      ctx.moveTo(at, foot - 2 * size);
      ctx.lineTo(at - size, foot);
      ctx.lineTo(at + size, foot);
      ctx.fill();
    }
    ctx.restore();
  }

  makeLegend() {
    const { lines, stacked } = this.shown;
    this.values = lines.map(() => el("b"));
    const order = lines.map((line, index) => index);
    if (stacked) order.reverse();
    put(this.legend, order.map((index) => el("span", {},
      lines[index].label ? [swatch(lines[index], stacked), el("span", { class: "name", text: lines[index].label })] : null, this.values[index])));
  }

  /** Show the values at a point in the legend; null: the last ones. */
  read(index) {
    const { lines, kind, stacked } = this.shown;
    if (!this.values || this.values.length !== lines.length || !this.plot) return;
    const xs = this.plot.data[0];
    const x = index === null || index === undefined ? null : xs[index];
    lines.forEach((line, number) => {
      let at = x === null ? line.x.length - 1 : nearest(line.x, x);
      if (x !== null && at >= 0 && !stacked && Math.abs(line.x[at] - x) > (xs.at(-1) - xs[0]) / 20) at = -1;
      say(this.values[number], at < 0 ? "–" : this.format(line.y[at]));
    });
    say(this.at, x === null ? "" : `${KINDS[kind].word} ${KINDS[kind].say(x)}`);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !KEYS.includes(event.key) || !this.plot) return;
    if (!this.onZoom && !NAVIGATION.test(event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    if (event.key === "+" || event.key === "=") return this.onKey?.("in");
    if (event.key === "-") return this.onKey?.("out");
    if (event.key === "0" || event.key === "Escape") return this.onZoom?.(null);
    if (event.shiftKey && event.key.startsWith("Arrow")) return this.onKey?.(event.key === "ArrowLeft" ? "left" : "right");
    const xs = this.plot.data[0];
    const last = xs.length - 1;
    const far = Math.max(1, Math.round(last / 10));
    const now = this.plot.cursor.idx ?? last + (event.key === "ArrowLeft" ? 1 : 0);
    const next = { ArrowLeft: now - 1, ArrowRight: now + 1, PageUp: now - far, PageDown: now + far, Home: 0, End: last }[event.key];
    const index = Math.max(0, Math.min(last, next));
    this.plot.setCursor({ left: this.plot.valToPos(xs[index], "x"), top: 1 });
    this.read(index);
    const words = this.shown.lines.map((line, number) => `${line.label} ${this.values[number].textContent}`.trim()).join(", ");
    say(byId("spoken"), `${this.at.textContent}: ${words}`);
  }

  /** What the chart shows, in a sentence. */
  describe() {
    const { lines, kind, empty } = this.shown;
    const said = lines.map((line) => {
      const good = line.y.map((y, i) => [y, i]).filter(([y]) => Number.isFinite(y));
      if (!good.length) return `${line.label || "it"} has no finite value`;
      const low = good.reduce((a, b) => (b[0] < a[0] ? b : a));
      const high = good.reduce((a, b) => (b[0] > a[0] ? b : a));
      const at = ([, i]) => `${KINDS[kind].word} ${KINDS[kind].say(line.x[i])}`;
      return `${line.label ? `${line.label}: ` : ""}last ${this.format(good.at(-1)[0])}, lowest ${this.format(low[0])} ${at(low)}, highest ${this.format(high[0])} ${at(high)}`;
    });
    this.area.setAttribute("aria-label", `${this.title}. ${said.join("; ") || empty}`);
  }

  table() {
    const { lines, kind } = this.shown;
    const xs = this.plot ? this.plot.data[0] : [];
    const every = Math.max(1, Math.ceil(xs.length / MOST_TABLE_ROWS));
    const picked = xs.filter((_, i) => i % every === 0 || i === xs.length - 1);
    const heading = { step: "Step", time: "Training time", clock: "Time" }[kind];
    return table(this.title, [heading, ...lines.map((line) => line.label || this.title)], picked.map((x) => [
      kind === "clock" ? moment(x) : KINDS[kind].say(x),
      ...lines.map((line) => {
        const at = nearest(line.x, x);
        return at < 0 ? "–" : this.format(line.y[at]);
      })]));
  }
}

/** A colour of the style sheet (#rrggbb), mostly transparent. */
function fade(hex) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  return `rgba(${r}, ${g}, ${b}, ${colour("band-alpha") || 0.2})`;
}
