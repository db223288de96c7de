// The page: one connection, the runs that it tells of, and what draws them.

import { charts, redraw } from "./charts.js";
import { Curves } from "./curves.js";
import { byId, el, put, say, swatch } from "./dom.js";
import { clock, duration, plain, runName } from "./format.js";
import { startKeys } from "./keys.js";
import { Machines } from "./machines.js";
import { Run, isOver } from "./model.js";
import { Connection } from "./socket.js";
import { drawBanners, drawCheckpoints, drawConnection, drawEvents, drawFacts, drawHeader, drawProblems } from "./story.js";
import { Timeline } from "./timeline.js";
import { dashOf, nextTheme, runColour, startTheme } from "./theme.js";
import { Workers } from "./workers.js";

const OLD_S = 5;
const STILL_S = 60;
const MOVED_S = 30;

class App {
  constructor() {
    this.runs = [];
    this.chosen = 0;
    this.range = null;
    this.axis = "step";
    this.log = false;
    this.smoothing = 0;
    this.dirty = new Set();
    this.link = { state: "connecting", retryAt: 0, pushedAt: Date.now(), patience: OLD_S, problem: "" };
    this.asked = 0;
    startTheme(() => {
      redraw();
      this.touch("overview", "series", "times", "use");
    });
    this.curves = new Curves(this);
    this.workers = new Workers(this);
    this.timeline = new Timeline(this);
    this.machines = new Machines(this);
    this.connection = new Connection({
      onPush: (message) => this.push(message),
      onState: (state, retryAt) => this.connectionIs(state, retryAt),
      onOpen: () => this.load(),
    });
    byId("events-level").addEventListener("change", () => this.touch("events"));
    setInterval(() => this.second(), 1000);
    this.startNavigation();
    startKeys([
      ["t", "light, dark, or as the system has it", nextTheme],
      ["l", "log scale of the loss", () => byId("log-scale").click()],
      ["+", "look closer", () => this.curves.move("in")],
      ["-", "see more steps", () => this.curves.move("out")],
      ["0", "the whole run", () => this.setRange(null)],
      ["[", "earlier steps", () => this.curves.move("left")],
      ["]", "later steps", () => this.curves.move("right")],
      ...[...document.querySelectorAll(".sections a")].map((link, index) =>
        [String(index + 1), `to ${link.textContent}`, () => this.goTo(link.hash)]),
    ]);
  }

  primary() {
    return this.runs[this.chosen];
  }

  shownRuns() {
    return this.runs.filter((run) => run.isShown && run.overview);
  }

  // -- what is asked ---------------------------------------------------------------------------------

  async load() {
    try {
      const told = await this.connection.ask("runs");
      this.link.pushedAt = Date.now();
      if (told.length !== this.runs.length) {
        this.runs = told.map((_, index) => new Run(index, this.connection, (what) => this.touch(what)));
        this.chosen = Math.min(this.chosen, this.runs.length - 1);
      }
      const loading = this.runs.map((run) => run.load().then(() => run, (error) => {
        run.error = error.message;
        throw error;
      }));
      await Promise.allSettled(loading);
      this.link.problem = this.runs.find((run) => run.error)?.error ?? "";
      await this.loadPrimary();
      const isLive = !this.runs.every((each) => isOver(each.overview));
      byId("workers-of").value = isLive ? "now" : "range";
      this.touch("times", "events");
      performance.mark("unisono-loaded");
    } catch (error) {
      this.link.problem = error.message;
      this.touch("overview");
    }
  }

  /** Ask for the curves of what is shown, and for all else of the run that has the details. */
  async loadPrimary() {
    await this.reload();
    const run = this.primary();
    await Promise.allSettled([run.loadTimes(this.range), run.loadUse(), run.loadEvents()]);
  }

  /** Ask for the curves of what is shown. */
  async reload() {
    const number = ++this.asked;
    const names = this.curves.names();
    document.body.setAttribute("aria-busy", "true");
    try {
      await Promise.all(this.runs.filter((run) => run.overview).map((run) => run.loadSeries(names, this.range, () => number === this.asked)));
      this.link.problem = "";
    } catch (error) {
      this.link.problem = error.message;
    }
    if (number === this.asked) document.body.removeAttribute("aria-busy");
    this.touch("series");
  }

