// What the machines use: now, in rows; and over time.

import { Chart } from "./charts.js";
import { byId, el, put, table } from "./dom.js";
import { bytes, mean, percent, plain, short, sum } from "./format.js";
import { dashOf, runColour } from "./theme.js";

const MOST_LINES = 8;

const CHARTS = [
  { title: "Processor", format: percent, most: 1, of: (m) => divided(m.cores, m.num_cores) },
  { title: "Memory", format: percent, most: 1, of: (m) => divided(m.memory_bytes, m.memory_total_bytes) },
  { title: "GPUs", format: percent, most: 1, of: (m) => m.gpu_utilization?.map((gpus) => mean(gpus ?? [])) },
  { title: "GPU memory", format: percent, most: 1, of: (m) => m.gpu_memory_bytes?.map((gpus) => (gpus ? sum(gpus) / sum(m.gpu_memory_total_bytes ?? []) : NaN)) },
  { title: "Network, sent", format: (y) => `${bytes(y)}/s`, axis: (y) => `${short(y).replace(/[kMGT]?$/, " $&")}B/s`, of: (m) => m.sent_bytes_per_s },
  { title: "Network, received", format: (y) => `${bytes(y)}/s`, axis: (y) => `${short(y).replace(/[kMGT]?$/, " $&")}B/s`, of: (m) => m.received_bytes_per_s },
];

/** Values of a column by those of another, which may be one number for all. */
function divided(values, all) {
  return values?.map((value, at) => (value === null ? NaN : value / (Array.isArray(all) ? all[at] : all)));
}

export class Machines {
  constructor(app) {
    this.app = app;
    this.charts = new Map();
  }

  draw() {
    const run = this.app.primary();
    if (!run?.overview) return;
    this.drawRows(run);
    this.drawCharts(run.use);
  }

  drawRows(run) {
    const machines = run.overview.machines?.length ? run.overview.machines : last(run.use);
    if (!machines.length) {
      put(byId("machine-rows"), el("p", { class: "empty", text: "What the machines use was not measured." }));
      return;
    }
    const hasGpu = machines.some((machine) => machine.gpus?.length);
    const columns = ["Machine", "Processor", "Memory", ...(hasGpu ? ["GPU", "GPU memory"] : []), "Sends", "Receives", "Workers"];
    const made = table("Machines, and what they use now", columns, machines.map((machine) => [
      plain(machine.host, 80),
      meter(machine.cores / machine.num_cores, `${machine.cores?.toFixed(1)} of ${machine.num_cores}`),
      meter(machine.memory_bytes / machine.memory_total_bytes, bytes(machine.memory_bytes)),
      ...(hasGpu ? [
        machine.gpus?.length ? meter(mean(machine.gpus.map((gpu) => gpu.utilization)), `${machine.gpus.length} GPU`) : "–",
        machine.gpus?.length ? meter(mean(machine.gpus.map((gpu) => gpu.memory_bytes / gpu.memory_total_bytes)),
          bytes(sum(machine.gpus.map((gpu) => gpu.memory_bytes)))) : "–"] : []),
      `${bytes(machine.sent_bytes_per_s)}/s`, `${bytes(machine.received_bytes_per_s)}/s`,
      String(Object.keys(machine.workers ?? {}).length || "–")]));
    put(byId("machine-rows"), el("div", { class: "scroll short", tabindex: 0, role: "region", "aria-labelledby": "machines-title" }, made));
  }

  drawCharts(use) {
    const hosts = Object.entries(use?.machines ?? {});
    const times = use?.time ?? [];
    for (const kind of CHARTS) {
      const found = hosts.map(([host, machine]) => [host, kind.of(machine)]).filter(([, values]) => values?.some(Number.isFinite));
      if (!found.length) {
        this.charts.get(kind.title)?.remove();
        this.charts.delete(kind.title);
        continue;
      }
      const most = found.sort((a, b) => peak(b[1]) - peak(a[1])).slice(0, MOST_LINES).sort((a, b) => a[0].localeCompare(b[0], "en", { numeric: true }));
      const order = hosts.map(([host]) => host);
      if (!this.charts.has(kind.title)) {
        const host = el("article", { class: "card" });
        byId("machine-charts").append(host);
        this.charts.set(kind.title, new Chart(host, {
          title: kind.title, height: 140, format: kind.format, zero: true, most: kind.most ?? null, axis: kind.axis ?? kind.format }));
      }
      this.charts.get(kind.title).show(most.map(([host, values]) => ({
        label: plain(host, 60), colour: runColour(order.indexOf(host)), dash: dashOf(Math.floor(order.indexOf(host) / 8)),
        x: times, y: values.map((value) => value ?? NaN) })), { kind: "clock" });
      this.charts.get(kind.title).heading.textContent = found.length > MOST_LINES
        ? `${kind.title} (the ${MOST_LINES} highest of ${found.length})` : kind.title;
    }
  }
}

/** The last that is known of each machine. */
function last(use) {
  return Object.entries(use?.machines ?? {}).map(([host, columns]) => {
    const newest = Object.fromEntries(Object.entries(columns).map(([name, values]) =>
      [name, Array.isArray(values) && !name.endsWith("_total_bytes") ? values.findLast((value) => value !== null && value !== undefined) : values]));
    const gpus = (newest.gpu_utilization ?? []).map((utilization, at) => ({
      utilization, memory_bytes: newest.gpu_memory_bytes?.[at] ?? 0, memory_total_bytes: newest.gpu_memory_total_bytes?.[at] ?? NaN }));
    return { ...newest, host, gpus, workers: newest.worker_cores ?? {} };
  });
}

const peak = (values) => values.reduce((most, value) => (Number.isFinite(value) && value > most ? value : most), -Infinity);

function meter(part, text) {
  const level = el("b", { style: { width: `${Math.max(0, Math.min(1, part || 0)) * 100}%` } });
  return el("span", { class: "meter" }, el("i", { "aria-hidden": "true" }, level), percent(part), el("span", { class: "more soft", text }));
}
