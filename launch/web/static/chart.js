// Line charts by uPlot: bands, bounds, points with intervals, smoothing. All charts share the x axis, the crosshair and the zoom.

import { compact, duration, h, number } from "./dom.js";

const NEAR_PX = 12; // of a point to the pointer
const FONT = "11px system-ui, sans-serif";
const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500].flatMap((n) => [n, n * 1e3, n * 1e6, n * 1e9]).sort((a, b) => a - b);
const SECONDS = [1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800];

/** Seconds from a run's start to a Unix time; NaN where the time is not known. */
const after = ({ curves, state }, time_s) => (typeof time_s === "number" ? time_s - (state.started_s ?? curves.mean.time_s.find((known) => typeof known === "number")) : NaN);

/** What the x axis counts: how the value of a bucket is found, and how it is written. */
export const AXES = {
  step: { of: ({ curves }, i) => Math.min((i + 0.5) * curves.width - 0.5, curves.last), text: (x) => `step ${number(Math.round(x))}`, tick: compact, ticks: STEPS },
  time: { of: (run, i) => after(run, run.curves.mean.time_s[i]), text: (x) => `after ${duration(x)}`, tick: (x) => (x === 0 ? "0" : x >= 120 && x < 7200 ? `${+(x / 60).toFixed(1)} min` : duration(x)), ticks: SECONDS },
  tokens: { of: ({ curves }, i) => curves.mean.tokens_trained_total[i], text: (x) => `${compact(Math.round(x))} trained tokens`, tick: compact, ticks: STEPS },
};

/** What all charts share. zoom: [least, largest] x, or null; changed() draws them again. */
export const shared = { axis: "step", smoothing: 0, zoom: null, changed: () => {} };

/** Exponential moving average that begins with the first value; nulls stay. */
function smooth(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = sum * weight + value;
    total = total * weight + 1;
    return sum / total;
  });
}

/** [0, 1] if rewards of 0 to 1 can have all these means and deviations: variance <= mean (1 - mean), Bhatia and Davis 2000. */
function possible(means, deviations) {
  const fits = means.every((mean, i) => mean === null || (mean >= 0 && mean <= 1 && (deviations[i] ?? 0) ** 2 <= mean * (1 - mean) + 1e-6));
  return fits ? [0, 1] : [-Infinity, Infinity];
}

