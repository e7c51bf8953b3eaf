// The picture of the processes: drawn anew when they are others, brought up to date when not.

import { draw } from "./dom.js";
import { BOX, layOut } from "./layout.js";
import { bytes, percent, short } from "./rates.js";

const NARROW = 620; // pixels; below, the picture goes down instead of to the right
const BAR = 46;
const QUEUES = ["running", "waiting", "open", "streams"];
const FULL = 0.75;

export class Graph {
  constructor(parent) {
    this.parent = parent;
    this.shape = "";
  }

  show(status, rates) {
    const names = status.actors.map((actor) => actor.name);
    const edges = status.edges.map((edge) => edge.name);
    const vertical = this.parent.clientWidth < NARROW;
    const shape = JSON.stringify([vertical, [...names].sort(), [...edges].sort()]);
    if (shape !== this.shape) {
      this.shape = shape;
      this.build(layOut(names, edges, vertical));
    }
    for (const actor of status.actors) this.updateBox(actor, status.statistics, rates.cpu(actor));
    const byName = new Map(status.edges.map((edge) => [edge.name, edge]));
    for (const arrow of this.arrows) updateArrow(arrow, byName, rates);
    this.svg.setAttribute("aria-label", inWords(status));
  }

  build(plan) {
    const { x, y, width, height } = plan;
    this.svg = draw("svg", { viewBox: `${x} ${y} ${width} ${height}`, role: "img" }, tip());
    this.svg.style.maxWidth = `${width}px`;
    this.svg.style.minWidth = `${Math.min(width * 0.7, 2000)}px`;
    for (const frame of plan.frames) {
      this.svg.append(
        draw("rect", { class: "frame", x: frame.x, y: frame.y, width: frame.width, height: frame.height, rx: 14 }),
        draw("text", { class: "frame-label", x: frame.x + 12, y: frame.y + 13 }, frame.label),
      );
    }
    this.svg.append(...plan.groupings.map((rect) =>
      draw("rect", { class: "grouping", x: rect.x, y: rect.y, width: rect.width, height: rect.height, rx: 18 })));
    this.arrows = plan.arrows.map((arrow) => makeArrow(arrow));
    this.svg.append(...this.arrows.map((arrow) => arrow.lines));
    this.boxes = new Map([...plan.boxes].map(([name, place]) => [name, makeBox(name, place)]));
    this.svg.append(...[...this.boxes.values()].map((box) => box.group));
    this.svg.append(...this.arrows.map((arrow) => arrow.label));
    this.parent.replaceChildren(this.svg);
  }

  updateBox(actor, statistics, cpu) {
    const box = this.boxes.get(actor.name);
    box.group.setAttribute("class", `actor ${actor.state === "ready" ? "ready" : actor.state === "dead" ? "dead" : "busy"}`);
    const queues = QUEUES.map((name) => [name, statistics[`${actor.name}.${name}`]])
      .filter(([, number]) => number)
      .map(([name, number]) => `${name} ${short(number)}`);
    const ready = actor.state === "ready";
    box.load.textContent = ready ? `CPU ${cpu === null ? "–" : percent(cpu)} · ${bytes(actor.rss_bytes)}` : actor.state;
    box.queue.textContent = queues.join(", ");
    box.restarts.textContent = actor.restarts ? `↻ ${actor.restarts}` : "";
    box.tip.textContent = `${actor.name}: ${actor.state}, process ${actor.pid}, restarted ${actor.restarts} times`;
    box.bar.setAttribute("width", (BOX.width - 28) * Math.min(1, ready ? cpu ?? 0 : 0));
  }
}

const tip = () => draw("defs", {}, draw("marker",
  { id: "tip", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto", markerUnits: "userSpaceOnUse" },
  draw("path", { d: "M0 0L8 4L0 8z", class: "tip" })));

function makeBox(name, { x, y }) {
  const text = (kind, dx, dy, said = "") => draw("text", { class: kind, x: x + dx, y: y + dy }, said);
  const box = {
    tip: draw("title"),
    load: text("load", 14, 44),
    queue: text("queue", 14, 70),
    restarts: text("restarts", BOX.width - 14, 24),
    bar: draw("rect", { class: "cpu", x: x + 14, y: y + 51, width: 0, height: 4, rx: 2 }),
  };
  box.group = draw("g", {},
    box.tip,
    draw("rect", { class: "box", x, y, width: BOX.width, height: BOX.height, rx: 12 }),
    draw("circle", { class: "state", cx: x + 18, cy: y + 19.5, r: 4.5 }),
    text("name", 30, 24, name),
    box.restarts, box.load, box.queue,
    draw("rect", { class: "track", x: x + 14, y: y + 51, width: BOX.width - 28, height: 4, rx: 2 }),
    box.bar);
  return box;
}

function makeArrow(arrow) {
  const { x, y } = arrow.label;
  const flow = draw("path", { class: "flow", d: arrow.path });
  const bar = draw("rect", { class: "fill", x: x - BAR / 2, y: y + 5, width: 0, height: 4, rx: 2 });
  const rate = draw("text", { class: "rate", x, y: y + 1 });
  const hint = draw("title");
  return {
    ...arrow, flow, bar, rate, hint,
    lines: draw("g", { class: "arrow" }, draw("path", { class: "line", d: arrow.path, "marker-end": "url(#tip)" }), flow),
    label: draw("g", { class: "ring" }, hint,
      draw("rect", { class: "plate", x: x - BAR / 2 - 6, y: y - 12, width: BAR + 12, height: 26, rx: 8 }),
      rate,
      draw("rect", { class: "track", x: x - BAR / 2, y: y + 5, width: BAR, height: 4, rx: 2 }),
      bar),
  };
}

function updateArrow(arrow, byName, rates) {
  const edges = arrow.edges.map((name) => byName.get(name));
  const fill = Math.max(...edges.map((edge) => edge.used / Math.max(1, edge.capacity)));
  const full = edges.some((edge) => edge.full_seconds > 0);
  const rate = arrow.edges.reduce((sum, name) => sum + (rates.edge(name) ?? 0), 0);
  arrow.rate.textContent = `${short(rate)}/s`;
  arrow.bar.setAttribute("width", fill > 0 ? Math.max(2, BAR * Math.min(1, fill)) : 0);
  arrow.hint.textContent = edges
    .map((edge) => `${edge.name}: ${edge.used} of ${edge.capacity} bytes, ${edge.records} messages so far`)
    .join("\n");
  const kind = full ? "full" : fill > FULL ? "filling" : "";
  arrow.lines.setAttribute("class", `arrow ${kind} ${rate > 0.5 ? "moving" : ""}`);
  arrow.label.setAttribute("class", `ring ${kind} ${rate > 0.5 ? "moving" : ""}`);
}

function inWords(status) {
  const bad = status.actors.filter((actor) => actor.state !== "ready").map((actor) => `${actor.name} ${actor.state}`);
  const full = status.edges.filter((edge) => edge.full_seconds > 0).map((edge) => edge.name);
  return `${status.actors.length} processes, ${status.edges.length} rings between them; ` +
    `${bad.length ? bad.join(", ") : "all ready"}${full.length ? `; full: ${full.join(", ")}` : ""}`;
}
