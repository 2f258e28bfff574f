// An answer's text as spans of tokens with their probabilities.

import { hideTip, showTip } from "./tooltip.js";

const LEVELS = [0.1, 0.4, 0.8];

const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return share < 0.1 ? "< 0.1 %" : `${share.toFixed(1)} %`;
};
const quoted = (text) => JSON.stringify(text).slice(1, -1).replaceAll(" ", "␣") || "(empty)";

function describe(entries) {
  return entries
    .map((entry) => {
      const others = (entry.top_logprobs ?? [])
        .filter((other) => other.token !== entry.token)
        .map((other) => `${percent(other.logprob)}  ${quoted(other.token)}`);
      const end = others.length ? `\ninstead of\n${others.join("\n")}` : "";
      return `${percent(entry.logprob)}  ${quoted(entry.token)}${end}`;
    })
    .join("\n");
}

export class Answer {
  // `element` is filled with text and tokens as they come.
  constructor(element) {
    this.element = element;
    this.text = "";
    this.shown = 0; // characters of the text that are in spans
    this.pending = []; // tokens whose bytes are no whole characters yet, or whose text is held back
    this.pendingText = "";
    this.decoder = new TextDecoder();
    this.rest = document.createTextNode("");
    element.append(this.rest);
    this.index = -1;
    element.addEventListener("pointerover", (event) => this.#point(event));
    element.addEventListener("pointerout", hideTip);
    element.addEventListener("keydown", (event) => this.#move(event));
    element.addEventListener("blur", () => this.#show(-1));
  }

  add(text, entries) {
    this.text += text;
    for (const entry of entries ?? []) {
      this.pending.push(entry);
      const bytes = entry.bytes ?? [...new TextEncoder().encode(entry.token)];
      this.pendingText += this.decoder.decode(new Uint8Array(bytes), { stream: true });
      this.#place();
    }
    if (!this.pending.length) this.pendingText = "";
    this.rest.data = this.text.slice(this.shown);
  }

  // Turn the tokens at hand into a span once the text has them. A tokenizer may drop a leading space.
  #place() {
    for (const piece of [this.pendingText, this.pendingText.trimStart()]) {
      if (piece && this.text.startsWith(piece, this.shown)) {
        const span = document.createElement("span");
        const least = Math.min(...this.pending.map((entry) => Math.exp(entry.logprob)));
        const level = LEVELS.findIndex((bound) => least < bound);
        span.className = level < 0 ? "token" : `token likely-${level + 1}`;
        // Space before a word is not marked: it may stand at the end of a line.
        const word = piece.trimStart() || piece;
        const space = piece.slice(0, piece.length - word.length);
        if (space) this.element.insertBefore(document.createTextNode(space), this.rest);
        span.textContent = word;
        span.entries = this.pending;
        this.element.insertBefore(span, this.rest);
        this.shown += piece.length;
        this.pending = [];
        this.pendingText = "";
        this.element.tabIndex = 0;
        return;
      }
    }
  }

  #spans() {
    return [...this.element.querySelectorAll(".token")];
  }

  #point(event) {
    if (event.target.entries) showTip(event.target, describe(event.target.entries));
  }

  #move(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const count = this.#spans().length;
    this.#show(Math.min(Math.max(0, this.index + step), count - 1));
  }

  #show(index) {
    const spans = this.#spans();
    spans[this.index]?.classList.remove("shown");
    this.index = index;
    if (index < 0) {
      hideTip();
      return;
    }
    spans[index].classList.add("shown");
    spans[index].scrollIntoView({ block: "nearest" });
    showTip(spans[index], describe(spans[index].entries));
    this.element.setAttribute("aria-describedby", "tip");
  }
}
