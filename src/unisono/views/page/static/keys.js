// Keys. Single keys can be turned off: some people speak to their computer, and each letter would be a command.

import { byId, el, keep, kept, put } from "./dom.js";

const KEY = "unisono.keys";

/** `actions`: [key, what it does in words, function]. */
export function startKeys(actions) {
  const box = byId("keys-on");
  box.checked = kept(KEY) !== "off";
  box.addEventListener("change", () => keep(KEY, box.checked ? "on" : "off"));
  const help = byId("help");
  const open = () => help.open || help.showModal();
  byId("help-open").addEventListener("click", open);
  const all = [["?", "this help", open], ...actions];
  put(byId("key-list"),
    all.map(([key, words]) => [el("dt", {}, el("kbd", { text: key })), el("dd", { text: words })]),
    [["← →", "on a chart: read the values, point by point"], ["⇧← ⇧→", "on a chart: earlier, later steps"], ["Tab", "to the next chart or control"]]
      .map(([key, words]) => [el("dt", {}, el("kbd", { text: key })), el("dd", { text: words })]));
  document.addEventListener("keydown", (event) => {
    if (!box.checked || event.ctrlKey || event.metaKey || event.altKey || help.open) return;
    if (event.target.closest?.("input:not([type=checkbox]), select, textarea, [contenteditable]")) return;
    const found = all.find(([key]) => key === event.key);
    if (!found) return;
    event.preventDefault();
    found[2]();
  });
}
