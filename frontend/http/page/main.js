// Starts the page.

import { hasKey, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { Monitor } from "./monitor.js";

const NARROW = "(max-width: 640px)";

function wantKey(message) {
  const form = byId("key-form");
  if (hasKey()) byId("key-note").textContent = message;
  if (!form.hidden) return;
  form.hidden = false;
  byId("key").focus();
}

const monitor = new Monitor(wantKey);
const chat = new Chat(wantKey);

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value.trim());
  byId("key").value = "";
  byId("key-form").hidden = true;
  monitor.ask();
  chat.loadModels();
});

if (matchMedia(NARROW).matches) byId("settings").open = false;
monitor.ask();
chat.loadModels();
