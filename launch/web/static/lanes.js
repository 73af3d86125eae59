// A lane per process: its states over time. Only one page of lanes is fetched and drawn.

import { duration, h, number } from "./dom.js";
import { KINDS, kindOf, load, stateCell } from "./tables.js";

const LIMIT = 40, BRIEF = 8, ROW = 32, GAP = 5, LEFT = 150, TOP = 4, AXIS = 26;
const SPANS = [60, 120, 300, 600, 3600, 21600, 86400];
const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");

export class Lanes {
  /** brief: the first processes and the last two minutes, without controls, as a card of the overview. */
  constructor(brief = false) {
    this.offset = 0;
    this.limit = brief ? BRIEF : LIMIT;
    this.input = h("input", { type: "search", placeholder: "process  ( / )", "aria-label": "Filter processes", oninput: () => this.refilter() });
    this.zoom = null; // [from, to] that was dragged over, Unix time
    this.drag = null; // x at which the pointer went down
    this.whole = h("button", { type: "button", hidden: true, onclick: () => this.zoomTo(null) }, "all of it");
    this.span = h("select", { "aria-label": "Time", onchange: () => { this.zoom = null; this.load(); } }, SPANS.map((span) => h("option", { value: span, selected: span === (brief ? 120 : 300) }, `last ${duration(span)}`)));
    this.count = h("span", { class: "quiet", role: "status" });
    this.back = h("button", { type: "button", onclick: () => this.turn(-this.limit) }, "back");
    this.next = h("button", { type: "button", onclick: () => this.turn(this.limit) }, "next");
    this.canvas = h("canvas", { role: "img", tabindex: "0" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.legend = h("p", { class: "legend" });
    this.all = h("a", {}, "show all");
    this.empty = h("p", { class: "quiet" });
    this.plot = h("div", { class: "lanes" }, this.canvas, this.tip);
    this.marked = h("div", { class: "marked", hidden: true });
    this.plot.append(this.marked);
    const controls = brief ? [h("span", { class: "unit" }, `last ${duration(120)}`), this.all, this.whole] : [this.input, this.span, this.whole, this.count, this.back, this.next];
    this.root = h("section", { class: `card ${brief ? "wide" : ""}` }, h("div", { class: "bar-top" }, h("h2", {}, "Timeline"), controls), this.legend, this.empty, this.plot,
      brief ? "" : h("p", { class: "quiet" }, "Drag to zoom. ", h("code", {}, "slipstream trace RUN"), " writes everything for ui.perfetto.dev."));
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    this.canvas.addEventListener("pointerdown", (event) => { this.drag = event.offsetX; this.canvas.setPointerCapture(event.pointerId); });
    this.canvas.addEventListener("pointerup", (event) => this.dragged(event));
    this.canvas.addEventListener("dblclick", () => this.zoomTo(null));
    new ResizeObserver(() => this.found && this.draw()).observe(this.plot);
  }

  show(run, find) {
    if (run !== this.run || find !== this.input.value) this.offset = 0;
    if (run !== this.run) this.zoom = null;
    this.run = run;
    this.all.href = `#timeline/${run.index}`;
    this.input.value = find;
    return this.load();
  }

  refilter() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => { this.offset = 0; this.load(); }, 150);
  }

  turn(by) {
    this.offset = Math.max(0, this.offset + by);
    this.load();
  }

  async load() {
    const words = new URLSearchParams({ offset: this.offset, limit: this.limit, filter: this.input.value.trim(), seconds: this.span.value });
    const asked = (this.asked = `api/runs/${this.run.index}/lanes?${words}`);
    const found = await load(asked);
    if (asked !== this.asked) return;
    this.empty.textContent = found.refused ?? (found.total ? "" : "No state is recorded; telemetry.trace_mib turns the trace on.");
    this.found = found.refused || !found.total ? null : found;
    this.plot.hidden = !this.found;
    if (!this.found) return;
    const { total, rows } = found;
    this.back.hidden = this.next.hidden = total <= this.limit;
    this.back.disabled = this.offset === 0;
    this.next.disabled = this.offset + rows.length >= total;
    this.count.textContent = `${number(this.offset + 1)} to ${number(this.offset + rows.length)} of ${number(total)}`;
    const kinds = new Set(rows.flatMap(({ pieces }) => pieces.map(([, , state]) => kindOf(state))));
    this.legend.replaceChildren(...Object.keys(KINDS).filter((kind) => kinds.has(kind)).map((kind) => stateCell(kind)));
    this.draw();
  }

