// What a series of statuses says: rates over the last few seconds, totals over replicas.
//
// Actors publish their numbers once a second, and the page asks once a second, so two statuses in a
// row may hold the same numbers: a rate is over a few of them.

const SAMPLES = 4;

export class Rates {
  constructor() {
    this.samples = [];
  }

  add(status, seconds) {
    const edges = Object.fromEntries(status.edges.map((edge) => [edge.name, edge.records]));
    const cpu = Object.fromEntries(status.actors.map((actor) => [actor.pid, actor.cpu_seconds]));
    this.samples.push({ seconds, edges, cpu, statistics: status.statistics });
    if (this.samples.length > SAMPLES) this.samples.shift();
  }

  // Of a counter, per second; null while there is nothing to compare with, or it began again.
  of(read) {
    const first = this.samples[0];
    const last = this.samples[this.samples.length - 1];
    const before = read(first);
    const now = read(last);
    if (first === last || before === undefined || now === undefined || now < before) return null;
    return (now - before) / (last.seconds - first.seconds);
  }

  total(kind, name) {
    return this.of((sample) => total(sample.statistics, kind, name));
  }

  edge(name) {
    return this.of((sample) => sample.edges[name]);
  }

  cpu(actor) {
    return actor.state === "dead" ? null : this.of((sample) => sample.cpu[actor.pid]);
  }
}

const values = (statistics, kind, name) =>
  Object.entries(statistics)
    .filter(([key]) => key.startsWith(`${kind}.`) && key.endsWith(`.${name}`))
    .map(([, value]) => value);

export const total = (statistics, kind, name) =>
  values(statistics, kind, name).reduce((sum, value) => sum + value, 0);

export const mean = (statistics, kind, name) =>
  total(statistics, kind, name) / Math.max(1, values(statistics, kind, name).length);

export function short(number) {
  if (number === null) return "–";
  if (number >= 10000) return `${(number / 1000).toFixed(number >= 100000 ? 0 : 1)}k`;
  return number >= 10 || Number.isInteger(number) ? number.toFixed(0) : number.toFixed(1);
}

export const percent = (share) =>
  share > 0 && share < 0.01 ? "<1 %" : `${Math.round(100 * share)} %`;

export const bytes = (number) =>
  number >= 1e9 ? `${(number / 1e9).toFixed(1)} GB` : `${(number / 1e6).toFixed(0)} MB`;
