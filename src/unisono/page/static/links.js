// The links between workers that are busy longest: a slow one makes every step longer.

import { byId, el, put, table } from "./dom.js";
import { bytes, count, duration, percent, plain } from "./format.js";

const MOST = 10;

export function drawLinks(run) {
  const links = busiest(run.times);
  const host = byId("links");
  host.hidden = !links.length;
  if (!links.length) return;
  const shown = links.slice(0, MOST);
  const longest = shown[0].seconds;
  put(host,
    el("h3", { text: links.length > MOST ? `The ${MOST} busiest of ${count(links.length, "link")}, in the steps that are shown` : "Busiest links, in the steps that are shown" }),
    el("div", { class: "scroll short", tabindex: 0, role: "region", "aria-label": "Busiest links" },
      table("Busiest links", ["From", "To", "Busy in a step", "Sent in a step", "Speed", "Busiest in"], shown.map((link) => [
        plain(link.from, 40), plain(link.to, 40), bar(link.seconds / longest, duration(link.seconds)),
        bytes(link.bytes), link.seconds > 0 ? `${bytes(link.bytes / link.seconds)}/s` : "–", percent(link.share)]))));
}

/** Of each link that a worker has named as its busiest: means of its steps, the longest first. */
function busiest(times) {
  const found = new Map();
  const points = times?.link_to?.length ?? 0;
  for (let point = 0; point < points; point++) {
    times.workers.forEach((from, at) => {
      const to = times.link_to[point]?.[at];
      const seconds = times.values.link_s?.[point]?.[at];
      if (!to || !(seconds > 0)) return;
      const key = JSON.stringify([from, to]);
      const link = found.get(key) ?? { from, to, seconds: 0, bytes: 0, share: 0 };
      link.seconds += seconds;
      link.bytes += times.values.link_bytes?.[point]?.[at] ?? 0;
      link.share += 1;
      found.set(key, link);
    });
  }
  const links = [...found.values()];
  for (const link of links) {
    link.seconds /= link.share;
    link.bytes /= link.share;
    link.share /= points;
  }
  return links.sort((a, b) => b.seconds - a.seconds);
}

function bar(part, text) {
  const level = el("b");
  level.style.width = `${part * 100}%`;
  return el("span", { class: "meter" }, el("i", { "aria-hidden": "true" }, level), text);
}
