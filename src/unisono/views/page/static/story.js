// What has happened, in sentences: the header, events, problems, checkpoints, recipe and environment.

import { byId, el, icon, put, say, table } from "./dom.js";
import { bytes, clock, count, day, duration, moment, number, plain, rate, runName, whole } from "./format.js";
import { isOver } from "./model.js";

const MOST_EVENTS = 300;
const STATES = {
  starting: ["starting", "waiting"], training: ["training", "training"], paused: ["paused", "paused"], waiting: ["waiting for workers", "waiting"],
  finished: ["finished", "done"], stopped: ["stopped", "stopped"], failed: ["failed", "failed"], unknown: ["state unknown", "unknown"],
};
const HIDDEN = new Set(["step", "use", "output", "evaluation", "membership"]);

// -- header ------------------------------------------------------------------------------------------

export function drawHeader(run, connection) {
  const { overview } = run;
  const saved = Math.max(overview.checkpoint_step, run.events.findLast((event) => event.kind === "checkpoint")?.step ?? -1);
  const name = runName(overview);
  say(byId("run-name"), name);
  byId("run-name").title = plain(overview.run_dir || overview.run_id, 300);
  const [words, picture] = STATES[overview.state] ?? [plain(overview.state, 30), "unknown"];
  const pill = byId("state");
  if (pill.dataset.state !== overview.state || !pill.childElementCount) {
    pill.dataset.state = overview.state;
    put(pill, icon(picture), words);
  }
  const done = overview.step + 1;
  const part = overview.num_steps > 0 ? done / overview.num_steps : 0;
  document.title = `${overview.num_steps > 0 && !isOver(overview) ? `${Math.floor(part * 100)} % ` : ""}${name}: ${words}`;
  const bar = byId("progress");
  bar.value = Math.min(1, part);
  bar.hidden = !(overview.num_steps > 0);
  say(byId("progress-text"), overview.num_steps > 0
    ? `${whole(done)} of ${count(overview.num_steps, overview.unit)}`
    : count(done, overview.unit));
  const why = overview.reason && overview.reason !== words ? plain(overview.reason, 4000) : "";
  byId("why").hidden = !why;
  say(byId("why"), why ? `${isOver(overview) ? "It ended: " : ""}${why}` : "");
  drawTiles(overview, saved);
  drawConnection(run, connection);
}

/** Time of day, and the day if it is not today. */
function at(time) {
  if (!time) return ["–", ""];
  const isToday = new Date(time * 1000).toDateString() === new Date().toDateString();
  return [clock(time, time), isToday ? "" : day(time)];
}

function drawTiles(overview, saved) {
  const members = overview.workers.filter((worker) => worker.rank !== null).length;
  const last = overview.ended || overview.time;
  const isDone = isOver(overview);
  const tiles = [
    ["Loss", overview.loss_is || number(overview.loss), overview.epoch ? `epoch ${whole(overview.epoch)}` : ""],
    ["Samples per second", overview.samples_per_s ? rate(overview.samples_per_s) : "–", ""],
    [overview.unit === "round" ? "Round" : "Step", overview.steps_per_s ? duration(1 / overview.steps_per_s) : "–", ""],
    isDone ? ["Took", overview.started ? duration(last - overview.started) : "–", ""]
      : ["Time left", duration(overview.left_s), overview.left_s ? `until ${clock(overview.time + overview.left_s)}` : ""],
    ["Started", ...at(overview.started)],
    isDone ? ["Ended", ...at(overview.ended)]
      : ["Workers", members ? whole(members) : "–", overview.generation ? `generation ${whole(overview.generation)}` : ""],
    ["Checkpoint", saved >= 0 ? whole(saved) : "none", saved >= 0 ? `${overview.unit}s` : ""],
  ];
  for (const [name, value] of Object.entries(overview.evaluation ?? {}).slice(0, 1)) tiles.push([`${plain(name, 40)} (evaluation)`, number(value), ""]);
  const key = JSON.stringify(tiles.map(([name]) => name));
  const host = byId("tiles");
  if (host.dataset.key !== key) {
    host.dataset.key = key;
    put(host, tiles.map(([name]) => el("div", {}, el("dt", { class: "name", text: name, title: name }), el("dd", {}, el("span"), " ", el("small")))));
  }
  tiles.forEach(([, value, more], index) => {
    const [main, small] = host.children[index].querySelectorAll("dd > *");
    say(main, value);
    say(small, more);
  });
}

