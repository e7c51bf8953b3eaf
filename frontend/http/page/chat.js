// The playground: a chat with the model, streamed.

import { ApiError, getJson, stream } from "./api.js";
import { byId, make } from "./dom.js";
import { TokenText, clearInspector } from "./tokens.js";

const TOP = 5; // alternatives shown of each token
const PATIENCE = 10000;

export class Chat {
  constructor(wantKey) {
    this.wantKey = wantKey;
    this.turns = []; // as the API has them
    this.running = null;
    this.empty = byId("empty");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    byId("stop").addEventListener("click", () => this.running?.abort());
    byId("clear").addEventListener("click", () => this.clear());
    byId("shade").addEventListener("change", () => this.shade());
    this.shade();
    clearInspector(byId("inspector"));
  }

  async loadModels() {
    try {
      const models = (await getJson("v1/models", PATIENCE)).data.map((model) => model.id);
      byId("model").replaceChildren(...models.map((name) => make("option", {}, name)));
      byId("model-name").textContent = models[0] ?? "";
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (error.status === 401) this.wantKey(error.message);
    }
  }

  shade() {
    byId("messages").classList.toggle("shaded", byId("shade").checked);
  }

  clear() {
    this.running?.abort();
    this.turns = [];
    byId("messages").replaceChildren(this.empty);
    clearInspector(byId("inspector"));
    byId("prompt").focus();
  }

  async send() {
    const text = byId("prompt").value;
    if (!text.trim() || this.running) return;
    const wrong = byId("settings").querySelector("input:invalid");
    if (wrong) {
      byId("settings").open = true;
      wrong.reportValidity();
      return;
    }
    this.empty.remove();
    byId("prompt").value = "";
    const turns = this.turns;
    const turn = { role: "user", content: text };
    turns.push(turn);
    addMessage("user", "You").body.append(text);
    const answer = new Answer();
    this.running = new AbortController();
    busy(true);
    try {
      await answer.take(stream("v1/chat/completions", this.body(), this.running.signal));
    } catch (error) {
      if (error.name === "AbortError") answer.end("stopped");
      else if (error instanceof ApiError) answer.fail(error.message);
      else throw error;
      if (error.status === 401) this.wantKey(error.message);
    } finally {
      this.running = null;
      busy(false);
    }
    if (answer.text) turns.push({ role: "assistant", content: answer.text });
    else {
      turns.splice(turns.indexOf(turn), 1); // so that it can be asked again
      if (turns === this.turns && !byId("prompt").value) byId("prompt").value = text;
    }
  }

  body() {
    const body = {
      messages: [...this.turns],
      stream: true,
      stream_options: { include_usage: true },
      logprobs: true,
      top_logprobs: TOP,
    };
    if (byId("model").value) body.model = byId("model").value;
    const system = byId("system").value;
    if (system) body.messages.unshift({ role: "system", content: system });
    for (const [id, name] of [["temperature", "temperature"], ["top-p", "top_p"], ["max-tokens", "max_tokens"], ["seed", "seed"]]) {
      const value = byId(id).valueAsNumber;
      if (!Number.isNaN(value)) body[name] = value;
    }
    return body;
  }
}

class Answer {
  constructor() {
    const { article, body } = addMessage("assistant", "Model");
    this.article = article;
    this.article.classList.add("streaming");
    this.text = "";
    this.reasoning = null;
    this.start = performance.now();
    this.first = 0;
    this.reason = "";
    this.usage = null;
    this.body = body;
    this.tokens = new TokenText(body, byId("inspector"));
  }

  async take(events) {
    for await (const event of events) {
      if (event.usage) this.usage = event.usage;
      const choice = event.choices[0];
      if (choice) this.add(choice);
    }
    this.end(this.reason);
  }

  add(choice) {
    const { delta } = choice;
    const text = delta.content ?? "";
    const thought = delta.reasoning_content ?? delta.reasoning ?? "";
    if (choice.finish_reason) this.reason = choice.finish_reason;
    if ((text || thought) && !this.first) this.first = performance.now();
    const list = byId("messages");
    const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    if (thought) this.think(thought);
    this.text += text;
    this.tokens.add(text, thought ? [] : choice.logprobs?.content ?? []);
    if (atEnd) list.scrollTop = list.scrollHeight;
  }

  think(text) {
    if (!this.reasoning) {
      this.reasoning = make("p", {});
      this.body.before(make("details", { class: "reasoning", open: true }, make("summary", {}, "Reasoning"), this.reasoning));
    }
    this.reasoning.append(text);
  }

  end(reason) {
    const now = performance.now();
    const said = [];
    if (this.usage) {
      const count = this.usage.completion_tokens;
      said.push(`${count} ${count === 1 ? "token" : "tokens"}`);
      if (count > 1 && this.first && now > this.first) said.push(`${((1000 * (count - 1)) / (now - this.first)).toFixed(1)} tok/s`);
    }
    if (this.first) said.push(`first after ${Math.round(this.first - this.start)} ms`);
    said.push({ stop: "complete", length: "cut at max tokens", stopped: "stopped" }[reason] ?? `ended: ${reason}`);
    this.close(make("p", { class: "facts" }, said.join(" · ")));
  }

  fail(message) {
    this.close(make("p", { class: "error", role: "alert" }, message));
  }

  close(last) {
    this.article.classList.remove("streaming");
    this.article.append(last);
    byId("messages").scrollTop = byId("messages").scrollHeight;
  }
}

function addMessage(role, name) {
  const body = make("div", { class: "text", role: "group", "aria-label": `${name}, text` });
  const article = make("article", { class: role }, make("h3", {}, name), body);
  byId("messages").append(article);
  byId("messages").scrollTop = byId("messages").scrollHeight;
  return { article, body };
}

function busy(now) {
  byId("send").hidden = now;
  byId("stop").hidden = !now;
}
