// Curves over steps: loss, metrics, speed, and the parts of a step; and which steps are shown.

import { Chart } from "./charts.js";
import { byId, el, put } from "./dom.js";
import { duration, mean, plain, rate, runName, short } from "./format.js";
import { dashOf, partColour, runColour } from "./theme.js";

const FIRST_METRICS = 4;
const PART = "part/";
/** Areas of so many points: more of them are a thicket. */
const MOST_STACKED = 150;
const ALWAYS = ["loss", "samples_per_s"];

export class Curves {
  /** `app` has the runs and what is shown; `zoom(first, last)` is called to show other steps. */
  constructor(app) {
    this.app = app;
    const ways = { onZoom: (first, last) => this.zoomTo(first, last), onKey: (way) => this.move(way) };
    this.ways = ways;
    this.loss = new Chart(byId("chart-loss"), { title: "Loss", height: 280, ...ways });
    this.speed = new Chart(byId("chart-speed"), {
      title: "Samples per second", format: rate, axis: short, zero: true, ...ways });
    this.parts = new Chart(byId("chart-parts"), {
      title: "Time of a step, by part", format: duration, axis: duration, zero: true, ...ways });
    this.metrics = new Map();
    this.chosen = null;
    this.listen();
  }

  // -- what is shown ---------------------------------------------------------------------------------

  listen() {
    const { app } = this;
    const on = (id, way) => byId(id).addEventListener("click", () => this.move(way));
    on("zoom-in", "in");
    on("zoom-out", "out");
    on("pan-left", "left");
    on("pan-right", "right");
    byId("zoom-reset").addEventListener("click", () => app.setRange(null));
    byId("range").addEventListener("submit", (event) => {
      event.preventDefault();
      this.typed();
    });
    for (const id of ["range-first", "range-last"]) byId(id).addEventListener("change", () => this.typed());
    byId("axis").addEventListener("change", (event) => {
      app.axis = event.target.value;
      this.draw();
    });
    byId("log-scale").addEventListener("change", (event) => {
      app.log = event.target.checked;
      this.draw();
    });
    byId("smoothing").addEventListener("input", (event) => {
      app.smoothing = Number(event.target.value) / 100;
      event.target.setAttribute("aria-valuetext", app.smoothing ? `${event.target.value} percent` : "none");
      this.draw();
    });
  }

  typed() {
    const [first, last] = ["range-first", "range-last"].map((id) => parseInt(byId(id).value.replace(/\D/g, ""), 10));
    if (Number.isFinite(first) && Number.isFinite(last)) this.app.setRange([Math.min(first, last), Math.max(first, last)]);
    else this.app.setRange(null);
  }

  /** The steps that are shown. */
  limits() {
    const { app } = this;
    if (app.range) return app.range;
    const runs = app.shownRuns();
    return [Math.min(...runs.map((run) => run.first), Infinity), Math.max(...runs.map((run) => run.last), -Infinity)];
  }

  zoomTo(first, last) {
    if (first === null) return this.app.setRange(null);
    const run = this.app.primary();
    const steps = this.app.axis === "time" ? [run.stepAt(first), run.stepAt(last)] : [first, last];
    return this.app.setRange([Math.floor(steps[0]), Math.ceil(steps[1])]);
  }

  move(way) {
    const [first, last] = this.limits();
    const width = last - first;
    if (!(width > 0)) return;
    const middle = (first + last) / 2;
    const by = { in: [middle - width / 4, middle + width / 4], out: [middle - width, middle + width],
      left: [first - width / 3, last - width / 3], right: [first + width / 3, last + width / 3] }[way];
    this.app.setRange([Math.round(by[0]), Math.round(by[1])], way === "left" || way === "right");
  }

  // -- which metrics ---------------------------------------------------------------------------------

  metricNames() {
    const names = new Set();
    for (const run of this.app.shownRuns()) {
      for (const name of run.names) if (name.startsWith("log/") || name.startsWith("evaluation/")) names.add(name);
    }
    return [...names].sort();
  }

  chosenMetrics() {
    const names = this.metricNames();
    if (this.chosen) return names.filter((name) => this.chosen.has(name));
    const first = (start) => names.filter((name) => name.startsWith(start)).slice(0, FIRST_METRICS);
    return [...first("evaluation/"), ...first("log/")].slice(0, 6);
  }

  /** Names of all curves that are drawn. */
  names() {
    const parts = this.app.primary()?.names.filter((name) => name.startsWith(PART)) ?? [];
    return [...ALWAYS, ...parts, ...this.chosenMetrics()];
  }

  drawChoice() {
    const names = this.metricNames();
    const fold = byId("metric-choice");
    fold.hidden = names.length === 0;
    const chosen = new Set(this.chosenMetrics());
    const key = JSON.stringify([names, [...chosen]]);
    if (key === this.choiceKey) return;
    this.choiceKey = key;
    const focused = document.activeElement?.dataset?.metric;
    put(byId("metric-names"), names.map((name) => el("label", { class: "check" },
      el("input", {
        type: "checkbox", checked: chosen.has(name), "data-metric": name,
        onchange: (event) => {
          this.chosen = new Set(this.chosenMetrics());
          if (event.target.checked) this.chosen.add(name);
          else this.chosen.delete(name);
          this.app.reload();
        },
      }), el("span", { class: "name", text: title(name) }))));
    if (focused !== undefined) {
      [...byId("metric-names").querySelectorAll("input")].find((input) => input.dataset.metric === focused)?.focus();
    }
  }

