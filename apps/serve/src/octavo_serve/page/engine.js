// The engine view, drawn from the frames of `watch`.

import { barAt, drawBars, drawBlocks, drawLine } from "./charts.js";

const STEPS = 200;
const HISTORY = 120; // frames, two a second
const RATE_FRAMES = 6; // over which rates are taken

const at = (id) => document.getElementById(id);
const set = (id, text) => {
  const element = at(id);
  if (element.textContent !== text) element.textContent = text;
};
const whole = new Intl.NumberFormat("en");
const number = (value) =>
  value >= 10_000 ? `${whole.format(Math.round(value / 100) / 10)}k` : whole.format(value < 100 ? Math.round(value * 10) / 10 : Math.round(value));
const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
const seconds = (value) => {
  if (value === null || value === undefined) return "–";
  if (value >= 1) return `${value.toFixed(2)} s`;
  return `${(1000 * value).toFixed(value < 0.01 ? 2 : value < 0.1 ? 1 : 0)} ms`;
};
const sum = (values) => values.reduce((total, value) => total + value, 0);

export class EngineView {
  constructor() {
    this.frames = []; // the last ones, without steps and maps
    this.lines = { running: [], waiting: [], generation: [], prompts: [] };
    this.ranks = new Map(); // steps, blocks and totals, by rank
    this.rank = null; // the one whose steps and blocks are shown
    this.marked = -1;
    at("rank").addEventListener("change", () => {
      this.rank = Number(at("rank").value);
      this.marked = -1;
      this.draw();
    });
    for (const id of ["step-tokens", "step-times"]) this.#follow(at(id));
    new ResizeObserver(() => this.draw()).observe(at("engine"));
  }

  // A connection has begun: what it tells is all that is known.
  reset() {
    this.frames = [];
    this.ranks.clear();
  }

  take(frame) {
    for (const rank of frame.ranks) {
      const mine = this.#ofRank(rank.rank);
      if (rank.steps?.length) {
        mine.steps = [...mine.steps, ...rank.steps].slice(-STEPS);
        mine.number = rank.num_steps;
        if (this.marked >= 0) this.marked = Math.max(-1, this.marked - (mine.steps.length === STEPS ? rank.steps.length : 0));
      }
      if (rank.blocks !== undefined) Object.assign(mine, { blocks: rank.blocks, totals: rank.block_totals });
    }
    if (!this.ranks.has(this.rank)) this.rank = frame.ranks[0]?.rank ?? null;
    this.frames.push(frame);
    if (this.frames.length > RATE_FRAMES) this.frames.shift();
    this.#figures(frame);
    this.#latencies(frame.latencies);
    this.#table(frame.ranks);
    this.draw();
  }

