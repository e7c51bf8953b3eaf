// Where everything stands in the picture of the processes. Pure: names in, numbers out.
//
// The pipeline is a ring, and is drawn as one: clients, tokenizers to one side and detokenizers to
// the other, schedulers, workers. "Along" is the axis from client to worker (down on a narrow
// screen, to the right on a wide one), "across" the other.

export const BOX = { width: 164, height: 78 };
const GAP = 18;
const PAD = 16; // between an engine's frame and what is in it
const INSET = 8; // likewise, between several of a kind and the line around them
const RANKS = { client: 0, tokenizer: 1, detokenizer: 3, scheduler: 4, worker: 5 };
const OTHERS = 2;
const FEW = 2; // engines that have arrows of their own
const ENGINES = "engines";

export const kindOf = (name) => name.split(".")[0];
const rankOf = (kind) => RANKS[kind] ?? OTHERS;
const indexOf = (name) => Number(name.split(".")[1] || 0);

export function layOut(names, edges, vertical) {
  const groups = groupsOf(names, edges);
  const place = new Placer(vertical);
  const columns = [
    groups.filter((group) => group.rank === 0),
    groups.filter((group) => group.rank > 0 && group.rank < RANKS.scheduler),
  ].filter((column) => column.length);
  const engines = groups.filter((group) => group.kind === "scheduler").map((scheduler) => {
    const workers = groups.find((group) => group.kind === "worker" && group.engine === scheduler.engine);
    return workers ? [scheduler, workers] : [scheduler];
  });
  const many = engines.length > FEW;
  const gap = engines.length > 1 ? GAP + 2 * (PAD + INSET) : GAP;
  const widths = engines.map((engine) => Math.max(...engine.map((group) => place.across(group))));
  const inLine = vertical && many; // one engine after the other, along
  const rows = inLine ? Math.max(...widths) : sum(widths) + Math.max(0, widths.length - 1) * gap;
  const sides = columns.map((column) =>
    sum(column.map((group) => place.across(group))) + (column.length - 1) * place.apart);
  const middle = Math.max(rows, ...sides) / 2;

  let along = 0;
  columns.forEach((column, i) => {
    let across = middle - sides[i] / 2;
    for (const group of column) {
      place.put(group, along, across);
      across += place.across(group) + place.apart;
    }
    along += Math.max(...column.map((group) => place.along(group))) + place.space;
  });
  const frames = [];
  let across = middle - rows / 2;
  engines.forEach((engine, i) => {
    const centre = inLine ? middle : across + widths[i] / 2;
    let at = along;
    for (const group of engine) {
      place.put(group, at, centre - place.across(group) / 2);
      at += place.along(group) + place.space;
    }
    const inside = engine.map((group) => place.rects.get(group.id));
    if (engines.length > 1) frames.push({ label: `engine ${engine[0].engine}`, ...around(inside) });
    if (inLine) along = at - place.space + gap;
    else across += widths[i] + gap;
  });
  if (many) {
    place.rects.set(ENGINES, around(frames, INSET));
    frames.push({ label: "", ...place.rects.get(ENGINES) });
  }
  const arrows = route(bundles(edges, groups, many), place.rects, vertical);
  const rects = [...place.rects.values()];
  const groupings = rects.filter((rect) => rect.several);
  return { boxes: place.boxes, frames, groupings, arrows, ...around([...rects, ...frames]) };
}

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

// Processes of a kind stand together; of schedulers and workers, those of one engine. Engines of
// other hosts have a scheduler here, but no workers.
function groupsOf(names, edges) {
  const workers = names.filter((name) => kindOf(name) === "worker").length;
  const width = workers / edges.filter((edge) => edge.endsWith(">workers")).length;
  const groups = new Map();
  for (const name of names) {
    const kind = kindOf(name);
    let engine = null;
    if (kind === "scheduler") engine = indexOf(name);
    if (kind === "worker") engine = Math.floor(indexOf(name) / width);
    const id = engine === null ? kind : `${kind} ${engine}`;
    const rank = rankOf(kind);
    if (!groups.has(id)) groups.set(id, { id, kind, engine, rank, names: [] });
    groups.get(id).names.push(name);
  }
  for (const group of groups.values()) group.names.sort((a, b) => indexOf(a) - indexOf(b));
  return [...groups.values()].sort((a, b) => a.rank - b.rank || a.engine - b.engine);
}

class Placer {
  constructor(vertical) {
    this.vertical = vertical;
    this.size = vertical
      ? { along: BOX.height, across: BOX.width }
      : { along: BOX.width, across: BOX.height };
    this.space = vertical ? 74 : 150; // along, for the arrows
    this.apart = vertical ? GAP + 8 : 64; // across, between tokenizers and detokenizers
    this.boxes = new Map(); // upper left corners, by process
    this.rects = new Map(); // by group
  }

