// Numbers and times as text, and sums and means of numbers. All pure.

const thousands = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export const whole = (value) => (Number.isFinite(value) ? thousands.format(value) : "–");

/** A number with about four digits that count. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return minus(thousands.format(value));
  if (size >= 1e6 || size < 1e-3) return minus(value.toExponential(2).replace("e+", "e"));
  if (size >= 1000) return minus(thousands.format(value));
  return minus(size >= 100 ? value.toFixed(1) : size >= 1 ? value.toFixed(3) : value.toPrecision(3));
}

/** So many in a second. */
export const rate = (value) => (value >= 100 ? whole(value) : number(value));

const minus = (text) => text.replace(/-(?=[\d∞])/, "−");

/** A number on an axis: no more digits than tell neighbours apart. */
export function tick(value, step) {
  if (value === null || value === undefined) return "";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e4 || step >= 1000) return short(value);
  const apart = step || size;
  if (size < 1e-3 || (size < 1e-2 && apart < 1e-4)) {
    const power = (x) => Math.floor(Math.log10(x) + 1e-9);
    const last = apart / 10 ** power(apart);
    const digits = power(size) - power(apart) + (Math.abs(last - Math.round(last)) > 1e-6 ? 1 : 0);
    return minus(value.toExponential(Math.max(0, Math.min(6, digits))));
  }
  let digits = Math.max(0, Math.ceil(-Math.log10(apart) - 1e-9));
  if (Math.abs(apart * 10 ** digits - Math.round(apart * 10 ** digits)) > 1e-6) digits += 1;
  digits = Math.min(6, digits);
  return minus(value.toFixed(digits));
}

export function short(value) {
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit) return minus(`${trim(value / unit)}${letter}`);
  }
  return minus(trim(value));
}

const trim = (value) => String(Number(value.toPrecision(3)));

export function bytes(value) {
  if (!Number.isFinite(value)) return "–";
  for (const [unit, name] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (value >= unit) return `${(value / unit).toFixed(value >= 100 * unit ? 0 : 1)} ${name}`;
  }
  return `${Math.round(value)} B`;
}

/** Seconds, as people say them. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 0) return `−${duration(-seconds)}`;
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${(seconds * 1000).toPrecision(seconds < 0.1 ? 2 : 3).replace(/\.0$/, "")} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${pad(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${pad(minutes % 60)} min`;
  return `${Math.floor(hours / 24)} d ${pad(hours % 24)} h`;
}

const pad = (value) => String(Math.floor(value)).padStart(2, "0");

export function percent(part) {
  if (!Number.isFinite(part)) return "–";
  const value = part * 100;
  return `${value > 0 && value < 9.95 ? value.toFixed(1) : Math.round(value)} %`;
}

const timeOnly = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const hourOnly = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const dayOnly = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const dayTime = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
const full = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "long" });

/** Time of day; with the day if that is another one than `near` (seconds since 1970). */
export function clock(time, near = Date.now() / 1000) {
  if (!time) return "–";
  const date = new Date(time * 1000);
  const isSame = date.toDateString() === new Date(near * 1000).toDateString();
  return (isSame ? timeOnly : dayTime).format(date);
}

/** Time of day or day on an axis whose ticks are `step` seconds apart. */
export function clockTick(time, step) {
  const date = new Date(time * 1000);
  return (step < 60 ? timeOnly : step < 86400 ? hourOnly : dayOnly).format(date);
}

export const day = (time) => dayOnly.format(new Date(time * 1000));

export const moment = (time) => (time ? full.format(new Date(time * 1000)) : "unknown");

/** Text of somebody else: without what moves or hides other text, and not endless. */
export function plain(text, most = 2000) {
  const clean = String(text ?? "").replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, "\ufffd");
  if (clean.length <= most) return clean;
  return most < 500 ? `${clean.slice(0, most - 1)}…` : `${clean.slice(0, most)} … (${whole(clean.length)} characters)`;
}

export const count = (number, word) => `${whole(number)} ${word}${number === 1 ? "" : "s"}`;

export const sum = (values) => values.reduce((a, b) => a + b, 0);

/** The mean of the finite values; NaN: there is none. */
export function mean(values) {
  const good = values.filter(Number.isFinite);
  return sum(good) / good.length;
}

/** A value that JSON writes as a string because it is no finite number, or a number. */
export function value(given) {
  if (typeof given === "number") return given;
  return { nan: NaN, inf: Infinity, "-inf": -Infinity }[given] ?? NaN;
}

/** Name of a run, as people call it. */
export function runName(overview, fallback = "run") {
  const folder = String(overview?.run_dir ?? "").split("/").filter(Boolean).pop();
  return plain(folder || overview?.run_id || fallback, 120);
}
