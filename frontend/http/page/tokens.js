// A streamed text as its tokens, and the strip that shows one of them.

import { make } from "./dom.js";
import { percent } from "./rates.js";

// Cuts what comes into pieces of text, each with the tokens that made it. A character may be made of
// several tokens, and a chunk's text may be other than its tokens say (a stop string was cut off):
// then the text counts.
export class Cutter {
  constructor() {
    this.decoder = new TextDecoder();
    this.held = [];
  }

  cut(text, tokens) {
    const pieces = [];
    for (const token of tokens) {
      this.held.push(token);
      const bytes = token.bytes ? Uint8Array.from(token.bytes) : new TextEncoder().encode(token.token);
      const made = this.decoder.decode(bytes, { stream: true });
      if (made) {
        pieces.push({ text: made, tokens: this.held });
        this.held = [];
      }
    }
    if (pieces.map((piece) => piece.text).join("") === text) return pieces;
    if (!text) {
      this.held = [...pieces.flatMap((piece) => piece.tokens), ...this.held];
      return [];
    }
    const all = [...pieces.flatMap((piece) => piece.tokens), ...this.held];
    this.held = [];
    this.decoder = new TextDecoder();
    return [{ text, tokens: all }];
  }
}

// The pieces of one answer on the page; arrow keys walk through them.
export class TokenText {
  constructor(parent, inspector) {
    this.parent = parent;
    this.inspector = inspector;
    this.cutter = new Cutter();
    this.pieces = new Map(); // by element
    parent.addEventListener("pointerover", (event) => this.pick(event.target));
    parent.addEventListener("click", (event) => this.pick(event.target));
    parent.addEventListener("keydown", (event) => this.walk(event));
  }

  add(text, tokens) {
    for (const piece of this.cutter.cut(text, tokens)) {
      if (!piece.tokens.length) {
        this.parent.append(piece.text);
        continue;
      }
      const element = make("span", { class: "token" }, piece.text);
      const least = Math.min(...piece.tokens.map((token) => Math.exp(token.logprob)));
      element.style.setProperty("--doubt", `${(42 * (1 - least)).toFixed(1)}%`);
      this.pieces.set(element, piece);
      this.parent.append(element);
    }
    if (this.pieces.size) this.parent.setAttribute("tabindex", "0");
  }

  pick(element) {
    const piece = this.pieces.get(element);
    if (!piece) return;
    this.parent.ownerDocument.querySelector(".token.picked")?.classList.remove("picked");
    element.classList.add("picked");
    showPiece(this.inspector, piece);
  }

  walk(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const elements = [...this.pieces.keys()];
    const now = elements.findIndex((element) => element.classList.contains("picked"));
    this.pick(elements[Math.max(0, Math.min(elements.length - 1, now + step))]);
  }
}

export function showPiece(inspector, piece) {
  const token = piece.tokens[piece.tokens.length - 1];
  const others = token.top_logprobs ?? [];
  const shown = others.some((other) => same(other, token)) ? others : [token, ...others];
  inspector.replaceChildren(
    make("p", { class: "chosen" },
      make("code", {}, visible(piece.text)),
      " ",
      make("strong", {}, share(token.logprob)),
      piece.tokens.length > 1 ? ` the last of ${piece.tokens.length} tokens` : ""),
    make("ol", { class: "likely" }, ...shown.map((other) => {
      const bar = make("span", { class: "bar" });
      bar.style.width = `${100 * Math.exp(other.logprob)}%`;
      return make("li", { class: same(other, token) ? "is-chosen" : "" },
        make("code", {}, visible(other.token)), make("span", { class: "rail" }, bar), make("span", { class: "share" }, share(other.logprob)));
    })));
}

export const clearInspector = (inspector) =>
  inspector.replaceChildren(make("p", { class: "note" }, "Point at a token, or walk with the arrow keys, to see how likely it was."));

const same = (a, b) => a.token === b.token && Math.abs(a.logprob - b.logprob) < 1e-6;
const share = (logprob) => {
  const p = Math.exp(logprob);
  return p >= 0.1 || p < 0.01 ? percent(p) : `${(100 * p).toFixed(1)} %`;
};
const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");
