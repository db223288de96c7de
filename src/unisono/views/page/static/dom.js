// Elements of the page. What a run says (names, errors, logs) is hostile: it becomes text nodes and never markup.

const SVG = "http://www.w3.org/2000/svg";

/** Make an element. Attributes: `class`, `text`, `onclick` ..., anything else as an attribute; null leaves it out. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name === "style") Object.assign(node.style, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined) node.append(child);
  }
  return node;
}

export const byId = (id) => document.getElementById(id);

/** Set an element's text, if it is another one: what has not changed is neither drawn nor read aloud again. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Put children into `node` in place of what it has. */
export function put(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
}

/** What the browser keeps under a name; null where that is nothing, or where it keeps nothing for pages. */
export function kept(name, place = "localStorage") {
  try {
    return window[place].getItem(name);
  } catch {
    return null;
  }
}

export function keep(name, value, place = "localStorage") {
  try {
    window[place].setItem(name, value);
  } catch { /* it holds until the page is closed */ }
}

/** The colour of a line (`dash`: and how it is drawn) or of an area, beside its name. */
export function swatch({ colour, dash }, isArea = false) {
  const drawn = dash ? (dash[0] > 4 ? "dashed" : "dotted") : "solid";
  return el("i", { class: isArea ? "key area" : "key", "aria-hidden": "true",
    style: isArea ? { background: colour } : { borderTopColor: colour, borderTopStyle: drawn } });
}

/** A small picture beside words, which say the same. */
const ICONS = {
  training: "M5 3.500v9l7.500-4.500z",
  done: "M3 8.500l3.500 3.500 6.500-7.500",
  stopped: "M4.500 4.500h7v7h-7z",
  failed: "M4 4l8 8M12 4l-8 8",
  paused: "M5.500 4v8M10.500 4v8",
  waiting: "M8 4v4.500l3 1.500M8 1.800a6.200 6.200 0 1 0 .01 0",
  unknown: "M6 6a2 2 0 1 1 2.800 1.800c-.6.300-.8.700-.8 1.400M8 11.800v.01",
  warning: "M8 2.500l6 10.500H2zM8 6.500v3M8 11.300v.01",
  info: "M8 6.200a1.800 1.800 0 1 0 .01 0",
  sun: "M8 5a3 3 0 1 0 .01 0M8 1v1.500M8 13.500V15M1 8h1.500M13.500 8H15M3 3l1 1M12 12l1 1M3 13l1-1M12 4l1-1",
  moon: "M13 9.500A5.500 5.500 0 0 1 6.500 3a5.500 5.500 0 1 0 6.500 6.500z",
  auto: "M8 2a6 6 0 1 0 .01 0M8 2v12",
};
const SOLID = new Set(["training", "stopped", "info"]);

export function icon(name) {
  const solid = SOLID.has(name);
  return svg("svg", { class: "glyph", viewBox: "0 0 16 16", width: 14, height: 14, "aria-hidden": "true" },
    svg("path", {
      d: ICONS[name] ?? ICONS.unknown, fill: solid ? "currentColor" : "none", stroke: solid ? "none" : "currentColor",
      "stroke-width": 1.8, "stroke-linecap": "round", "stroke-linejoin": "round",
    }));
}

/** Make a table: `columns` are headings, `rows` lists of text or nodes; the first cell of a row is its heading. */
export function table(caption, columns, rows) {
  return el("table", { class: "plain" },
    el("caption", { class: "unseen", text: caption }),
    el("thead", {}, el("tr", {}, columns.map((column) => el("th", { scope: "col", text: column })))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, index) =>
      index ? el("td", {}, cell) : el("th", { scope: "row" }, cell))))));
}

/** Make a "show as table" fold whose table is only made when it is open. */
export function tableFold(label, make) {
  const inside = el("div", { class: "scroll short", tabindex: 0, role: "region", "aria-label": label });
  const fold = el("details", { class: "fold" }, el("summary", { text: label }), inside);
  fold.refresh = () => {
    if (fold.open) put(inside, make());
  };
  fold.addEventListener("toggle", fold.refresh);
  return fold;
}