  // How many stand beside each other across; the rest goes on along.
  lanes(group) {
    const count = group.names.length;
    if (this.vertical) return Math.min(count, 2);
    return count <= 4 ? count : Math.ceil(count / (count <= 16 ? 2 : 4));
  }

  across(group) {
    const lanes = this.lanes(group);
    return lanes * this.size.across + (lanes - 1) * GAP;
  }

  along(group) {
    const deep = Math.ceil(group.names.length / this.lanes(group));
    return deep * this.size.along + (deep - 1) * GAP;
  }

  put(group, along, across) {
    const lanes = this.lanes(group);
    group.names.forEach((name, i) => {
      const a = along + Math.floor(i / lanes) * (this.size.along + GAP);
      const c = across + (i % lanes) * (this.size.across + GAP);
      this.boxes.set(name, this.vertical ? { x: c, y: a } : { x: a, y: c });
    });
    const [a, c] = [this.along(group), this.across(group)];
    const rect = this.vertical
      ? { x: across, y: along, width: c, height: a }
      : { x: along, y: across, width: a, height: c };
    this.rects.set(group.id, group.names.length > 1 ? { ...around([rect], INSET), several: true } : rect);
  }
}

function around(rects, space = PAD) {
  const x = Math.min(...rects.map((rect) => rect.x)) - space;
  const y = Math.min(...rects.map((rect) => rect.y)) - space;
  const right = Math.max(...rects.map((rect) => rect.x + rect.width)) + space;
  const bottom = Math.max(...rects.map((rect) => rect.y + rect.height)) + space;
  return { x, y, width: right - x, height: bottom - y };
}

// All rings from one group to another are one arrow, and those between many engines and a group of
// others. "scheduler.0>workers" is read by its engine's.
function bundles(edges, groups, many) {
  const home = new Map(groups.flatMap((group) => group.names.map((name) => [name, group])));
  const found = new Map();
  for (const edge of edges) {
    const [writer, reader] = edge.split(">");
    const source = home.get(writer);
    const target = home.get(reader) ?? groups.find(
      (group) => `${group.kind}s` === reader && (group.engine === null || group.engine === source?.engine));
    if (!source || !target || source === target) continue;
    const inside = source.engine !== null && target.engine !== null;
    const end = (group) => (many && !inside && group.engine !== null ? ENGINES : group.id);
    const id = `${end(source)}>${end(target)}`;
    if (!found.has(id)) found.set(id, { source: end(source), target: end(target), edges: [] });
    found.get(id).edges.push(edge);
  }
  return [...found.values()];
}

// Ends are spread along the side of a box, in the order of where their other ends are.
function route(arrows, rects, vertical) {
  const ends = new Map();
  const centre = (rect, axis) => rect[axis] + rect[axis === "x" ? "width" : "height"] / 2;
  const [along, across] = vertical ? ["y", "x"] : ["x", "y"];
  arrows.forEach((arrow, i) => {
    const [from, to] = [rects.get(arrow.source), rects.get(arrow.target)];
    const ahead = centre(to, along) >= centre(from, along);
    for (const [role, here, there, side] of [["source", from, to, ahead], ["target", to, from, !ahead]]) {
      const key = `${arrow[role]}|${side}`;
      if (!ends.has(key)) ends.set(key, []);
      ends.get(key).push({ i, role, here, side, order: centre(there, across), back: !ahead });
    }
  });
  const points = new Map();
  for (const list of ends.values()) {
    list.sort((a, b) => a.order - b.order || a.back - b.back || a.i - b.i);
    list.forEach((end, n) => {
      const share = (n + 1) / (list.length + 1);
      const rect = end.here;
      points.set(`${end.i}${end.role}`, vertical
        ? { x: rect.x + rect.width * share, y: rect.y + (end.side ? rect.height : 0) }
        : { x: rect.x + (end.side ? rect.width : 0), y: rect.y + rect.height * share });
    });
  }
  return arrows.map((arrow, i) => {
    const [a, b] = [points.get(`${i}source`), points.get(`${i}target`)];
    const bend = (b[along] - a[along]) / 2;
    const [c, d] = vertical
      ? [{ x: a.x, y: a.y + bend }, { x: b.x, y: b.y - bend }]
      : [{ x: a.x + bend, y: a.y }, { x: b.x - bend, y: b.y }];
    // Labels of the two directions of a pair don't lie on each other: each is nearer to its source.
    const t = 0.3;
    const at = (axis) =>
      (1 - t) ** 3 * a[axis] + 3 * (1 - t) ** 2 * t * c[axis] + 3 * (1 - t) * t ** 2 * d[axis] + t ** 3 * b[axis];
    return {
      ...arrow,
      path: `M${a.x} ${a.y}C${c.x} ${c.y} ${d.x} ${d.y} ${b.x} ${b.y}`,
      label: { x: at("x"), y: at("y") },
    };
  });
}