  /** Show other steps; null: the whole run. `keepWidth`: at an end of the run, move no further. */
  setRange(range, keepWidth = false) {
    const first = Math.min(...this.runs.map((run) => run.first));
    const last = Math.max(...this.runs.map((run) => run.last));
    if (range && last > first) {
      let [from, to] = range;
      if (keepWidth) {
        const by = Math.max(0, first - from) - Math.max(0, to - last);
        [from, to] = [from + by, to + by];
      }
      from = Math.max(first, Math.min(from, last - 1));
      to = Math.min(last, Math.max(to, from + 1));
      range = from <= first && to >= last ? null : [from, to];
    } else {
      range = null;
    }
    if (JSON.stringify(range) === JSON.stringify(this.range)) return;
    this.range = range;
    this.touch("series");
    clearTimeout(this.zooming);
    this.zooming = setTimeout(async () => {
      await this.reload();
      await this.primary()?.loadTimes(this.range).catch(() => {});
    }, 120);
    say(byId("spoken"), range ? `Steps ${range[0]} to ${range[1]} are shown` : "The whole run is shown");
  }

  push(message) {
    this.link.pushedAt = Date.now();
    const run = this.runs[message.run ?? 0];
    if (!run?.overview) return;
    const before = run.overview.state;
    run.takePush(message);
    if (run === this.primary() && run.overview.state !== before) {
      say(byId("spoken"), `The run is ${run.overview.state} now. ${plain(run.overview.reason, 300)}`);
    }
    run.follow(this.curves.names(), this.range).then(() => {
      if (!run.failures) this.link.problem = "";
    }, (error) => {
      if (this.link.state === "open") this.link.problem = error.message;
    });
  }

  connectionIs(state, retryAt = 0) {
    Object.assign(this.link, { state, retryAt });
    this.touch("overview");
  }

  // -- what is drawn ---------------------------------------------------------------------------------

  touch(...what) {
    what.forEach((each) => this.dirty.add(each));
    if (this.drawing) return;
    this.drawing = true;
    const draw = () => {
      this.drawing = false;
      this.draw();
    };
    if (document.hidden) setTimeout(draw, 1000);
    else requestAnimationFrame(draw);
  }

  draw() {
    const dirty = this.dirty;
    this.dirty = new Set();
    const run = this.primary();
    this.drawBanners();
    if (!run?.overview) return;
    if (dirty.has("overview")) {
      drawHeader(run, this.link);
      this.drawRuns();
      this.machines.drawRows(run);
    }
    if (dirty.has("facts")) drawFacts(run, this.runs.filter((each) => each.overview));
    if (dirty.has("series") || dirty.has("events")) this.curves.draw();
    if (dirty.has("overview") || dirty.has("times")) this.workers.draw(dirty.has("times"));
    if (dirty.has("use")) this.machines.draw();
    if (dirty.has("events")) {
      drawHeader(run, this.link);
      drawEvents(run);
      drawProblems(run);
    }
    if (dirty.has("events") || dirty.has("overview")) drawCheckpoints(run);
    if (dirty.has("events") || dirty.has("times") || (dirty.has("overview") && Date.now() - (this.timedAt ?? 0) > 5000)) {
      this.timedAt = Date.now();
      this.timeline.draw();
    }
    if (dirty.has("series") && run.series.size && !this.isMarked) {
      this.isMarked = true;
      performance.mark("unisono-drawn");
    }
  }

