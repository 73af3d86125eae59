// Line charts as SVG: axes with round ticks and units, a band, a bound, points, values under the pointer or the arrow keys.

import { compact, h, number, s } from "./dom.js";

const PAD = { left: 52, right: 14, top: 10, bottom: 30 };

/** About `count` round values that cover [low, high]. */
export function ticks(low, high, count) {
  const span = high - low || Math.abs(high) || 1;
  const power = 10 ** Math.floor(Math.log10(span / count));
  const step = power * [1, 2, 5, 10].find((factor) => span / (power * factor) <= count);
  const out = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) out.push(+(i * step).toPrecision(12));
  return out;
}

export class Chart {
  /** spec: title, unit, lines [{metric, label, add: a metric that is the half width of a band}], bound(run), points(run), zero, cut: peaks. */
  constructor(spec) {
    this.spec = spec;
    this.legend = h("div", { class: "legend" });
    this.plot = h("div", { class: "plot", tabindex: "0", role: "img" });
    this.tip = h("div", { class: "tip", hidden: true });
    const unit = spec.unit ? h("span", { class: "unit" }, spec.unit) : "";
    this.root = h("section", { class: `card chart ${spec.wide ? "wide" : ""}` }, h("h2", {}, spec.title, unit, this.legend), this.plot);
    this.plot.append(this.tip);
    this.at = null;
    this.plot.addEventListener("pointermove", (event) => this.point(event.clientX - this.plot.getBoundingClientRect().left));
    this.plot.addEventListener("pointerleave", () => this.leave());
    this.plot.addEventListener("blur", () => this.leave());
    this.plot.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (move && this.scale) {
        const { x0, x1, left, width } = this.scale;
        const now = this.at ?? x1;
        const next = Math.min(x1, Math.max(x0, now + (move * (x1 - x0)) / 50));
        this.point(left + ((next - x0) / (x1 - x0 || 1)) * width);
        event.preventDefault();
      }
    });
    new ResizeObserver(() => this.runs && this.draw(this.runs)).observe(this.plot);
  }

  leave() {
    this.at = null;
    this.tip.hidden = true;
    this.cross?.setAttribute("visibility", "hidden");
  }

  /** What is drawn: a series per run and line, with x and y of every bucket that has a value. */
  series(runs) {
    const found = [];
    for (const run of runs) {
      const curves = run.curves;
      if (!curves) continue;
      this.spec.lines.forEach((line, index) => {
        const mean = curves.mean[line.metric] ?? [];
        const add = line.add && curves.mean[line.add];
        const points = [];
        mean.forEach((y, i) => {
          if (y === null || y === undefined) return;
          const low = add ? y - (add[i] ?? 0) : curves.least?.[line.metric][i] ?? y;
          const high = add ? y + (add[i] ?? 0) : curves.most?.[line.metric][i] ?? y;
          points.push({ x: Math.min((i + 0.5) * curves.width - 0.5, curves.last), y, low, high });
        });
        const colour = runs.length > 1 ? run.colour : `line-${index}`;
        const label = runs.length > 1 ? `${run.title}${this.spec.lines.length > 1 ? ` ${line.label}` : ""}` : line.label;
        if (points.length) found.push({ points, colour, label, dash: runs.length > 1 && index > 0 });
      });
      for (const [label, points] of Object.entries((this.spec.points && this.spec.points(run)) ?? {}))
        found.push({ points, colour: runs.length > 1 ? run.colour : "line-3", label, dots: true });
    }
    return found;
  }

  draw(runs) {
    this.runs = runs;
    const width = this.plot.clientWidth || 400;
    const height = this.plot.clientHeight || 190;
    const drawn = this.series(runs);
    const bounds = runs.map((run) => this.spec.bound && this.spec.bound(run)).filter((bound) => typeof bound === "number");
    this.legend.replaceChildren(...(drawn.length > 1 || bounds.length ? drawn.map((line) => h("span", { class: `key ${line.colour} ${line.dash ? "dash" : ""} ${line.dots ? "dots" : ""}` }, line.label)) : []));
    if (bounds.length) this.legend.append(h("span", { class: "key bound" }, "bound"));
    this.svg?.remove();
    this.scale = null;
    if (!drawn.length) {
      this.svg = s("svg", { width, height, "aria-hidden": "true" }, s("text", { x: width / 2, y: height / 2, class: "none" }, "no values yet"));
      this.plot.prepend(this.svg);
      return;
    }
    const all = drawn.flatMap((line) => line.points);
    const xs = all.map((point) => point.x);
    const x0 = Math.min(...xs), x1 = Math.max(...xs, x0 + 1);
    let y0 = Math.min(...all.map((point) => point.low), ...bounds, this.spec.zero ? 0 : Infinity);
    let y1 = Math.max(...all.map((point) => point.high), ...bounds);
    const usual = all.map((point) => point.high).sort((a, b) => a - b)[Math.floor(all.length * 0.95)] * 2;
    const cut = this.spec.cut && usual > y0 && y1 > 2 * usual;
    if (cut) {
      y1 = usual;
      this.legend.append(h("span", {}, "peaks are cut"));
    }
    const space = (y1 - y0 || Math.abs(y1) || 1) * 0.05;
    if (!(this.spec.zero && y0 === 0)) y0 -= space;
    y1 += space;
    const inner = { left: PAD.left, width: width - PAD.left - PAD.right, top: PAD.top, height: height - PAD.top - PAD.bottom };
    const X = (x) => inner.left + ((x - x0) / (x1 - x0)) * inner.width;
    const Y = (y) => inner.top + (1 - (Math.min(y, y1) - y0) / (y1 - y0)) * inner.height;
    this.scale = { x0, x1, left: inner.left, width: inner.width, drawn, Y, X };
    const axes = s("g", { class: "axes" });
    for (const tick of ticks(y0, y1, 4)) {
      axes.append(s("line", { x1: inner.left, x2: width - PAD.right, y1: Y(tick), y2: Y(tick) }));
      axes.append(s("text", { x: inner.left - 8, y: Y(tick) + 4, "text-anchor": "end" }, compact(tick)));
    }
    for (const tick of ticks(x0, x1, Math.max(2, Math.floor(inner.width / 90)))) {
      if (!Number.isInteger(tick)) continue;
      const near = X(tick) > width - 28;
      axes.append(s("text", { x: X(tick), y: height - 10, "text-anchor": near ? "end" : "middle" }, compact(tick)));
      axes.append(s("line", { class: "tick", x1: X(tick), x2: X(tick), y1: height - PAD.bottom, y2: height - PAD.bottom + 4 }));
    }
    axes.append(s("text", { x: 4, y: height - 10, class: "axis" }, "step"));
    const path = (points, of) => points.map((point, i) => `${i ? "L" : "M"}${X(point.x).toFixed(1)} ${Y(of(point)).toFixed(1)}`).join("");
    const bands = drawn.filter((line) => !line.dots && line.points.some((point) => point.high > point.low));
    const lines = drawn.map((line) =>
      line.dots
        ? s("g", { class: `points ${line.colour}` }, line.points.map((point) => [
            s("line", { x1: X(point.x), x2: X(point.x), y1: Y(point.low), y2: Y(point.high) }),
            s("circle", { cx: X(point.x), cy: Y(point.y), r: 4 })]).flat())
        : s("path", { class: `line ${line.colour} ${line.dash ? "dash" : ""}`, d: line.points.length > 1 ? path(line.points, (point) => point.y) : `M${X(line.points[0].x) - 2} ${Y(line.points[0].y)}h4` }));
    this.cross = s("g", { class: "cross", visibility: "hidden" });
    this.svg = s("svg", { width, height, "aria-hidden": "true" }, axes,
      bands.map((line) => s("path", { class: `band ${line.colour}`, d: `${path(line.points, (p) => p.high)}${path([...line.points].reverse(), (p) => p.low).replace("M", "L")}Z` })),
      [...new Set(bounds)].map((bound) => s("line", { class: "bound", x1: inner.left, x2: width - PAD.right, y1: Y(bound), y2: Y(bound) })),
      lines, this.cross);
    this.plot.prepend(this.svg);
    const last = drawn.map((line) => `${line.label} ${number(line.points.at(-1).y)}`).join(", ");
    this.plot.setAttribute("aria-label", `${this.spec.title}, steps ${number(Math.round(x0))} to ${number(Math.max(0, ...runs.map((run) => run.curves?.last ?? 0)))}, newest: ${last}`);
    if (this.at !== null) this.point(X(this.at));
  }

  point(px) {
    if (!this.scale) return;
    const { x0, x1, left, width, drawn, X, Y } = this.scale;
    const x = x0 + ((px - left) / width) * (x1 - x0);
    const rows = [];
    this.cross.replaceChildren();
    let nearest = null;
    for (const line of drawn) {
      let best = null;
      for (const point of line.points) if (best === null || Math.abs(point.x - x) < Math.abs(best.x - x)) best = point;
      if (line.dots && Math.abs(X(best.x) - px) > 12) continue;
      nearest ??= best.x;
      const range = best.high > best.low ? `  (${number(best.low)} to ${number(best.high)})` : "";
      rows.push(h("div", { class: `key ${line.colour} ${line.dash ? "dash" : ""}` }, `${line.label} `, h("b", {}, number(best.y)), range));
      this.cross.append(s("circle", { class: line.colour, cx: X(best.x), cy: Y(best.y), r: 3.5 }));
    }
    if (nearest === null) return;
    this.at = nearest;
    this.cross.prepend(s("line", { x1: X(nearest), x2: X(nearest), y1: PAD.top, y2: this.plot.clientHeight - PAD.bottom }));
    this.cross.setAttribute("visibility", "visible");
    this.tip.replaceChildren(h("div", { class: "at" }, `step ${number(Math.round(nearest))}`), ...rows);
    this.tip.hidden = false;
    const right = X(nearest) + this.tip.offsetWidth + 20 > this.plot.clientWidth;
    this.tip.style.left = `${Math.max(0, right ? X(nearest) - this.tip.offsetWidth - 12 : X(nearest) + 12)}px`;
  }
}