  // -- drawing ---------------------------------------------------------------------------------------

  draw() {
    const { app } = this;
    const limits = this.limits();
    const [first, last] = limits;
    for (const [id, step] of [["range-first", first], ["range-last", last]]) {
      if (document.activeElement !== byId(id)) byId(id).value = Number.isFinite(step) && last >= 0 ? String(step) : "";
    }
    byId("zoom-reset").disabled = !app.range;
    this.drawChoice();
    this.loss.show(this.lines("loss", true), this.options({ log: app.log, marks: this.changes() }));
    this.speed.show(this.lines("samples_per_s", true), this.options({ marks: this.changes() }));
    this.drawParts();
    this.drawMetrics();
  }

  options(more = {}) {
    const { app } = this;
    const steps = this.limits();
    const isTime = app.axis === "time";
    const limits = isTime
      ? [Math.min(...app.shownRuns().map((run) => run.secondsAt(steps[0]))), Math.max(...app.shownRuns().map((run) => run.secondsAt(steps[1])))]
      : [...steps];
    if (!isTime) limits[1] += 1;
    return { kind: app.axis, limits: limits.every(Number.isFinite) ? limits : null, ...more };
  }

  /** Lines of all shown runs for one name. */
  lines(name, isSmoothed, isPoints = false) {
    const { app } = this;
    return app.shownRuns().filter((run) => run.series.has(name)).map((run) => {
      const curve = run.series.get(name);
      const x = this.xs(run, curve.step);
      const hasBand = curve.low.some((low, i) => low !== curve.high[i]);
      const single = app.runs.length === 1;
      return {
        label: single ? "" : runName(run.overview, `run ${run.index}`),
        colour: runColour(run.index), dash: single ? undefined : dashOf(run.index),
        x, y: isSmoothed ? smooth(curve.mean, app.smoothing) : curve.mean,
        low: hasBand ? curve.low : undefined, high: hasBand ? curve.high : undefined,
        points: isPoints && x.length <= 100,
        odd: x.filter((_, i) => !Number.isFinite(curve.mean[i])),
      };
    });
  }

  /** Where another generation began: what is seen there may come from it. */
  changes() {
    const run = this.app.primary();
    const steps = (run?.events ?? []).filter((event) => event.kind === "interruption" || event.kind === "gone").map((event) => event.step);
    return this.xs(run, [...new Set(steps)].filter((step) => step > run.first && step < run.last));
  }

  xs(run, steps) {
    return this.app.axis === "time" ? steps.map((step) => run.secondsAt(step)) : steps;
  }

  drawParts() {
    const run = this.app.primary();
    const lines = [];
    if (run) {
      const names = run.names.filter((name) => name.startsWith(PART) && run.series.has(name));
      names.forEach((name, index) => {
        const curve = run.series.get(name);
        const part = name.slice(PART.length);
        if (!curve.mean.some((y) => y > 0)) return;
        lines.push({ label: part, colour: partColour(part, index), x: this.xs(run, curve.step), y: curve.mean });
      });
    }
    const length = Math.min(...lines.map((line) => line.x.length), Infinity);
    for (const line of lines) {
      const by = Math.ceil(length / MOST_STACKED);
      Object.assign(line, { x: line.x.slice(-length).filter((_, at) => at % by === 0), y: means(line.y.slice(-length), by) });
    }
    this.parts.show(lines, this.options({ stacked: true }));
  }

  drawMetrics() {
    const names = this.chosenMetrics();
    for (const [name, chart] of this.metrics) {
      if (!names.includes(name)) {
        chart.remove();
        this.metrics.delete(name);
      }
    }
    for (const name of names) {
      if (!this.metrics.has(name)) {
        const host = el("article", { class: "card" });
        byId("metric-charts").append(host);
        const chart = new Chart(host, { title: title(name), height: 170, ...this.ways });
        chart.heading.classList.add("name");
        this.metrics.set(name, chart);
      }
      const isEvaluation = name.startsWith("evaluation/");
      const lines = this.lines(name, !isEvaluation, isEvaluation);
      this.metrics.get(name).show(lines, this.options({ empty: "No value in these steps." }));
    }
  }
}

/** Means of `by` values each; they add up as the values do. */
function means(values, by) {
  const found = [];
  for (let at = 0; at < values.length; at += by) {
    found.push(mean(values.slice(at, at + by)));
  }
  return found;
}

/** What a series is called on the page. */
function title(name) {
  const [kind, ...rest] = name.split("/");
  if (kind === "log") return plain(rest.join("/"), 80);
  if (kind === "evaluation") return `${plain(rest.join("/"), 80)} (evaluation)`;
  return { samples_per_s: "samples/s", step_s: "time of a step" }[name] ?? plain(name, 80);
}

/** Exponential mean, without a bias at the beginning; what is no number stays a gap. */
export function smooth(values, weight) {
  if (!weight) return values;
  let sum = 0;
  let total = 0;
  return values.map((y) => {
    if (!Number.isFinite(y)) return y;
    sum = weight * sum + y;
    total = weight * total + 1;
    return sum / total;
  });
}
