// Questions and answers over one WebSocket, which comes back by itself when it was lost.

import { keep, kept } from "./dom.js";

const WRONG_TOKEN = 4401;
const SLOWEST_RETRY_S = 15;
const PATIENCE_S = 60;
const KEY = "unisono.token";

/** The token that the page was opened with (`#token=...`). It leaves the address bar, and stays with this tab. */
function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given === null) return kept(KEY, "sessionStorage") ?? "";
  keep(KEY, given, "sessionStorage");  // where storage is turned off, a reload needs the link again
  history.replaceState(null, "", location.pathname + location.search);
  return given;
}

export class Connection {
  /**
   * `onPush(message)` gets what is told unasked; `onState(state, retryAt)` says "connecting", "open", "lost" or
   * "refused"; `onOpen()` comes after each (re)connection.
   */
  constructor({ onPush, onState, onOpen }) {
    Object.assign(this, { onPush, onState, onOpen });
    this.token = takeToken();
    this.waiting = new Map();
    this.nextId = 1;
    this.failures = 0;
    this.open();
    addEventListener("online", () => this.retryNow());
    document.addEventListener("visibilitychange", () => document.hidden || this.retryNow());
  }

  open() {
    this.timer = null;
    this.onState("connecting");
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    const query = this.token ? `?token=${encodeURIComponent(this.token)}` : "";
    const socket = new WebSocket(`${scheme}://${location.host}/watch${query}`);
    this.socket = socket;
    socket.onopen = () => {
      this.failures = 0;
      this.onState("open");
      this.onOpen();
    };
    socket.onmessage = (event) => this.take(event.data);
    socket.onclose = (event) => this.lose(event.code);
  }

  /** Ask a question; gives what it is answered, or throws what was wrong with it. */
  ask(get, more = {}) {
    return new Promise((resolve, reject) => {
      if (this.socket.readyState !== WebSocket.OPEN) {
        reject(new Error("there is no connection"));
        return;
      }
      const id = this.nextId++;
      const timer = setTimeout(() => this.settle(id, null, new Error(`no answer within ${PATIENCE_S} s`)), PATIENCE_S * 1000);
      this.waiting.set(id, { get, resolve, reject, timer });
      this.socket.send(JSON.stringify({ id, get, ...more }));
    });
  }

  retryNow() {
    if (this.timer !== null) {
      clearTimeout(this.timer);
      this.open();
    }
  }

  take(text) {
    let message;
    try {
      message = JSON.parse(text);
    } catch {
      return;
    }
    if (message.id === undefined || message.id === null) this.onPush(message);
    else this.settle(message.id, message);
  }

  settle(id, message, error) {
    const asked = this.waiting.get(id);
    if (!asked) return;
    this.waiting.delete(id);
    clearTimeout(asked.timer);
    if (error) asked.reject(error);
    else if (message.error !== undefined) asked.reject(new Error(String(message.error)));
    else asked.resolve(message[asked.get]);
  }

  lose(code) {
    for (const id of [...this.waiting.keys()]) this.settle(id, null, new Error("the connection was lost"));
    if (code === WRONG_TOKEN) {
      this.onState("refused");
      return;
    }
    const wait = Math.min(SLOWEST_RETRY_S, 2 ** Math.min(this.failures, 4)) * (0.75 + Math.random() / 2);
    this.failures += 1;
    this.onState("lost", Date.now() + wait * 1000);
    this.timer = setTimeout(() => this.open(), wait * 1000);
  }
}