  drawBanners() {
    const { link } = this;
    const run = this.primary();
    const banners = [];
    if (link.state === "refused") {
      banners.push(["error", "The run's token is missing or wrong. Open the page with the whole link that the run has printed, with what stands behind #."]);
    } else if (link.state === "lost" && isOver(run?.overview)) {
      const again = run.overview.run_dir ? ` unisono watch ${run.overview.run_dir} --web opens it again.` : "";
      banners.push(["info", `The run is over, and its head with it: what is shown stays.${plain(again, 500)}`]);
    } else if (link.state === "lost") {
      const shown = run?.overview ? ` What is shown is from ${clock(link.pushedAt / 1000)}.` : "";
      const isLong = Date.now() - link.pushedAt > MOVED_S * 1000 && run?.overview?.run_dir;
      const moved = isLong ? ` If the head has moved, unisono watch ${plain(run.overview.run_dir, 300)} --web finds it.` : "";
      banners.push(["warning", `The run's head cannot be reached; the page tries again by itself.${shown}${moved}`]);
    } else if (link.problem) {
      banners.push(["warning", plain(link.problem, 500)]);
    }
    for (const each of this.runs) {
      const of = this.runs.length > 1 ? `${runName(each.overview, `run ${each.index}`)}: ` : "";
      if (each.error && each.error !== link.problem) banners.push(["warning", of + plain(each.error, 500)]);
      for (const note of each.notes.slice(0, 5)) banners.push(["info", of + plain(note, 500)]);
    }
    const { overview } = run ?? {};
    if (link.state === "open" && overview && !isOver(overview)) {
      const still = (Date.now() - run.steppedAt) / 1000;
      const usual = overview.steps_per_s ? 20 / overview.steps_per_s : 0;
      if (overview.state === "training" && run.steppedAt && still > Math.max(STILL_S, usual)) {
        banners.push(["warning", `No step has been finished for ${duration(Math.floor(still / 10) * 10)}.`]);
      }
    }
    drawBanners(banners);
  }

  second() {
    if (this.link.state === "lost" || this.dirty.size) this.touch("overview");
    const run = this.primary();
    if (!run?.overview) return;
    drawConnection(run, this.link);
    this.drawBanners();
  }

  drawRuns() {
    byId("runs").hidden = this.runs.length < 2;
    if (this.runs.length < 2) return;
    const key = JSON.stringify(this.runs.map((run) => [runName(run.overview), run.overview?.state, run.isShown, run.index === this.chosen, runColour(run.index)]));
    if (byId("run-list").dataset.key === key) return;
    byId("run-list").dataset.key = key;
    const focused = document.activeElement?.id;
    put(byId("run-list"), this.runs.map((run) => {
      const box = el("input", { type: "checkbox", checked: run.isShown, id: `run-shown-${run.index}`, onchange: (event) => {
        run.isShown = event.target.checked;
        this.touch("overview", "series");
      } });
      const name = runName(run.overview, `run ${run.index}`);
      return el("div", {},
        el("label", { class: "check" }, box, swatch({ colour: runColour(run.index), dash: dashOf(run.index) }), el("span", { class: "name", text: name })),
        el("span", { class: "soft", text: plain(run.overview?.state ?? "unreadable", 30) }),
        el("button", { type: "button", id: `run-chosen-${run.index}`, "aria-pressed": run.index === this.chosen ? "true" : "false",
          "aria-label": `Show details of ${name}`, onclick: () => this.choose(run.index) }, "Details"));
    }));
    if (focused?.startsWith("run-")) byId(focused)?.focus();
  }

  async choose(index) {
    this.chosen = index;
    this.touch("overview", "facts", "series", "times", "use", "events");
    await this.loadPrimary();
  }

  goTo(hash) {
    const section = document.querySelector(hash);
    section.scrollIntoView();
    const heading = section.querySelector("h2");
    heading.tabIndex = -1;
    heading.focus({ preventScroll: true });
  }

  /** Mark the section that is read, in the navigation. */
  startNavigation() {
    const links = [...document.querySelectorAll(".sections a")];
    const seen = new Map();
    const watch = new IntersectionObserver((entries) => {
      for (const entry of entries) seen.set(entry.target.id, entry.isIntersecting);
      const first = links.find((link) => seen.get(link.hash.slice(1)));
      for (const link of links) {
        if (link === first) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
      }
    }, { rootMargin: "-110px 0px -55% 0px" });
    for (const link of links) {
      watch.observe(document.querySelector(link.hash));
      link.addEventListener("click", (event) => {
        event.preventDefault();
        this.goTo(link.hash);
      });
    }
  }
}

const app = new App();
/** For tests and for the curious: what the page holds and has drawn. */
window.unisono = { app, charts };
