// Light, dark, or as the system has it.

import { byId, icon, keep, kept, put } from "./dom.js";

const KEY = "unisono.theme";
const NEXT = { auto: "light", light: "dark", dark: "auto" };
const WORDS = { auto: "as the system has it", light: "light", dark: "dark" };
const system = matchMedia("(prefers-color-scheme: dark)");

let chosen = kept(KEY) in NEXT ? kept(KEY) : "auto";
let onChange = () => {};

function apply() {
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  const button = byId("theme");
  const label = `Colours: ${WORDS[chosen]}. Change to ${WORDS[NEXT[chosen]]}`;
  button.setAttribute("aria-label", label);
  button.title = `${label} (t)`;
  put(button, icon({ auto: "auto", light: "sun", dark: "moon" }[chosen]));
  onChange();
}

const isDark = () => chosen === "dark" || (chosen === "auto" && system.matches);

export function nextTheme() {
  chosen = NEXT[chosen];
  keep(KEY, chosen);
  apply();
}

export function startTheme(changed) {
  system.addEventListener("change", apply);
  byId("theme").addEventListener("click", nextTheme);
  apply();
  onChange = changed;
}

/** Value of a colour of the style sheet, as it is now. */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const PARTS = new Set(["compute", "data", "exchange", "network", "waiting", "update", "other"]);
export const isPart = (name) => PARTS.has(name);

/** Colour of a part of a step; a part that this version does not know has one of the runs' colours. */
export const partColour = (part, index) => colour(isPart(part) ? `part-${part}` : `run-${index % 8}`);
export const runColour = (index) => colour(`run-${index % 8}`);

const DASHES = [undefined, [8, 4], [2, 3], [12, 3, 2, 3]];
export const dashOf = (index) => DASHES[index % DASHES.length];