export class Chart {
  /** spec: title, unit, lines [{metric, label, add: a metric that is the half width of a band}], bound(run), points(run), zero, cut: peaks. */
  constructor(spec) {
    this.spec = spec;
    this.log = false;
    this.legend = h("div", { class: "legend" });
    this.plot = h("div", { class: "plot", tabindex: "0", role: "img" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.none = h("p", { class: "none" }, "no values yet");
    this.logButton = h("button", { type: "button", class: "small", "aria-pressed": "false", title: "Logarithmic axis", onclick: () => this.turnLog() }, "log");
    const unit = spec.unit ? h("span", { class: "unit" }, spec.unit) : "";
    this.root = h("section", { class: `card chart ${spec.wide ? "wide" : ""}` }, h("h2", {}, spec.title, unit, this.legend, this.logButton), this.plot);
    this.plot.append(this.none, this.tip);
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.plot.addEventListener("blur", () => this.u?.setCursor({ left: -10, top: -10 }, true, true));
    new ResizeObserver(() => this.u?.setSize(this.size())).observe(this.plot);
  }

  turnLog() {
    this.log = !this.log;
    this.logButton.setAttribute("aria-pressed", String(this.log));
    this.draw(this.runs);
  }

  size() {
    return { width: this.plot.clientWidth || 400, height: this.plot.clientHeight || 190 };
  }

  /** The lines and points of a run: {label, colour, dash, dots, x, y, low, high, raw}; low and high where there is a band. */
  lines(run, several) {
    const { curves } = run, found = [], axis = AXES[shared.axis];
    if (!curves) return found;
    this.spec.lines.forEach((line, index) => {
      const mean = curves.mean[line.metric] ?? [], add = line.add && curves.mean[line.add];
      const [least, most] = add ? possible(mean, add) : [];
      const x = [], y = [], low = [], high = [];
      mean.forEach((value, i) => {
        const at = axis.of(run, i);
        if (value === null || value === undefined || !Number.isFinite(at) || (this.log && value <= 0)) return;
        x.push(at);
        y.push(value);
        low.push(add ? Math.max(least, value - (add[i] ?? 0)) : curves.least?.[line.metric][i] ?? value);
        high.push(add ? Math.min(most, value + (add[i] ?? 0)) : curves.most?.[line.metric][i] ?? value);
      });
      if (!x.length) return;
      const label = several ? `${run.title}${this.spec.lines.length > 1 ? ` ${line.label}` : ""}` : line.label;
      const made = { label, colour: several ? run.colour : `line-${index}`, dash: several && index > 0, x, y, low, high, band: !this.log && low.some((value, i) => value < high[i]) };
      if (shared.smoothing) {
        made.raw = y;
        for (const name of ["y", "low", "high"]) made[name] = smooth(made[name], shared.smoothing);
      }
      found.push(made);
    });
    for (const [label, points] of Object.entries((this.spec.points && this.spec.points(run)) ?? {})) {
      const placed = points.map((point) => ({ ...point, x: this.place(run, point) })).filter(({ x }) => Number.isFinite(x)).sort((a, b) => a.x - b.x);
      const column = (name) => placed.map((point) => point[name]);
      if (placed.length) found.push({ label, colour: several ? run.colour : "line-3", dots: true, x: column("x"), y: column("y"), low: column("low"), high: column("high") });
    }
    return found;
  }

  /** x of an evaluation, which was after `step` steps. */
  place(run, { step, time_s }) {
    if (shared.axis === "step") return step;
    if (shared.axis === "time") return after(run, time_s);
    return step ? AXES.tokens.of(run, Math.floor((step - 1) / run.curves.width)) : 0;
  }

  draw(runs) {
    if (!runs) return;
    this.runs = runs;
    const drawn = (this.drawn = runs.flatMap((run) => this.lines(run, runs.length > 1)));
    this.none.hidden = drawn.length > 0;
    this.logButton.hidden = !drawn.length && !this.log; // a logarithmic axis may have left out every value
    if (!drawn.length) {
      this.u?.destroy();
      this.u = this.shape = null;
      this.legend.replaceChildren();
      return;
    }
    const bounds = [...new Set(runs.map((run) => this.spec.bound && this.spec.bound(run)).filter((bound) => typeof bound === "number"))];
    this.measure(bounds);
    const [x0, x1] = this.x, axis = AXES[shared.axis];
    const bands = drawn.filter(({ band }) => band).map((line) => [line.x, line.low, line.high]); // below all lines
    const raws = drawn.filter(({ raw }) => raw).map((line) => [line.x, line.raw]);
    const data = uPlot.join([...bands, ...raws, ...drawn.map((line) => [line.x, line.y]), ...bounds.map((bound) => [[x0, x1], [bound, bound]])]);
    const shape = JSON.stringify([drawn.map(({ label, colour, dash, dots, band, raw }) => [label, colour, dash, dots, band, Boolean(raw)]), bounds.length, this.log, shared.axis, document.documentElement.dataset.theme]);
    if (this.u && shape === this.shape) this.u.setData(data);
    else {
      this.u?.destroy();
      this.tip.hidden = true;
      this.u = new uPlot(this.options(bounds), data, this.plot);
      this.u.over.addEventListener("mouseenter", () => this.u.syncRect());
    }
    this.shape = shape;
    this.legend.replaceChildren(...(drawn.length > 1 || bounds.length ? drawn.map((line) => h("span", { class: `key ${line.colour} ${line.dash ? "dash" : ""} ${line.dots ? "dots" : ""}` }, line.label)) : []));
    if (bounds.length) this.legend.append(h("span", { class: "key bound" }, "bound"));
    if (this.peaks) this.legend.append(h("span", {}, "peaks are cut"));
    const newest = drawn.map((line) => `${line.label} ${number(line.y.at(-1))}`).join(", ");
    const first = Math.min(...drawn.map((line) => line.x[0])), last = Math.max(0, ...runs.map((run) => run.curves?.last ?? 0));
    const range = shared.axis === "step" ? `steps ${number(Math.round(first))} to ${number(last)}` : `over ${shared.axis}, step ${number(last)}`;
    const zoomed = shared.zoom ? `, shown ${shared.zoom.map((x) => axis.text(x)).join(" to ")}` : "";
    this.plot.setAttribute("aria-label", `${this.spec.title}, ${range}${zoomed}, newest: ${newest}`);
  }

  /** The ranges of both axes: x of all lines or the zoom, y of what is within. */
  measure(bounds) {
    const firsts = this.drawn.map((line) => line.x[0]), lasts = this.drawn.map((line) => line.x.at(-1));
    const x0 = Math.min(...firsts);
    this.x = shared.zoom ?? [x0, Math.max(...lasts, x0 + 1)];
    const lows = [...bounds], highs = [...bounds];
    for (const line of this.drawn) line.x.forEach((x, i) => {
      if (x < this.x[0] || x > this.x[1]) return;
      lows.push(line.band || line.dots ? line.low[i] : line.y[i]);
      highs.push(line.band || line.dots ? line.high[i] : line.y[i]);
    });
    let y0 = Math.min(...lows, this.spec.zero && highs.length && !this.log ? 0 : Infinity), y1 = Math.max(...highs);
    const usual = [...highs].sort((a, b) => a - b)[Math.floor(highs.length * 0.95)] * 2;
    this.peaks = this.spec.cut && !this.log && usual > y0 && y1 > 2 * usual;
    if (this.peaks) y1 = usual;
    if (this.log) this.y = Number.isFinite(y0) ? uPlot.rangeLog(y0 > 0 ? y0 : y1 / 1000, y1, 10, false) : [1, 10];
    else if (!Number.isFinite(y0)) this.y = [0, 1];
    else {
      const space = (y1 - y0 || Math.abs(y1) || 1) * 0.06;
      this.y = [this.spec.zero && y0 === 0 ? 0 : y0 - space, y1 + space];
    }
  }

  options(bounds) {
    const style = getComputedStyle(this.plot), colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const paint = (line) => colour(`c${line.colour.split("-")[1]}`);
    const quiet = colour("quiet"), axis = AXES[shared.axis], series = [{}], bands = [];
    const hidden = { stroke: "transparent", points: { show: false } };
    for (const line of this.drawn) if (line.band) {
      series.push({ ...hidden }, { ...hidden });
      bands.push({ series: [series.length - 1, series.length - 2], fill: `${paint(line)}2b` });
    }
    for (const line of this.drawn) if (line.raw) series.push({ stroke: `${paint(line)}55`, width: 1, points: { show: false } });
    this.drawn.forEach((line, index) => {
      const stroke = paint(line);
      const points = line.dots ? { show: true, size: 8, width: 2, stroke, fill: colour("card") } : { show: () => this.drawn[index].x.length < 2, size: 8, fill: stroke };
      series.push({ stroke, width: line.dots ? 0 : 1.7, dash: line.dash ? [5, 3] : undefined, points, paths: line.dots ? () => null : undefined });
    });
    for (const _ of bounds) series.push({ stroke: colour("bad"), width: 1, dash: [6, 4], points: { show: false } });
    return {
      ...this.size(), series, bands,
      padding: [8, 12, 0, 0],
      legend: { show: false },
      scales: { x: { time: false, range: () => this.x }, y: { distr: this.log ? 3 : 1, range: () => this.y } },
      axes: [
        { stroke: quiet, font: FONT, size: 28, space: 70, incrs: axis.ticks, grid: { show: false }, ticks: { stroke: colour("line"), size: 4, width: 1 }, values: (_, at) => at.map(axis.tick) },
        { stroke: quiet, font: FONT, size: 52, space: 34, grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false }, values: (_, at) => at.map((value) => (value === null ? "" : compact(value))) },
      ],
      cursor: {
        y: false,
        points: { show: false },
        drag: { x: true, y: false, setScale: false },
        sync: { key: "charts", scales: ["x", null], filters: { pub: (type) => type === "mousemove" } },
        bind: { dblclick: () => () => this.zoom(null) },
      },
      hooks: { draw: [(u) => this.intervals(u, paint)], setCursor: [(u) => this.point(u)], setSelect: [(u) => this.selected(u)] },
    };
  }

  /** The vertical lines of evaluations. */
  intervals(u, paint) {
    const { ctx } = u;
    ctx.save();
    for (const line of this.drawn) if (line.dots) line.x.forEach((value, i) => {
      if (value < this.x[0] || value > this.x[1]) return;
      const x = u.valToPos(value, "x", true), centre = u.valToPos(line.y[i], "y", true), room = 4 * uPlot.pxRatio;
      ctx.strokeStyle = paint(line);
      ctx.lineWidth = 1.5 * uPlot.pxRatio;
      ctx.beginPath();
      for (const [end, from] of [[line.low[i], centre + room], [line.high[i], centre - room]]) {
        const to = u.valToPos(end, "y", true);
        if (Math.abs(to - centre) > room) { ctx.moveTo(x, from); ctx.lineTo(x, to); }
      }
      ctx.stroke();
    });
    ctx.restore();
  }

  selected(u) {
    const { left, width } = u.select;
    if (width < 4) return;
    this.zoom([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
    for (const other of uPlot.sync("charts").plots) other.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  zoom(range) {
    shared.zoom = range;
    shared.changed();
  }

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !this.u) return;
    const width = this.u.over.clientWidth, now = this.u.cursor.left < 0 ? width : this.u.cursor.left;
    this.u.setCursor({ left: Math.min(width, Math.max(0, now + (move * width) / 50)), top: 20 }, true, true);
    event.preventDefault();
  }

  /** The values at the crosshair, in every chart that has it. */
  point(u) {
    const { left } = u.cursor;
    this.tip.hidden = true;
    if (typeof left !== "number" || left < 0) return;
    const wanted = u.posToVal(left, "x"), rows = [];
    let at = null;
    for (const line of this.drawn) {
      let best = 0;
      line.x.forEach((x, i) => { if (Math.abs(x - wanted) < Math.abs(line.x[best] - wanted)) best = i; });
      if (line.dots && Math.abs(u.valToPos(line.x[best], "x") - left) > NEAR_PX) continue;
      at ??= line.x[best];
      const range = (line.band || line.dots) && line.high[best] > line.low[best] ? `  (${number(line.low[best])} to ${number(line.high[best])})` : "";
      rows.push(h("div", { class: `key ${line.colour} ${line.dash ? "dash" : ""}` }, `${line.label} `, h("b", {}, number(line.y[best])), range));
    }
    if (at === null) return;
    this.tip.replaceChildren(h("div", { class: "at" }, AXES[shared.axis].text(at)), ...rows);
    this.tip.hidden = false;
    const start = u.over.offsetLeft + left, room = this.plot.clientWidth;
    this.tip.style.left = `${Math.max(0, start + this.tip.offsetWidth + 16 > room ? start - this.tip.offsetWidth - 12 : start + 12)}px`;
  }
}
