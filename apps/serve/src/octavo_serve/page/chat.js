// The chat: messages, the answer that streams in, and the settings that go with a request.

import { Answer } from "./tokens.js";
import { hideTip, isTipShown } from "./tooltip.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
const CANDIDATES = 5;

const at = (id) => document.getElementById(id);

export class Chat {
  constructor(connection) {
    this.connection = connection;
    this.messages = [];
    this.cancel = null; // of the answer that streams
    this.log = at("log");
    this.prompt = at("prompt");
    at("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || at("key-dialog").open) return;
      if (isTipShown()) hideTip();
      this.cancel?.();
    });
    at("stop").addEventListener("click", () => this.cancel?.());
    at("clear").addEventListener("click", () => this.clear());
    at("structured").addEventListener("change", () => {
      at("schema-field").hidden = !at("structured").checked;
    });
    at("settings").open = matchMedia("(min-width: 1001px)").matches;
    this.setOpen(false);
  }

  setOpen(open) {
    this.isOpen = open;
    this.update();
  }

  update() {
    at("send").disabled = !this.isOpen || this.cancel !== null;
    at("stop").disabled = this.cancel === null;
  }

  clear() {
    this.cancel?.();
    this.messages = [];
    for (const element of [...this.log.children]) if (element.id !== "empty") element.remove();
    at("empty").hidden = false;
    this.prompt.focus();
  }

  send() {
    const text = this.prompt.value.trim();
    if (!text || at("send").disabled) return;
    const settings = this.settings();
    if (settings === null) return;
    at("empty").hidden = true;
    this.prompt.value = "";
    const asked = this.messages; // a new chat begins another list
    asked.push({ role: "user", content: text });
    this.append("user", text);
    const element = this.append("assistant", "");
    element.setAttribute("aria-busy", "true");
    this.stream(asked, element, settings);
  }

  stream(asked, element, settings) {
    const answer = new Answer(element);
    const system = at("system").value.trim();
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...asked];
    const began = performance.now();
    let first = null;
    let reason = null;
    const ended = (said) => {
      element.removeAttribute("aria-busy");
      if (answer.text) asked.push({ role: "assistant", content: answer.text });
      this.cancel = null;
      this.update();
      at("said").textContent = said;
    };
    const follow = () => {
      const log = this.log;
      return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    };
    this.cancel = this.connection.request("chat", { messages, ...settings }, {
      chunk: (frame) => {
        const stick = follow();
        for (const choice of frame.choices) {
          if (choice.delta.content && first === null) first = performance.now();
          answer.add(choice.delta.content ?? "", choice.logprobs?.content);
          reason = choice.finish_reason ?? reason;
        }
        if (stick) this.log.scrollTop = this.log.scrollHeight;
      },
      done: (frame) => {
        const { prompt_tokens: prompt, completion_tokens: count, prompt_tokens_details: details } = frame.usage;
        const seconds = (performance.now() - (first ?? began)) / 1000;
        const facts = [
          reason === "abort" ? "stopped" : reason === "length" ? "cut at max tokens" : "complete",
          `${prompt} + ${count} tokens`,
          ...(details.cached_tokens ? [`${details.cached_tokens} cached`] : []),
          ...(first === null ? [] : [`first after ${Math.round(first - began)} ms`]),
          ...(count > 1 && seconds > 0 ? [`${((count - 1) / seconds).toFixed(1)} tokens/s`] : []),
        ];
        if (element.isConnected) this.append("facts", facts.join(" · "));
        ended(reason === "abort" ? "Answer stopped" : "Answer complete");
      },
      error: (frame) => {
        if (element.isConnected) this.append("failed", frame.error.message);
        ended(`Error: ${frame.error.message}`);
        if (!answer.text) {
          element.remove();
          asked.pop();
        }
      },
    });
    this.update();
  }

  append(kind, text) {
    const element = document.createElement(kind === "facts" ? "p" : "div");
    element.className = kind === "facts" ? "facts" : `message ${kind}`;
    element.textContent = text;
    this.log.append(element);
    this.log.scrollTop = this.log.scrollHeight;
    return element;
  }

  // The body's fields besides its messages; null where one of them cannot be sent.
  settings() {
    const fields = {};
    for (const name of NUMBERS) {
      const input = at(name);
      if (!input.checkValidity()) {
        at("settings").open = true;
        input.reportValidity();
        return null;
      }
      if (input.value !== "") fields[name] = Number(input.value);
    }
    if (at("probabilities").checked) Object.assign(fields, { logprobs: true, top_logprobs: CANDIDATES });
    at("schema-error").textContent = "";
    if (at("structured").checked) {
      try {
        const schema = JSON.parse(at("schema").value);
        fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
      } catch (error) {
        at("settings").open = true;
        at("schema-error").textContent = `This is not JSON: ${error.message}`;
        at("schema").focus();
        return null;
      }
    }
    return fields;
  }
}