/** Say how new what is shown is: "live", or since when nothing has come. */
export function drawConnection(run, connection) {
  const node = byId("connection");
  const over = isOver(run.overview);
  const silent = (Date.now() - connection.pushedAt) / 1000;
  let state = "live";
  let words = over ? "complete" : "live";
  if (connection.state === "connecting") [state, words] = ["connecting", "connecting"];
  else if (connection.state !== "open" && !over) [state, words] = ["lost", "no connection"];
  else if (!over && silent > connection.patience) [state, words] = ["old", `no news for ${duration(Math.round(silent))}`];
  node.dataset.state = state;
  if (!node.firstElementChild) put(node, el("span", { class: "words" }));
  say(node.firstElementChild, words);
}

// -- events ------------------------------------------------------------------------------------------

/** An event in a sentence; of a kind that the server does not know, as it is. */
function sentenceOf({ kind, time, sentence, level, ...rest }) {
  return plain(sentence ?? `${kind}: ${rest.text ?? JSON.stringify(rest)}`, 1500);
}

export function drawEvents(run) {
  const isLoudOnly = byId("events-level").value === "warning";
  const told = run.events.length
    ? run.events.filter((event) => !HIDDEN.has(event.kind)).map((event) => [event.time, event.level ?? "info", sentenceOf(event)])
    : (run.overview?.recent ?? []).map((recent) => [recent.time, recent.level, plain(recent.text, 1500)]);
  const shown = told.filter(([, level]) => !isLoudOnly || level !== "info");
  const newest = shown.slice(-MOST_EVENTS).reverse();
  const hidden = shown.length - newest.length;
  put(byId("event-list"),
    newest.map(([time, level, text]) => el("li", { "data-level": level },
      el("time", { datetime: time ? new Date(time * 1000).toISOString() : null, title: moment(time), text: clock(time, run.overview?.time) }),
      icon({ error: "failed", warning: "warning" }[level] ?? "info"),
      el("span", { class: "text" }, level === "info" ? null : el("span", { class: "unseen", text: `${level}: ` }), text))),
    hidden > 0 ? el("li", { class: "empty", text: `${whole(hidden)} older ones are in events.jsonl` }) : null,
    newest.length ? null : el("li", { class: "empty", text: isLoudOnly ? "No warnings." : "Nothing has been reported yet." }));
}

export function drawProblems(run) {
  const problems = run.events.filter((event) => event.kind === "problem");
  byId("problems").hidden = problems.length === 0;
  put(byId("problem-list"), problems.slice(-20).reverse().map((problem) => el("li", {},
    el("span", { class: "what", text: plain(problem.problem, 60) }), ` · ${clock(problem.time, run.overview?.time)}`,
    problem.worker_id ? ` · ${plain(problem.worker_id, 40)}` : "", problem.step >= 0 ? ` · step ${whole(problem.step)}` : "",
    el("div", { class: "name", text: plain(problem.text, 4000) }),
    problem.evidence ? el("div", { class: "where" }, "Evidence: ",
      el("span", { class: "mono name", text: plain(join(run.overview?.run_dir, problem.evidence), 500) })) : null)));
}

const join = (directory, file) => (directory ? `${directory.replace(/\/$/, "")}/${file}` : file);

// -- checkpoints -------------------------------------------------------------------------------------

export function drawCheckpoints(run) {
  const told = run.events.filter((event) => String(event.kind).startsWith("checkpoint"));
  const host = byId("checkpoint-list");
  if (!told.length) {
    const { checkpoint, checkpoint_step: step } = run.overview;
    put(host, el("p", { class: "empty", text: checkpoint ? `The newest: ${plain(checkpoint, 300)}${step >= 0 ? `, after ${count(step, "step")}` : ""}` : "None has been written." }));
    return;
  }
  const columns = [...new Set(told.flatMap(Object.keys))].filter((key) => !NOT_SHOWN.has(key)).slice(0, 6);
  put(host, table("Checkpoints", ["When", ...columns.map((name) => COLUMNS[name] ?? plain(name, 40))], told.slice(-500).reverse().map((event) => [
    clock(event.time, run.overview.time), ...columns.map((key) => cell(key, event[key]))])));
}

