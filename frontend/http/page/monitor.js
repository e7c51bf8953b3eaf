// The live half of the page: asks for /status once a second, and shows what it says.

import { ApiError, getJson } from "./api.js";
import { byId, draw, make } from "./dom.js";
import { Graph } from "./graph.js";
import { Rates, bytes, mean, percent, short, total } from "./rates.js";

const INTERVAL = 1000;
const PATIENCE = 4000;
const HISTORY = 90; // points of a small curve
const MANY = 6; // processes that fit beside the chat

export class Monitor {
  constructor(wantKey) {
    this.wantKey = wantKey;
    this.rates = new Rates();
    this.graph = new Graph(byId("graph"));
    this.tiles = new Map();
    this.last = null;
    this.timer = 0;
    this.asking = false;
    document.addEventListener("visibilitychange", () => this.ask());
    new ResizeObserver(() => this.last && this.graph.show(this.last, this.rates)).observe(byId("graph"));
  }

  async ask() {
    clearTimeout(this.timer);
    if (document.hidden || this.asking) return;
    this.asking = true;
    let again = true;
    try {
      this.show(await getJson("status", PATIENCE));
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.missed(error);
      again = error.status !== 401; // whoever gives a key asks again
    } finally {
      this.asking = false;
      if (again) this.timer = setTimeout(() => this.ask(), INTERVAL);
    }
  }

  missed(error) {
    const locked = error.status === 401;
    if (locked) this.wantKey(error.message);
    say(locked ? "key needed" : "not answering", "bad");
    byId("live-note").textContent = locked ? "" : `${error.message} ${this.last ? "This is the last picture." : ""}`;
    byId("graph").classList.toggle("stale", this.last !== null);
  }

  show(status) {
    this.last = status;
    this.rates.add(status, performance.now() / 1000);
    const ready = status.actors.every((actor) => actor.state === "ready");
    say(ready ? "live" : "recovering", ready ? "good" : "warn");
    byId("live-note").textContent = notes(status);
    byId("graph").classList.remove("stale");
    byId("main").classList.toggle("many", status.actors.length > MANY);
    this.showTiles(status.statistics);
    this.graph.show(status, this.rates);
    showTables(status, this.rates);
  }

  showTiles(statistics) {
    const generated = this.rates.total("scheduler", "generation_tokens");
    const prompts = this.rates.total("scheduler", "prompt_tokens");
    const usage = mean(statistics, "scheduler", "kv_usage");
    this.tile("Generated", short(generated), "tok/s", generated);
    this.tile("Prompts", short(prompts), "tok/s", prompts);
    const running = total(statistics, "scheduler", "running");
    const waiting = total(statistics, "scheduler", "waiting");
    this.tile("Running", short(running), waiting ? `+ ${short(waiting)} waiting` : "none waiting", running);
    this.tile("KV cache", percent(usage), hits(statistics), usage, 1);
  }

  tile(name, value, unit, number, top = 0) {
    if (!this.tiles.has(name)) this.tiles.set(name, new Tile(byId("tiles"), name));
    this.tiles.get(name).show(value, unit, number, top);
  }
}

class Tile {
  constructor(parent, name) {
    this.value = make("span", { class: "value" });
    this.unit = make("span", { class: "unit" });
    this.curve = draw("polyline", { points: "" });
    this.points = [];
    parent.append(make("div", { class: "tile" },
      make("dt", {}, name),
      make("dd", {}, this.value, " ", this.unit),
      draw("svg", { class: "curve", viewBox: `0 0 ${HISTORY - 1} 20`, preserveAspectRatio: "none", "aria-hidden": "true" }, this.curve)));
  }

  show(value, unit, number, top) {
    this.value.textContent = value;
    this.unit.textContent = unit;
    this.points.push(number ?? 0);
    if (this.points.length > HISTORY) this.points.shift();
    const most = top || Math.max(1, ...this.points);
    const start = HISTORY - this.points.length;
    this.curve.setAttribute("points",
      this.points.map((point, i) => `${start + i},${(19 - 18 * Math.min(1, point / most)).toFixed(2)}`).join(" "));
  }
}

function hits(statistics) {
  const asked = total(statistics, "scheduler", "prefix_cache_queries");
  return asked ? `${percent(total(statistics, "scheduler", "prefix_cache_hits") / asked)} prefix hits` : "";
}

function notes(status) {
  const full = status.edges
    .filter((edge) => edge.full_seconds > 0)
    .map((edge) => `${edge.name} full for ${edge.full_seconds.toFixed(1)} s: ${edge.laggards}`);
  const parked = total(status.statistics, "client", "parked");
  if (parked) full.push(`${parked} requests wait for a restart`);
  return full.join("; ");
}

function say(text, kind) {
  const pill = byId("link-state");
  if (pill.textContent !== text) pill.textContent = text;
  pill.className = `pill ${kind}`;
}

function showTables(status, rates) {
  if (!byId("tables").closest("details").open) return;
  const actors = status.actors.map((actor) => {
    const cpu = rates.cpu(actor);
    return [actor.name, actor.state, actor.pid, cpu === null ? "–" : percent(cpu), bytes(actor.rss_bytes), actor.restarts];
  });
  const edges = status.edges.map((edge) => [
    edge.name, percent(edge.used / Math.max(1, edge.capacity)), bytes(edge.capacity), `${short(rates.edge(edge.name))}/s`, edge.records]);
  byId("tables").replaceChildren(
    table(["process", "state", "pid", "CPU", "memory", "restarts"], actors),
    table(["ring", "full", "of", "messages", "in all"], edges));
}

const table = (heads, rows) =>
  make("table", {},
    make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
    make("tbody", {}, ...rows.map(([first, ...rest]) =>
      make("tr", {}, make("th", { scope: "row" }, first), ...rest.map((cell) => make("td", {}, String(cell)))))));
