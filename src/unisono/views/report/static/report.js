// Draws the charts of a report from the data in the same file.
"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const number = (value) => (typeof value === "number" ? value : null);
  const drawn = [];
  // One axis of steps for all charts, so that what stands above each other happened at the same time.
  const steps = charts.flatMap((chart) => chart.lines.flatMap((line) => [line.step[0], line.step.at(-1)]));
  const [first, last] = [Math.min(...steps), Math.max(...steps)];

  /** As many digits as tell neighbouring ticks apart. */
  function tick(value, step) {
    if (value !== 0 && (Math.abs(value) >= 1e6 || step < 1e-6)) return value.toExponential(2).replace(/\.?0+e/, "e");
    return String(Number(value.toFixed(Math.max(0, 1 - Math.floor(Math.log10(step))))));
  }

  function draw(place) {
    const chart = charts[Number(place.dataset.chart)];
    const tables = [];
    const series = [{ label: "step" }];
    const bands = [];
    for (const line of chart.lines) {
      const colour = css(`--run${line.colour % 8}`);
      const at = series.length;
      tables.push([line.step, line.high.map(number), line.low.map(number), line.mean.map(number)]);
      const edge = { label: "", stroke: "transparent", points: { show: false } };
      const dots = { show: line.step.length < 60 };
      series.push({ ...edge, label: "high" }, { ...edge, label: "low" });
      series.push({ label: line.run, stroke: colour, width: 1.5, points: dots, spanGaps: true });
      bands.push({ series: [at, at + 1], fill: `${colour}30` });
    }
    const axis = { stroke: css("--dim"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") } };
    const size = { width: Math.max(280, place.clientWidth), height: 220 };
    const plot = new uPlot(
      {
        ...size, series, bands,
        scales: { x: { time: false, range: first < last ? [first, last] : [first - 0.5, last + 0.5] } },
        axes: [axis, { ...axis, size: 78, values: (u, splits, _, __, step) => splits.map((value) => tick(value, step)) }],
        legend: { show: false },
      },
      uPlot.join(tables),
      place,
    );
    place.plot = plot;
    drawn.push([place, plot]);
  }

  for (const place of document.querySelectorAll("[data-chart]")) draw(place);
  addEventListener("resize", () => {
    for (const [place, plot] of drawn) plot.setSize({ width: Math.max(280, place.clientWidth), height: 220 });
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const [, plot] of drawn.splice(0)) plot.destroy();
    for (const place of document.querySelectorAll("[data-chart]")) draw(place);
  });
})();