/** By which an event is known, and what other columns and lists say. */
const NOT_SHOWN = new Set(["kind", "time", "sentence", "level", "run_id", "number", "head"]);
const COLUMNS = { step: "Steps", bytes: "Size", seconds: "Took", text: "What" };

function cell(key, value) {
  if (value === undefined || value === null) return "–";
  if (typeof value === "number") {
    if (key === "step") return whole(value);
    if (key.endsWith("bytes")) return bytes(value);
    if (key === "seconds" || key.endsWith("_s")) return duration(value);
    return number(value);
  }
  return plain(typeof value === "string" ? value : JSON.stringify(value), 300);
}

// -- recipe and environment --------------------------------------------------------------------------

export function drawFacts(run, runs) {
  const { recipe, schema, ...rest } = run.facts;
  const card = (heading, facts, empty) => el("article", { class: "card" }, el("h3", { text: heading }),
    facts.length ? el("dl", { class: "facts" }, facts.map(([name, value]) => [el("dt", { class: "name", text: plain(name, 120) }), el("dd", { text: plain(value, 1000) })]))
      : el("p", { class: "empty", text: empty }));
  put(byId("facts"), card("Recipe: what the bits depend on", flat(recipe), "It is written when the training begins."),
    card("Environment and run", flat(rest), "Nothing is known."));
  drawDifferences(runs);
  say(byId("footer"), [plain(run.overview?.run_dir, 300), plain(run.overview?.run_id, 100)].filter(Boolean).join(" · "));
}

/** What differs between several runs: of each fact, the value in each run. */
function drawDifferences(runs) {
  const host = byId("differences");
  host.hidden = runs.length < 2;
  if (runs.length < 2) return;
  const facts = runs.map((run) => new Map(flat(run.facts).filter(([name]) => !ALWAYS_OTHER.has(name))));
  const names = [...new Set(facts.flatMap((each) => [...each.keys()]))];
  const other = names.filter((name) => new Set(facts.map((each) => each.get(name))).size > 1);
  const heading = el("h3", { text: "What differs between the runs" });
  put(host, heading, other.length
    ? el("div", { class: "scroll short", tabindex: 0, role: "region", "aria-label": "What differs between the runs" },
      table("What differs between the runs", ["", ...runs.map((run) => runName(run.overview, `run ${run.index}`))],
        other.map((name) => [plain(name, 80), ...facts.map((each) => plain(each.get(name) ?? "–", 200))])))
    : el("p", { class: "empty", text: "Nothing: the runs have the same recipe, command and environment." }));
}

const ALWAYS_OTHER = new Set(["run_id", "started", "earlier"]);

/** Nested facts as [name, text] rows. */
function flat(facts, before = "") {
  if (facts === null || typeof facts !== "object") return [];
  return Object.entries(facts).flatMap(([name, value]) => {
    const label = before ? `${before} · ${name}` : name;
    if (Array.isArray(value) && value.every((each) => typeof each !== "object")) return [[label, value.join(", ") || "–"]];
    if (value !== null && typeof value === "object") return flat(value, label);
    const isTime = ["started", "ended", "time"].includes(name) && typeof value === "number" && value > 1e9;
    return [[label, value === null || value === "" ? "–" : isTime ? moment(value) : String(value)]];
  });
}

// -- banners -----------------------------------------------------------------------------------------

/** Sentences above everything: [level, text]. They are spoken when they come. */
export function drawBanners(banners) {
  const host = byId("banners");
  const key = JSON.stringify(banners);
  if (host.dataset.key === key) return;
  const words = (text) => text.replace(/\d/g, "");  // a number that grows is not read aloud again
  const before = new Set([...host.children].map((node) => words(node.textContent)));
  host.dataset.key = key;
  put(host, banners.map(([level, text]) => el("p", { class: "banner", "data-level": level }, icon(level === "info" ? "info" : "warning"), el("span", { class: "name", text }))));
  const fresh = banners.filter(([, text]) => !before.has(words(text))).map(([, text]) => text);
  if (fresh.length) say(byId("spoken"), fresh.join(" "));
}
