// Draws the charts of a report from the data in the same file.
"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const number = (value) => (typeof value === "number" ? value : null);
  const drawn = [];

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
        scales: { x: { time: false } },
        axes: [axis, { ...axis, size: 64 }],
        legend: { show: false },
      },
      uPlot.join(tables),
      place,
    );
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