  #ofRank(rank) {
    if (!this.ranks.has(rank)) this.ranks.set(rank, { steps: [], number: 0, blocks: "", totals: null });
    return this.ranks.get(rank);
  }

  // Growth of a counter per second over the last frames, of one rank or of all.
  #rate(field, rank = null) {
    const [first, last] = [this.frames[0], this.frames.at(-1)];
    if (last.time <= first.time) return 0;
    const total = (frame) => sum(frame.ranks.filter((one) => rank === null || one.rank === rank).map((one) => one[field]));
    return Math.max(0, total(last) - total(first)) / (last.time - first.time);
  }

  #figures(frame) {
    const total = (field) => sum(frame.ranks.map((rank) => rank[field]));
    const values = {
      running: total("running"),
      waiting: total("waiting"),
      generation: this.#rate("generation_tokens"),
      prompts: this.#rate("prompt_tokens"),
    };
    for (const [id, value] of Object.entries(values)) {
      set(id, number(value));
      this.lines[id].push(value);
      if (this.lines[id].length > HISTORY) this.lines[id].shift();
    }
    const queries = total("prefix_queries");
    set("hits", queries ? percent(total("prefix_hits") / queries) : "–");
    set("preemptions", number(total("preemptions")));
    const blocks = total("num_blocks");
    const used = blocks - total("free_blocks");
    set("kv-use", blocks ? `${number(used)} of ${number(blocks)} blocks in use, ${percent(used / blocks)}` : "–");
  }

  #latencies(latencies) {
    for (const [name, values] of Object.entries(latencies)) {
      for (const part of ["p50", "p90", "p99"]) set(`${name}-${part}`, seconds(values[part]));
      set(`${name}-count`, number(values.count));
    }
  }

  #table(ranks) {
    at("ranks-card").hidden = ranks.length < 2;
    if (ranks.length < 2) return;
    const body = at("ranks").tBodies[0];
    while (body.rows.length < ranks.length) {
      const row = body.insertRow();
      for (let column = 0; column < 6; column += 1) row.insertCell();
    }
    const known = [...at("rank").options].map((option) => Number(option.value));
    ranks.forEach((rank, index) => {
      const used = rank.num_blocks ? percent(1 - rank.free_blocks / rank.num_blocks) : "–";
      const cells = [rank.rank, rank.down ? "down" : "up", rank.running, rank.waiting, number(this.#rate("generation_tokens", rank.rank)), used];
      cells.forEach((value, column) => {
        const cell = body.rows[index].cells[column];
        if (cell.textContent !== String(value)) cell.textContent = value;
      });
      body.rows[index].title = rank.down ?? "";
      if (!known.includes(rank.rank)) at("rank").add(new Option(rank.rank, rank.rank));
    });
    at("rank").value = this.rank;
  }

  draw() {
    for (const [id, values] of Object.entries(this.lines)) drawLine(at(`${id}-line`), values, HISTORY);
    const shown = this.ranks.get(this.rank);
    if (!shown) return;
    drawBlocks(at("blocks"), shown.blocks);
    if (shown.totals) {
      shown.totals.forEach((count, state) => set(`blocks-${state}`, number(count)));
      const [free, cached, used, shared] = shown.totals;
      at("blocks").setAttribute("aria-label", `KV cache blocks: ${free} free, ${cached} cached, ${used} used, ${shared} shared`);
    }
    this.#steps(shown);
  }

  #steps({ steps, number: newest }) {
    const column = (place) => steps.map((step) => step[place]);
    const [prefill, decode, , idle, plan, run, deliver] = [0, 1, 2, 3, 4, 5, 6].map(column);
    const busy = steps.map((step) => step[4] + step[5] + step[6]);
    const mostTokens = Math.max(1, ...steps.map((step) => step[0] + step[1]));
    // A few long steps and pauses would flatten all else: bars end above the longest but a few.
    const sorted = [...busy].sort((a, b) => a - b);
    const top = Math.max(1e-4, 1.5 * (sorted[Math.floor(0.95 * sorted.length)] ?? 0));
    const longest = sorted.at(-1) ?? 0;
    drawBars(at("step-tokens"), [["decode", decode], ["prefill", prefill]], STEPS, mostTokens, this.marked);
    drawBars(at("step-times"), [["run", run], ["plan", plan], ["deliver", deliver], ["idle", idle]], STEPS, top, this.marked);
    if (!steps.length) return;
    const times = { run: sum(run), plan: sum(plan), deliver: sum(deliver), idle: sum(idle) };
    const all = sum(Object.values(times));
    for (const [name, value] of Object.entries(times)) set(`share-${name}`, all ? percent(value / all) : "–");
    set("tokens-max", `tokens a step, up to ${number(mostTokens)}`);
    set("time-max", `time a step up to ${seconds(top)}, longest ${seconds(longest)}`);
    set("prefill-tokens", number(sum(prefill)));
    set("decode-tokens", number(sum(decode)));
    const median = sorted[Math.floor(sorted.length / 2)];
    set("step-rate", `median ${seconds(median)}, ${number(sum(prefill) + sum(decode))} tokens`);
    at("step-tokens").setAttribute("aria-label", `Tokens of the last ${steps.length} steps: ${sum(prefill)} of prefill, ${sum(decode)} of decode`);
    at("step-times").setAttribute("aria-label", `Time of the last ${steps.length} steps: ${Object.entries(times).map(([name, value]) => `${name === "run" ? "model" : name} ${percent(value / all)}`).join(", ")}`);
    const step = steps[this.marked];
    set(
      "step",
      step
        ? `Step ${whole.format(newest - steps.length + this.marked + 1)}: ${step[0]} prefill and ${step[1]} decode tokens in ${step[2]} rows; model ${seconds(step[5])}, plan ${seconds(step[4])}, deliver ${seconds(step[6])}, idle ${seconds(step[3])}.`
        : "Point at a step for its numbers, or focus a chart and use the arrow keys.",
    );
  }

  #follow(canvas) {
    const count = () => this.ranks.get(this.rank)?.steps.length ?? 0;
    const mark = (index) => {
      this.marked = index;
      this.draw();
    };
    canvas.addEventListener("pointermove", (event) => mark(barAt(canvas, event, count(), STEPS)));
    canvas.addEventListener("pointerleave", () => mark(-1));
    canvas.addEventListener("blur", () => mark(-1));
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step || !count()) return;
      event.preventDefault();
      mark(this.marked < 0 ? count() - 1 : Math.min(Math.max(0, this.marked + step), count() - 1));
    });
  }
}