  zoomTo(range) {
    this.zoom = range;
    this.draw();
  }

  /** The end of a drag: what it went over fills the width. */
  dragged(event) {
    const from = Math.min(this.drag ?? 0, event.offsetX), to = Math.max(this.drag ?? 0, event.offsetX);
    const begun = this.drag !== null;
    this.drag = null;
    this.marked.hidden = true;
    if (begun && to - from > 4) this.zoomTo([this.T(from), this.T(to)]);
  }

  draw() {
    const { rows } = this.found;
    const [begin_s, end_s] = this.zoom ?? [this.found.begin_s, this.found.end_s];
    this.whole.hidden = !this.zoom;
    const width = this.plot.clientWidth, height = TOP + rows.length * ROW + AXIS, sharp = devicePixelRatio || 1;
    const left = Math.min(LEFT, width * 0.3);
    this.canvas.width = width * sharp;
    this.canvas.height = height * sharp;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const style = getComputedStyle(this.canvas), colour = (name) => style.getPropertyValue(`--state-${name}`).trim() || style.getPropertyValue("--quiet");
    const pen = this.canvas.getContext("2d");
    pen.scale(sharp, sharp);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    this.X = (time) => left + ((time - begin_s) / (end_s - begin_s || 1)) * (width - left - 8);
    this.T = (x) => begin_s + (Math.min(1, Math.max(0, (x - left) / (width - left - 8)))) * (end_s - begin_s);
    rows.forEach(({ who, pieces }, index) => {
      const y = TOP + index * ROW;
      pen.fillStyle = style.getPropertyValue("--text");
      let name = who;
      while (name.length > 4 && pen.measureText(name).width > left - 12) name = name.slice(0, -2);
      pen.fillText(name === who ? who : `${name}…`, 0, y + ROW / 2);
      pen.fillStyle = style.getPropertyValue("--grid");
      pen.fillRect(left, y + ROW / 2, width - left - 8, 1);
      for (const [start, end, state] of pieces) {
        if (end < begin_s || start > end_s) continue;
        const from = Math.max(this.X(start), left), to = Math.min(Math.max(this.X(end), from + 1), width - 8);
        pen.fillStyle = colour(kindOf(state));
        pen.fillRect(from, y + GAP, to - from, ROW - 2 * GAP);
      }
    });
    pen.fillStyle = style.getPropertyValue("--quiet");
    const places = Math.max(2, Math.floor((width - left) / 110));
    for (let i = 0; i <= places; i += 1) {
      const time = begin_s + ((end_s - begin_s) * i) / places;
      pen.textAlign = i === 0 ? "left" : i === places ? "right" : "center";
      pen.fillText(clock(time), this.X(time), height - 10);
    }
    pen.textAlign = "left";
    const now = rows.slice(0, 10).map(({ who, pieces }) => `${who} ${pieces.at(-1)?.[2] ?? "unknown"}`).join(", ");
    this.canvas.setAttribute("aria-label", `States over time. Newest: ${now}`);
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    if (this.drag !== null) {
      this.marked.hidden = false;
      this.marked.style.left = `${Math.min(x, this.drag)}px`;
      this.marked.style.width = `${Math.abs(x - this.drag)}px`;
    }
    const row = this.found?.rows[Math.floor((y - TOP) / ROW)];
    const piece = row?.pieces.findLast(([start, end]) => this.X(start) <= x + 1 && this.X(end) >= x - 1);
    this.tip.hidden = !piece;
    if (!piece) return;
    const [start, end, state] = piece;
    this.tip.replaceChildren(h("div", { class: "at" }, row.who), h("div", {}, `${state}, ${duration(end - start)}`), h("div", {}, `from ${clock(start)}`));
    this.tip.style.left = `${Math.min(x + 12, box.width - this.tip.offsetWidth)}px`;
    this.tip.style.top = `${y + 14}px`;
  }
}
