// The page: its connection, its two halves, and what stands in the header.

import { Chat } from "./chat.js";
import { Connection } from "./connection.js";
import { EngineView } from "./engine.js";
import "./tooltip.js";

const THEME = "octavo-theme";
const THEMES = ["system", "light", "dark"];

const at = (id) => document.getElementById(id);
const view = new EngineView();
const connection = new Connection(onState, (message) => say("trouble", message));
const chat = new Chat(connection);
let unwatch = null;

function say(state, text) {
  at("state").dataset.state = state;
  const label = at("state").lastElementChild;
  if (label.textContent !== text) label.textContent = text;
}

function onState(state, wrongKey) {
  chat.setOpen(state === "open");
  if (state === "connecting") say("waiting", "connecting");
  if (state === "lost") say("trouble", "no connection, trying again");
  if (state === "key") {
    say("trouble", "an API key is needed");
    at("key-error").textContent = wrongKey ? "This is not the server's key." : "";
    if (!at("key-dialog").open) at("key-dialog").showModal();
  }
  showProgress(null);
  unwatch = null;
  watch();
}

// The engine is watched while the page can be seen.
function watch() {
  if (document.hidden || unwatch || !connection.isOpen) return;
  view.reset();
  unwatch = connection.request("watch", {}, { engine: onFrame });
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    unwatch?.();
    unwatch = null;
  } else watch();
});

function onFrame(frame) {
  const loading = frame.max_model_len === null ? frame.loading : null;
  if (loading) say("waiting", `loading: ${loading.phase}`);
  else say(frame.trouble ? "trouble" : "ready", frame.trouble ?? "ready");
  showProgress(loading);
  const context = frame.max_model_len ? `, context ${frame.max_model_len.toLocaleString("en")} tokens` : "";
  const model = `${frame.models[0].split("/").at(-1)}${context}`;
  if (at("model").textContent !== model) at("model").textContent = model;
  at("model").title = frame.models.join(", ");
  at("uptime").textContent = `version ${frame.version}`;
  view.take(frame);
}

// Beside the state, which is read aloud whenever it changes.
function showProgress(loading) {
  at("load").hidden = at("load-facts").hidden = !loading;
  if (!loading) return;
  const { percent, elapsed_seconds: seconds } = loading;
  if (percent === null) at("load").removeAttribute("value");
  else at("load").value = percent;
  at("load-facts").textContent = `${percent === null ? "" : `${percent} %, `}${Math.round(seconds)} s`;
}

at("key-form").addEventListener("submit", () => connection.useKey(at("key").value));
at("key-dialog").addEventListener("cancel", (event) => event.preventDefault());

for (const button of document.querySelectorAll(".views button")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.view;
    for (const other of document.querySelectorAll(".views button")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    view.draw();
  });
}

function useTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  at("theme").textContent = `Theme: ${theme}`;
  view.draw();
}

at("theme").addEventListener("click", () => {
  const theme = THEMES[(THEMES.indexOf(localStorage.getItem(THEME) ?? "system") + 1) % THEMES.length];
  localStorage.setItem(THEME, theme);
  useTheme(theme);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view.draw());
useTheme(THEMES.find((theme) => theme === localStorage.getItem(THEME)) ?? "system");
connection.open();
